// Beside and under the graphs: the layer or the chosen operation in full, and all operations as a table.
function drawTable(operations, layer) {
  $("#layer summary").textContent = `All ${operations.length} operations as a table`;
  const row = (operation) =>
    h(
      "tr",
      { "data-operation": operation.path, onclick: () => show({ operation }) },
      h("td", {}, h("b", {}, operation.op)),
      h("td", { class: "left" }, plain(operation.module, layer)),
      h("td", { class: "left mono" }, plain(operation.results[operation.results.length - 1], layer)),
      h("td", { class: "left" }, operation.made_by),
      ["launches", "flops", "weight_bytes", "state_bytes", "activation_bytes"].map((key) =>
        h(
          "td",
          {},
          num(`${operation.path}/cost/${key}`, key === "launches" ? "exact" : key === "flops" ? "flop" : "bytes"),
        ),
      ),
    );
  const titles = [
    "operation",
    "module",
    "result",
    "made by",
    "launches",
    "arithmetic",
    "weights",
    "states",
    "activations",
  ];
  $("#layer details .panel").replaceChildren(
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          titles.map((title, index) => h("th", { class: index < 4 ? "left" : "" }, title)),
        ),
      ),
      h("tbody", {}, operations.map(row)),
    ),
  );
}

// The panel beside the graph: the layer, or the chosen operation.
function drawOperation() {
  const operation = view.operation;
  const lit = (edge) =>
    operation &&
    edge.dataset.graph === operation.graph &&
    [edge.dataset.from, edge.dataset.to].includes(String(operation.index));
  document.querySelectorAll("#layer .edge").forEach((edge) => edge.classList.toggle("lit", Boolean(lit(edge))));
  document
    .querySelectorAll("#layer [data-operation]")
    .forEach((one) => one.classList.toggle("chosen", Boolean(operation) && one.dataset.operation === operation.path));
  $("#layer aside").replaceChildren(...(operation ? operationPanel(operation) : layerPanel()));
}

const term = (title, ...values) => [h("dt", {}, title), h("dd", {}, values)];
const COST_TERMS = [
  ["flops", "arithmetic", "flop"],
  ["weight_bytes", "weights", "bytes"],
  ["state_bytes", "states", "bytes"],
  ["activation_bytes", "activations", "bytes"],
];

function layerPanel() {
  const path = LAYER_PATH[view.layer];
  const layer = LAYER[view.layer];
  return [
    h("h3", {}, view.layer),
    h(
      "dl",
      {},
      term("mode", layer.mode),
      term("launches", num(`${path}/launches`)),
      term("weights stored", num(`${path}/weight_bytes`, "bytes")),
    ),
    ...Object.keys(STEPS).flatMap((step) => [
      h("b", {}, STEPS[step]),
      h(
        "dl",
        {},
        COST_TERMS.map(([key, title, kind]) => term(title, num(`${path}/${step}/${key}`, kind))),
      ),
    ]),
    h("b", {}, "operations by the pass that made them"),
    h(
      "dl",
      {},
      Object.keys(layer.made_by).map((name) => term(name, num(`${path}/made_by/${name}`))),
    ),
    h("p", { class: "lead" }, "Click an operation for its operands, kernel and costs."),
  ];
}

function operationPanel(operation) {
  const list = (title, entries) => (entries.length ? [h("b", {}, title), h("ul", { class: "mono" }, entries)] : []);
  const operands = operation.operands
    .map((name, index) => (name === null ? null : h("li", {}, name, h("em", {}, ` ${operation.roles[index]}`))))
    .filter(Boolean);
  const attributes = operation.attributes.slice(1, -1);
  return [
    h("h3", {}, operation.op),
    h("div", { class: "lead" }, operation.module),
    h(
      "dl",
      {},
      term("graph", operation.graph),
      term("made by", operation.made_by),
      operation.kernel ? term("kernel", h("code", {}, operation.kernel)) : term("kernel", "none: a view"),
      COST_TERMS.map(([key, title, kind]) => term(title, num(`${operation.path}/cost/${key}`, kind))),
    ),
    ...list(
      "stands for",
      operation.parts.map((part) => h("li", {}, part)),
    ),
    ...list(
      "results",
      operation.results.map((result) => h("li", {}, result)),
    ),
    ...list("operands", operands),
    ...list(
      "attributes",
      attributes ? [h("li", {}, attributes.length > 400 ? `${attributes.slice(0, 400)}…` : attributes)] : [],
    ),
  ];
}

function setUpLayer() {
  const names = LAYERS.map((layer) => layer.name);
  const turn = (by) => {
    const index = Math.max(0, Math.min(names.length - 1, names.indexOf(view.layer) + by));
    show({ layer: names[index], operation: null });
  };
  const select = h(
    "select",
    { "aria-label": "Layer", onchange: (event) => show({ layer: event.target.value, operation: null }) },
    names.map((name) => h("option", { value: name }, `${name} · ${LAYER[name].mode}`)),
  );
  const steps = h("span", {});
  $("#layer .bar").append(
    h("button", { type: "button", onclick: () => turn(-1), "aria-label": "previous layer" }, "←"),
    select,
    h("button", { type: "button", onclick: () => turn(1), "aria-label": "next layer" }, "→"),
    steps,
  );
  watchers.push((before) => {
    select.value = view.layer;
    if (before.step !== view.step || !steps.firstChild) {
      steps.replaceChildren(
        choice(
          Object.keys(STEPS),
          view.step,
          (value) => show({ step: value, operation: null }),
          (value) => STEPS[value],
        ),
      );
    }
    if (before.layer !== view.layer || before.step !== view.step) drawLayer();
    else if (before.operation !== view.operation) drawOperation();
  });
}
