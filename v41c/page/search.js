// Search over layers, operations, values, states, weights and kernels.
function setUpSearch() {
  const input = $("#search input");
  const list = $("#search ol");
  const entries = LAYERS.map((layer) => ({ kind: "layer", text: `${layer.name} ${layer.mode}`, layer: layer.name }));
  const seen = new Set();
  const add = (kind, text, operation) => {
    if (seen.has(`${kind} ${text} ${operation.layer}`)) return;
    seen.add(`${kind} ${text} ${operation.layer}`);
    entries.push({ kind, text, layer: operation.layer, operation });
  };
  for (const operation of graphsOf("decode")
    .flatMap((graph) => graph.operations)
    .filter((one) => one.layer)) {
    add("operation", `${operation.op} ${operation.module}`, operation);
    operation.results.forEach((result) => add("value", result, operation));
    operation.operands.forEach((name, index) => {
      if (name && operation.roles[index] !== "activation") add(operation.roles[index], name, operation);
    });
    if (operation.kernel) add("kernel", operation.kernel, operation);
  }
  let found = [];
  const search = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    found = words.length
      ? entries.filter((entry) => words.every((word) => `${entry.kind} ${entry.text}`.toLowerCase().includes(word)))
      : [];
    list.hidden = !words.length;
    list.replaceChildren(
      ...found
        .slice(0, 40)
        .map((entry, index) =>
          h(
            "li",
            { class: index ? "" : "first", onmousedown: () => open(entry) },
            h("span", {}, entry.kind),
            h("b", {}, entry.text),
          ),
        ),
      found.length > 40 || !found.length
        ? h(
            "li",
            {},
            h("span", {}),
            h("b", { class: "dim" }, found.length ? `${found.length - 40} more` : "nothing found"),
          )
        : "",
    );
  };
  const open = (entry) => {
    list.hidden = true;
    input.blur();
    show({ step: "decode", layer: entry.layer, operation: entry.operation || null });
    goTo("layer");
  };
  input.addEventListener("input", search);
  input.addEventListener("focus", search);
  input.addEventListener("blur", () => {
    list.hidden = true;
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && found.length) open(found[0]);
    if (event.key === "Escape") input.blur();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== input) {
      event.preventDefault();
      input.focus();
    }
  });
}
