// The layer map: a row per graph, a box per layer, and buses from the layers that make rows, selections and candidates
// to those that use them.
const BUSES = [
  { key: "kv_source", name: "compressed rows and index keys", color: "var(--full)", side: -1, lift: 16 },
  { key: "index_source", name: "selection", color: "var(--reindex)", side: 1, lift: 30 },
  { key: "candidate_source", name: "candidates", color: "var(--engram)", side: 1, lift: 44 },
];

function drawMap() {
  const parts = [...new Set(LAYERS.map((layer) => layer.part))];
  const rows = parts.map((part) => LAYERS.filter((layer) => layer.part === part));
  const step = Math.min(140, 1130 / Math.max(...rows.map((row) => row.length)));
  const [left, height, box] = [118, 152, { width: step - Math.min(14, step * 0.2), height: 44 }];
  const place = {};
  rows.forEach((row, y) =>
    row.forEach((layer, x) => {
      place[layer.name] = { x: left + x * step, y: 46 + y * height };
    }),
  );
  const middle = (name) => place[name].x + box.width / 2;
  const svg = s("svg", {
    viewBox: `0 0 ${left + 1130} ${rows.length * height - (parts[parts.length - 1] === "draft" ? 44 : 0)}`,
    role: "img",
    "aria-label": "Layers",
  });

  rows.forEach((row, y) => {
    const top = 46 + y * height;
    svg.append(s("text", { x: 0, y: top + 19, style: "font-size:14px;font-weight:600" }, parts[y]));
    svg.append(s("text", { x: 0, y: top + 35, class: "dim" }, `${row.length} layers`));
    if (y + 1 < rows.length) svg.append(...passage(parts[y], parts[y + 1], top + box.height, top + height));
  });
  for (const bus of BUSES) svg.append(...buses(bus, place, middle, box));
  LAYERS.forEach((layer) => svg.append(layerBox(layer, place[layer.name], box)));
  $("#map .panel").append(mapLegend(), svg);
  $("#map .lead").textContent = mapLead();

  const related = (name) => {
    const layer = LAYER[name];
    const sources = BUSES.map((bus) => layer[bus.key]);
    const readers = LAYERS.filter((other) => BUSES.some((bus) => other[bus.key] === name)).map((other) => other.name);
    return new Set([name, ...sources, ...readers]);
  };
  const dim = (name) => {
    const near = name && related(name);
    svg
      .querySelectorAll(".box")
      .forEach((one) => one.classList.toggle("off", Boolean(near) && !near.has(one.dataset.layer)));
    svg.querySelectorAll(".bus").forEach((one) => {
      const touched = near && (one.dataset.source === name || LAYER[name][one.dataset.kind] === one.dataset.source);
      one.classList.toggle("off", Boolean(near) && !touched);
    });
  };
  svg.addEventListener("pointerover", (event) => dim(event.target.closest(".box")?.dataset.layer));
  svg.addEventListener("pointerleave", () => dim(null));
  watchers.push(() =>
    svg.querySelectorAll(".box").forEach((one) => one.classList.toggle("chosen", one.dataset.layer === view.layer)),
  );
}

function layerBox(layer, { x, y }, box) {
  const label = layer.mode + (layer.ratio ? ` ÷${layer.ratio}` : "");
  const badges = [
    layer.engram ? ["Engram", "var(--engram)"] : null,
    layer.draft_target ? ["draft", "var(--draft)"] : null,
  ];
  return s(
    "g",
    {
      class: "box",
      "data-layer": layer.name,
      tabindex: 0,
      role: "button",
      "aria-label": layer.name,
      "data-tip": layerTip(layer),
      onclick: () => {
        show({ layer: layer.name, operation: null });
        goTo("layer");
      },
      onkeydown: (event) => {
        if (event.key === "Enter") show({ layer: layer.name, operation: null });
      },
    },
    s("rect", { x, y, width: box.width, height: box.height, rx: 7, fill: "var(--panel)" }),
    s("rect", {
      class: "frame",
      x,
      y,
      width: box.width,
      height: box.height,
      rx: 7,
      fill: `var(--${layer.mode})`,
      "fill-opacity": 0.16,
      stroke: `var(--${layer.mode})`,
    }),
    s(
      "text",
      { x: x + box.width / 2, y: y + 19, "text-anchor": "middle", style: "font-weight:650;font-size:13px" },
      number(layer.name),
    ),
    s(
      "text",
      {
        x: x + box.width / 2,
        y: y + 34,
        "text-anchor": "middle",
        class: "dim",
        style: `font-size:${Math.min(11, (1.7 * box.width) / label.length)}px`,
      },
      label,
    ),
    badges.filter(Boolean).map(([name, color], index) =>
      s("circle", {
        cx: x + 5 + index * 11,
        cy: y,
        r: 5,
        fill: color,
        stroke: "var(--panel)",
        "stroke-width": 1.5,
        "data-name": name,
      }),
    ),
  );
}

