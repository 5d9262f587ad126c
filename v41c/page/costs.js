// What every layer costs, as bars: one token or a chunk of a prompt.
const METRICS = {
  flops: ["arithmetic", "flop"],
  weight_bytes: ["weights read", "bytes"],
  state_bytes: ["states", "bytes"],
  activation_bytes: ["activations", "bytes"],
  launches: ["launches", "exact"],
};
const STEPS = { decode: "one token", chunk: "a chunk" };

function drawCosts() {
  let metric = "flops";
  const panel = $("#costs .panel");
  const columns = [
    ...LAYERS.map((layer, index) => ({
      name: layer.name,
      label: number(layer.name),
      color: `var(--${layer.mode})`,
      path: `inspect/layers/${index}`,
      part: layer.part,
    })),
    ...Object.keys(DATA.inspect.outside).map((name) => ({
      name: `rest of ${name}`,
      label: name.replace("draft_context", "context"),
      color: "var(--faint)",
      path: `inspect/outside/${name}`,
      part: "rest",
    })),
  ];
  const draw = () => {
    const [title, kind] = METRICS[metric];
    const path = (column) => `${column.path}/${view.step}/${metric}`;
    const most = Math.max(1, ...columns.map((column) => at(path(column))));
    const [width, height, bottom] = [1200, 250, 42];
    const step = (width - 106) / columns.length;
    const svg = s("svg", {
      viewBox: `0 0 ${width} ${height + bottom}`,
      role: "img",
      "aria-label": `${title} by layer`,
    });
    for (const share of [0.25, 0.5, 0.75, 1]) {
      const y = height - share * (height - 24);
      svg.append(
        s("path", { d: `M80,${y}H${width - 16}`, stroke: "var(--line)" }),
        s(
          "text",
          { x: 72, y: y + 4, "text-anchor": "end", class: "dim" },
          WRITE[kind](kind === "exact" ? Math.round(most * share) : most * share),
        ),
      );
    }
    columns.forEach((column, index) => {
      const value = at(path(column));
      const x = 86 + index * step;
      const tall = (value / most) * (height - 24);
      svg.append(
        s(
          "g",
          {
            class: "column",
            "data-tip": `${column.name}\n${title}: ${WRITE[kind](value)} (${exact(value)})`,
            onclick: () => LAYER[column.name] && show({ layer: column.name, operation: null }),
          },
          s("rect", { x, y: 0, width: step, height: height + bottom, fill: "transparent" }),
          s("rect", {
            class: "value",
            x: x + step * 0.14,
            y: height - tall,
            width: step * 0.72,
            height: tall,
            rx: Math.min(3, tall / 2),
            fill: column.color,
            opacity: column.name === view.layer ? 1 : 0.78,
            ...marks(path(column)),
          }),
          label(column, x + step / 2, height + 16, step),
        ),
      );
      if (index && columns[index - 1].part !== column.part)
        svg.append(s("path", { d: `M${x},20V${height + 6}`, stroke: "var(--line)", "stroke-dasharray": "2 4" }));
    });
    svg.append(s("path", { d: `M80,${height}H${width - 16}`, stroke: "var(--faint)" }));
    panel.replaceChildren(svg);
  };
  const label = (column, x, y, step) =>
    column.label.length * 6 < step
      ? s("text", { x, y, "text-anchor": "middle", class: "dim" }, column.label)
      : s(
          "text",
          { x, y: y - 4, transform: `rotate(32 ${x} ${y - 4})`, class: "dim", style: "font-size:9px" },
          column.label,
        );
  const sum = () => {
    const backbone = columns.filter((column) => column.part !== "draft" && !column.name.startsWith("rest of draft"));
    const total = backbone.reduce((whole, column) => whole + at(`${column.path}/${view.step}/${metric}`), 0);
    return `${METRICS[metric][0]}, backbone: ${WRITE[METRICS[metric][1]](total)}`;
  };
  const total = h("span", { class: "legend" });
  const redraw = () => {
    draw();
    total.textContent = sum();
  };
  $("#costs .bar").append(
    choice(
      Object.keys(METRICS),
      metric,
      (value) => {
        metric = value;
        redraw();
      },
      (value) => METRICS[value][0],
    ),
    choice(
      Object.keys(STEPS),
      view.step,
      (value) => show({ step: value }),
      (value) => STEPS[value],
    ),
    total,
  );
  watchers.push(redraw);
}
