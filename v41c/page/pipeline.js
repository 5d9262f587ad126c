// The pipeline: the ledger with a meter in every cell, and under each pass what it changed.
const COLUMNS = [
  ["operations", "operations", "exact"],
  ["launches", "launches", "exact"],
  ["flops", "arithmetic", "flop"],
  ["weight_bytes", "weights", "bytes"],
  ["state_bytes", "states", "bytes"],
  ["activation_bytes", "activations", "bytes"],
  ["peak_bytes", "peak memory", "bytes"],
];

function drawPipeline() {
  const passes = DATA.inspect.passes;
  const columns = passes.some((row) => row.seconds !== null) ? [...COLUMNS, ["seconds", "seconds", "exact"]] : COLUMNS;
  const most = Object.fromEntries(columns.map(([key]) => [key, Math.max(...passes.map((row) => row[key] || 0))]));
  const body = h("tbody", {});
  passes.forEach((row, index) => {
    const change = index ? DATA.changes[index - 1] : null;
    const line = h(
      "tr",
      { class: change ? "pass" : "", "data-pass": row.name, onclick: () => change && toggle(line, change) },
      h("td", {}, h("b", {}, row.name)),
      columns.map(([key, , kind]) =>
        h(
          "td",
          {},
          index ? delta(row[key], passes[index - 1][key], kind) : null,
          row[key] === null ? "" : num(`inspect/passes/${index}/${key}`, kind),
          h("div", { class: "meter", style: `width:${(most[key] ? (100 * row[key]) / most[key] : 0).toFixed(1)}%` }),
        ),
      ),
    );
    body.append(line);
  });
  const head = h(
    "tr",
    {},
    h("th", {}, "after"),
    columns.map(([, title]) => h("th", {}, title)),
  );
  const panel = $("#pipeline .panel");
  panel.classList.add("scroll");
  panel.append(h("table", {}, h("thead", {}, head), body));

  function toggle(line, change) {
    const open = line.classList.toggle("open");
    if (open)
      line.after(h("tr", {}, h("td", { class: "change", colspan: columns.length + 1 }, change.graphs.map(drawChange))));
    else line.nextSibling.remove();
  }
}

function delta(now, before, kind) {
  if (now === null || WRITE[kind](now) === WRITE[kind](before)) return null;
  const text = `${now < before ? "−" : "+"}${WRITE[kind](Math.abs(now - before))}`;
  return h("span", { class: `num delta ${now < before ? "less" : "more"}` }, `${text} `);
}

function drawChange(graph) {
  const names = [graph.before.join(", "), graph.after.join(", ")];
  const change = ([before, after]) => (before === after ? `${after}` : `${before} → ${after}`);
  const said = [`operations ${change(graph.nodes)}`, `launches ${change(graph.launches)}`];
  if (graph.kernels[0] !== graph.kernels[1]) said.push(`kernels chosen for ${graph.kernels[1]}`);
  if (graph.placed[0] !== graph.placed[1]) said.push(`${graph.placed[1]} results placed in the arena`);
  if (!graph.lines.length) said.push("every operation as before");
  const kind = { "+": "plus", "-": "minus", "@": "hunk" };
  return h(
    "div",
    {},
    h("b", {}, names[0] === names[1] ? names[0] : names.join(" → ")),
    ` · ${said.join(", ")}`,
    h(
      "div",
      { class: "chips" },
      Object.entries(graph.operations).map(([op, pair]) =>
        h(
          "span",
          { class: "chip" },
          `${op} `,
          h("b", { class: pair[1] < pair[0] ? "less" : "more" }, `${pair[0]} → ${pair[1]}`),
        ),
      ),
    ),
    graph.lines.length
      ? h(
          "pre",
          { class: "diff mono" },
          graph.lines.map((line) => h("span", { class: kind[line[0]] || "" }, line)),
        )
      : null,
  );
}