function layerTip(layer) {
  const lines = [`${layer.name} · ${layer.mode} · ${layer.part}`, layerSentence(layer)];
  lines.push(
    `${layer.launches} launches, ${flop(layer.decode.flops)} a token, ${bytes(layer.weight_bytes)} of weights`,
  );
  return lines.join("\n");
}

function layerSentence(layer) {
  const own = (source) => (source === layer.name ? "its own" : `those of ${source}`);
  const said = ["attends to its window"];
  if (layer.kv_source) {
    const selection =
      layer.index_source === layer.name ? "that it selects itself" : `that ${layer.index_source} selected`;
    said[0] += ` and to compressed rows (${own(layer.kv_source)}, one for ${layer.ratio} token${layer.ratio > 1 ? "s" : ""}) ${selection}`;
  }
  if (layer.candidate_source) said.push(`scores only the candidates of ${layer.candidate_source}`);
  if (layer.engram) said.push("adds an Engram lookup");
  if (layer.draft_target) said.push("its input goes to the draft head");
  return `${said.join("; ")}.`;
}

function buses(bus, place, middle, box) {
  const sources = [...new Set(LAYERS.map((layer) => layer[bus.key]).filter(Boolean))];
  return sources.flatMap((source) => {
    const readers = LAYERS.filter((layer) => layer[bus.key] === source && layer.name !== source).map(
      (layer) => layer.name,
    );
    if (!readers.length) return [];
    const edge = (name) => place[name].y + (bus.side > 0 ? box.height : 0);
    const level = edge(source) + bus.side * bus.lift;
    const offset = bus.key === "candidate_source" ? 6 : 0;
    const ends = [source, ...readers].map((name) => middle(name) + offset);
    const lines = [`M${Math.min(...ends)},${level}H${Math.max(...ends)}`];
    for (const name of [source, ...readers]) lines.push(`M${middle(name) + offset},${level}V${edge(name)}`);
    const group = s(
      "g",
      { class: "bus", "data-source": source, "data-kind": bus.key, stroke: bus.color },
      s("path", { d: lines.join("") }),
      s("circle", {
        cx: middle(source) + offset,
        cy: edge(source) + bus.side * 5,
        r: 4,
        fill: bus.color,
        stroke: "none",
      }),
    );
    for (const name of readers) {
      const [x, y] = [middle(name) + offset, edge(name)];
      group.append(
        s("path", { d: `M${x - 3.5},${y + bus.side * 6}L${x},${y}L${x + 3.5},${y + bus.side * 6}`, fill: "none" }),
      );
    }
    return [group];
  });
}

// How one graph hands over to the next.
function passage(from, to, top, bottom) {
  const what = to === "draft" ? "the streams that enter the layers marked draft" : "residual stream and its mix";
  const y = (top + bottom) / 2 + 26;
  return [
    s("path", { d: `M20,${top + 2}V${bottom + 40}`, stroke: "var(--line)", "stroke-width": 1.5 }),
    s("text", { x: 28, y: y - 12, class: "dim" }, what),
  ];
}

function mapLegend() {
  const item = (color, name) => h("span", {}, h("i", { style: `background:${color}` }), name);
  return h(
    "div",
    { class: "legend" },
    MODES.filter((mode) => LAYERS.some((layer) => layer.mode === mode)).map((mode) => item(`var(--${mode})`, mode)),
    BUSES.map((bus) =>
      h("span", {}, h("i", { style: `background:${bus.color};height:2px;width:16px;vertical-align:middle` }), bus.name),
    ),
    item("var(--engram);border-radius:50%", "Engram"),
    item("var(--draft);border-radius:50%", "seen by the draft head"),
  );
}

function mapLead() {
  const count = (mode) => LAYERS.filter((layer) => layer.mode === mode && layer.part !== "draft").length;
  const said = MODES.filter(count)
    .map((mode) => `${count(mode)} ${mode}`)
    .join(", ");
  return `${said}. Hover over a layer to see who feeds it and whom it feeds; click for its operations. Prefill: ${DATA.inspect.prefill_ced}.`;
}
