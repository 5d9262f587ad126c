// Head, facts and figures, and the start: the layer named in the address, else the first that reuses a selection.
function drawFacts() {
  const { inspect, report } = DATA;
  $("h1").textContent = inspect.engine.split("/").pop();
  $("h1").title = `${inspect.engine}, made by v41c ${inspect.v41c_version}`;
  $("h1").append(h("small", {}, `${inspect.target} · ${inspect.arithmetic}`));
  const last = inspect.passes.length - 1;
  const fact = (value, what) => h("li", {}, h("b", {}, value), h("span", { class: "what" }, what));
  $("#facts").append(
    fact(num("inspect/config/n_layers"), `layers of width ${exact(inspect.config.dim)}`),
    fact(num("report/backbone_parameters", "short"), `parameters, ${short(report.active_parameters_total)} active`),
    fact(
      num("inspect/weight_bytes", "bytes"),
      inspect.has_weights ? `of weights, ${inspect.weights} tensors` : "compiled without weights",
    ),
    fact(num(`inspect/passes/${last}/launches`), `launches a token, ${inspect.kernels} kernels`),
    fact(num(`inspect/passes/${last}/flops`, "flop"), "for one token at the full context"),
    fact(num("inspect/state_bytes_per_token", "bytes"), `of state a token, ${bytes(inspect.state_slot_bytes)} in all`),
    fact(num(`inspect/passes/${last}/peak_bytes`, "bytes"), "of activations for a chunk"),
  );
}

function drawFigures() {
  for (const [key, source] of Object.entries(DATA.report.sources)) {
    $("#figures .grid").append(
      h(
        "div",
        {},
        h("span", { class: "what" }, DATA.titles[key]),
        h("br"),
        h("b", {}, num(`report/${key}`)),
        ` ${DATA.units[key]}`,
        h("p", {}, source),
      ),
    );
  }
}

drawFacts();
drawMap();
drawPipeline();
drawCosts();
setUpLayer();
drawMemory();
drawFigures();
setUpSearch();
watchers.push((before) => {
  if (before.layer && before.layer !== view.layer) history.replaceState(null, "", `#${view.layer}`);
});
const named = () => (LAYER[location.hash.slice(1)] ? location.hash.slice(1) : null);
show({ layer: named() || (LAYERS.find((layer) => layer.mode === "reuse") || LAYERS[0]).name });
addEventListener("hashchange", () => {
  if (named()) show({ layer: named(), operation: null });
});
