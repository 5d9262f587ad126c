// The operations of one layer as graphs, one lane for each sublayer; drag to move, buttons or ctrl and wheel to zoom.
const LANES = { engram: "Engram", attn: "attention", ffn: "experts" };
const NODE = { width: 140, height: 42, part: 14 };
const HIDDEN = new Set(["positions", "slots", "first", "rows", "tokens", "run_starts", "image_mask"]);

const GRAPHS = DATA.graphs.map((graph, index) => ({ ...graph, index, bare: bare(graph.name) }));
for (const graph of GRAPHS) {
  graph.producer = new Map();
  graph.users = new Map();
  graph.operations.forEach((operation, index) => {
    operation.path = `graphs/${graph.index}/operations/${index}`;
    operation.names = operation.results.map((result) => result.split(": ")[0]);
    operation.names.forEach((name) => graph.producer.set(name, operation));
    operation.operands.forEach((name) => {
      if (!graph.users.has(name)) graph.users.set(name, []);
      graph.users.get(name).push(operation);
    });
  });
}

// The graphs of a step: of one token, or of a chunk.
function graphsOf(step) {
  const tokens = (graph) => Number(graph.name.split(":")[1] || 0);
  const chosen = new Map();
  for (const graph of GRAPHS) {
    const known = chosen.get(graph.bare);
    if (!known || (step === "decode" ? tokens(graph) < tokens(known) : tokens(graph) > tokens(known))) chosen.set(graph.bare, graph);
  }
  return [...chosen.values()];
}

function lanesOf(layer, step) {
  const lanes = new Map();
  for (const graph of graphsOf(step)) {
    const own = graph.operations.filter((operation) => operation.layer === layer);
    const key = (operation) => {
      const inside = operation.module.slice(layer.length + 1);
      return inside ? (inside.startsWith("engram") ? "engram" : inside.startsWith("ffn") ? "ffn" : "attn") : null;
    };
    own.forEach((operation, index) => {
      const lane = key(operation) || own.slice(index).map(key).find(Boolean) || "ffn";
      const name = `${graph.bare}/${lane}`;
      if (!lanes.has(name)) lanes.set(name, { graph, title: `${LANES[lane]}, ${graph.bare}`, operations: [] });
      lanes.get(name).operations.push(operation);
    });
  }
  return [...lanes.values()];
}

const plain = (name, layer) => (name.startsWith(`${layer}.`) ? name.slice(layer.length + 1) : name);
const laneHeight = (operation) => NODE.height + NODE.part * operation.parts.length;

// Nodes and edges of a lane: its operations, and pills for what comes from and goes to other layers, and for states.
function laneGraph({ graph, operations }, layer) {
  const inside = new Set(operations);
  const nodes = operations.map((operation) => ({ id: operation.index, operation, width: NODE.width, height: laneHeight(operation) }));
  const edges = [];
  const pills = new Map();
  const pill = (id, text, kind, target) => {
    if (!pills.has(id)) pills.set(id, { id, kind, target, texts: new Set(), height: 18 });
    pills.get(id).texts.add(text);
    return id;
  };
  for (const operation of operations) {
    const sources = new Set();
    operation.operands.forEach((name, index) => {
      if (name === null || operation.roles[index] === "weight" || HIDDEN.has(name) || name.startsWith("rope_table")) return;
      const producer = graph.producer.get(name);
      if (inside.has(producer)) sources.add(producer.index);
      else if (operation.roles[index] === "state") sources.add(pill(`state ${name}`, plain(name, layer), "state"));
      else if (producer && producer.layer !== layer) sources.add(pill(`from ${producer.layer || name}`, name, "link", producer.layer || null));
      else if (!producer) sources.add(pill(`in ${name}`, name, "link", null));
    });
    for (const source of sources) edges.push([source, operation.index]);
    const far = new Set(operation.names.flatMap((name) => (graph.users.get(name) || []).map((user) => user.layer)).filter((name) => name && name !== layer));
    if (far.size) edges.push([operation.index, pill(`out ${operation.index}`, far.size > 1 ? `→ ${far.size} layers` : `→ ${[...far][0]}`, "link", [...far][0])]);
  }
  for (const one of pills.values()) {
    one.text = one.texts.size > 1 ? `${one.target} · ${one.texts.size} values` : [...one.texts][0];
    one.width = Math.max(46, one.text.length * 5.6 + 14);
  }
  return { nodes: [...nodes, ...pills.values()], edges };
}

function drawLayer() {
  const layer = view.layer;
  const info = LAYER[layer];
  $("#layer h2").textContent = `${layer} · ${info.mode} · ${info.part}`;
  $("#layer .lead").textContent = layerSentence(info);
  const canvas = $("#layer .canvas");
  const lanes = lanesOf(layer, view.step);
  const operations = lanes.flatMap((lane) => lane.operations);
  const most = (key) => Math.max(1, ...operations.map(key));
  const scale = { flops: most((o) => o.cost.flops), traffic: most(traffic) };
  const scene = s("g", {});
  const drawn = [];
  const places = new Map();
  let x = 0, tall = 0;
  for (const lane of lanes) {
    const { nodes, edges } = laneGraph(lane, layer);
    const { width, height, paths } = layered(nodes, edges);
    const group = s("g", { transform: `translate(${x + 20},44)` });
    scene.append(s("rect", { class: "lane", x, y: 0, width: width + 40, height: height + 64, rx: 12 }),
      s("text", { x: x + 18, y: 26, style: "font-size:13px;font-weight:600" }, lane.title));
    paths.forEach((d, index) => group.append(s("path", { class: "edge", d, "data-from": edges[index][0], "data-to": edges[index][1], "data-graph": lane.graph.name })));
    for (const node of nodes) {
      group.append(node.operation ? operationNode(node, layer, scale) : pillNode(node));
      if (node.operation) places.set(node.operation, { x: node.x + x + 20, y: node.y + 44, node });
    }
    drawn.push(group);
    x += width + 64;
    tall = Math.max(tall, height + 64);
  }
  scene.append(...acrossLanes(lanes, places), ...drawn);
  const svg = s("svg", { role: "img", "aria-label": `Operations of ${layer}` }, scene);
  const zoom = zoomable(svg, scene, { width: x - 24, height: tall });
  canvas.replaceChildren(svg,
    h("div", { class: "tools" }, [["+", 1.25], ["−", 0.8], ["⤢", 0]].map(([text, factor]) =>
      h("button", { type: "button", "aria-label": { "+": "zoom in", "−": "zoom out", "⤢": "fit" }[text], onclick: () => zoom(factor) }, text))),
    h("div", { class: "hint" }, "drag to move · ctrl + wheel to zoom · bars: traffic and arithmetic within the layer"));
  drawTable(operations, layer);
  drawOperation();
}

const traffic = (operation) => operation.cost.weight_bytes + operation.cost.state_bytes + operation.cost.activation_bytes;

function operationNode({ operation, x, y, width, height }, layer, scale) {
  const fused = operation.made_by !== "trace" && operation.parts.length > 0;
  const module = operation.module.split(".").pop();
  const type = operation.results[operation.results.length - 1].split(": ")[1];
  const said = ["attn", "ffn", ...operation.layer.split(".")].includes(module) ? type : `${module} · ${type}`;
  const bar = (share, color, line) => s("rect", { x: 8, y: height - 8 + line * 3, width: Math.max(share > 0 ? 1 : 0, share * (width - 16)), height: 2.4, fill: color });
  return s("g", {
    class: `node${fused ? " fused" : ""}${operation.view ? " view" : ""}`, transform: `translate(${x},${y})`, "data-operation": operation.path,
    tabindex: 0, role: "button", "aria-label": operation.op, "data-tip": operationTip(operation, layer),
    onclick: () => show({ operation }), onkeydown: (event) => { if (event.key === "Enter") show({ operation }); },
  },
  s("rect", { class: "frame", width, height, rx: 6 }),
  s("text", { class: "op", x: 9, y: 16 }, operation.op.length > 19 ? `${operation.op.slice(0, 18)}…` : operation.op),
  operation.parts.map((part, index) => [
    s("rect", { class: "part", x: 8, y: 21 + index * NODE.part, width: width - 16, height: NODE.part - 2, rx: 3 }),
    s("text", { class: "part-name", x: 13, y: 30.5 + index * NODE.part }, part)]),
  s("text", { class: "type", x: 9, y: height - 14 }, said.length > 27 ? `${said.slice(0, 26)}…` : said),
  bar(traffic(operation) / scale.traffic, "var(--traffic)", 0), bar(operation.cost.flops / scale.flops, "var(--arithmetic)", 1));
}

function operationTip(operation, layer) {
  const lines = [`${operation.op} · ${plain(operation.module, layer) || operation.module}`];
  if (operation.view) lines.push("a view: no kernel, no memory");
  else lines.push(`${flop(operation.cost.flops)}, ${bytes(traffic(operation))} of traffic`);
  if (operation.parts.length) lines.push(`${operation.made_by}: ${operation.parts.join(", ")}`);
  return lines.join("\n");
}

function pillNode({ text, texts, kind, target, x, y, width, height }) {
  const known = target && LAYER[target];
  return s("g", { class: `pill ${kind === "state" ? "state" : known ? "link" : ""}`, transform: `translate(${x},${y})`, "data-tip": [...texts].join("\n"), onclick: () => known && show({ layer: target, operation: null }) },
    s("rect", { width, height, rx: 9 }), s("text", { x: width / 2, y: 12.5, "text-anchor": "middle" }, text));
}

// Values that one sublayer hands to the other inside the layer.
function acrossLanes(lanes, places) {
  const edges = [];
  for (const lane of lanes) {
    for (const operation of lane.operations) {
      const sources = new Set(operation.operands.map((name) => lane.graph.producer.get(name)).filter(Boolean));
      for (const source of sources) {
        if (lane.operations.includes(source) || !places.has(source)) continue;
        const [from, to] = [places.get(source), places.get(operation)];
        const start = [from.x + NODE.width, from.y + from.node.height / 2], end = [to.x, to.y + to.node.height / 2];
        const bend = Math.max(40, Math.abs(end[0] - start[0]) / 2);
        edges.push(s("path", { class: "edge far", d: `M${start}C${start[0] + bend},${start[1]} ${end[0] - bend},${end[1]} ${end}`, "data-from": source.index, "data-to": operation.index, "data-graph": lane.graph.name }));
      }
    }
  }
  return edges;
}

// Moving and zooming a scene inside an SVG; the function it returns zooms by a factor, or to fit for 0.
function zoomable(svg, scene, size) {
  const at = { x: 0, y: 0, scale: 1 };
  const apply = () => scene.setAttribute("transform", `translate(${at.x},${at.y}) scale(${at.scale})`);
  const about = (x, y, factor) => {
    const scale = Math.max(0.15, Math.min(4, at.scale * factor));
    at.x = x - ((x - at.x) * scale) / at.scale;
    at.y = y - ((y - at.y) * scale) / at.scale;
    at.scale = scale;
    apply();
  };
  const fit = () => {
    if (!svg.isConnected) return;
    const { width } = svg.getBoundingClientRect();
    const wide = Math.min(1.15, (width - 32) / size.width);
    const height = Math.max(420, Math.min(860, size.height * wide + 32));
    svg.parentElement.style.height = `${height}px`;
    at.scale = Math.min(wide, (height - 32) / size.height);
    at.x = (width - size.width * at.scale) / 2;
    at.y = Math.max(16, (height - size.height * at.scale) / 2);
    apply();
  };
  let held = null;
  svg.addEventListener("pointerdown", (event) => { held = { x: event.clientX - at.x, y: event.clientY - at.y, moved: false }; });
  svg.addEventListener("pointermove", (event) => {
    if (!held || !event.buttons) return;
    if (!held.moved && Math.hypot(event.clientX - at.x - held.x, event.clientY - at.y - held.y) < 4) return;
    if (!held.moved) svg.setPointerCapture(event.pointerId);
    held.moved = true;
    at.x = event.clientX - held.x;
    at.y = event.clientY - held.y;
    apply();
  });
  svg.addEventListener("pointerup", () => { held = null; });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    about(event.clientX - box.left, event.clientY - box.top, Math.exp(-event.deltaY * 0.01));
  }, { passive: false });
  requestAnimationFrame(fit);
  return (factor) => {
    const box = svg.getBoundingClientRect();
    if (factor) about(box.width / 2, box.height / 2, factor); else fit();
  };
}

function drawTable(operations, layer) {
  $("#layer summary").textContent = `All ${operations.length} operations as a table`;
  const row = (operation) => h("tr", { "data-operation": operation.path, onclick: () => show({ operation }) },
    h("td", {}, h("b", {}, operation.op)), h("td", { class: "left" }, plain(operation.module, layer)),
    h("td", { class: "left mono" }, plain(operation.results[operation.results.length - 1], layer)), h("td", { class: "left" }, operation.made_by),
    ["launches", "flops", "weight_bytes", "state_bytes", "activation_bytes"].map((key) =>
      h("td", {}, num(`${operation.path}/cost/${key}`, key === "launches" ? "exact" : key === "flops" ? "flop" : "bytes"))));
  const titles = ["operation", "module", "result", "made by", "launches", "arithmetic", "weights", "states", "activations"];
  $("#layer details .panel").replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, titles.map((title, index) => h("th", { class: index < 4 ? "left" : "" }, title)))),
    h("tbody", {}, operations.map(row))));
}

// The panel beside the graph: the layer, or the chosen operation.
function drawOperation() {
  const operation = view.operation;
  const lit = (edge) => operation && edge.dataset.graph === operation.graph && [edge.dataset.from, edge.dataset.to].includes(String(operation.index));
  document.querySelectorAll("#layer .edge").forEach((edge) => edge.classList.toggle("lit", Boolean(lit(edge))));
  document.querySelectorAll("#layer [data-operation]").forEach((one) => one.classList.toggle("chosen", Boolean(operation) && one.dataset.operation === operation.path));
  $("#layer aside").replaceChildren(...(operation ? operationPanel(operation) : layerPanel()));
}

const term = (title, ...values) => [h("dt", {}, title), h("dd", {}, values)];
const COST_TERMS = [["flops", "arithmetic", "flop"], ["weight_bytes", "weights", "bytes"], ["state_bytes", "states", "bytes"], ["activation_bytes", "activations", "bytes"]];

function layerPanel() {
  const path = LAYER_PATH[view.layer];
  const layer = LAYER[view.layer];
  return [
    h("h3", {}, view.layer),
    h("dl", {}, term("mode", layer.mode), term("launches", num(`${path}/launches`)), term("weights stored", num(`${path}/weight_bytes`, "bytes"))),
    ...Object.keys(STEPS).flatMap((step) => [h("b", {}, STEPS[step]), h("dl", {}, COST_TERMS.map(([key, title, kind]) => term(title, num(`${path}/${step}/${key}`, kind))))]),
    h("b", {}, "operations by the pass that made them"),
    h("dl", {}, Object.keys(layer.made_by).map((name) => term(name, num(`${path}/made_by/${name}`)))),
    h("p", { class: "lead" }, "Click an operation for its operands, kernel and costs."),
  ];
}

function operationPanel(operation) {
  const list = (title, entries) => (entries.length ? [h("b", {}, title), h("ul", { class: "mono" }, entries)] : []);
  const operands = operation.operands.map((name, index) => (name === null ? null : h("li", {}, name, h("em", {}, ` ${operation.roles[index]}`)))).filter(Boolean);
  const attributes = operation.attributes.slice(1, -1);
  return [
    h("h3", {}, operation.op),
    h("div", { class: "lead" }, operation.module),
    h("dl", {},
      term("graph", operation.graph), term("made by", operation.made_by),
      operation.kernel ? term("kernel", h("code", {}, operation.kernel)) : term("kernel", "none: a view"),
      COST_TERMS.map(([key, title, kind]) => term(title, num(`${operation.path}/cost/${key}`, kind)))),
    ...list("stands for", operation.parts.map((part) => h("li", {}, part))),
    ...list("results", operation.results.map((result) => h("li", {}, result))),
    ...list("operands", operands),
    ...list("attributes", attributes ? [h("li", {}, attributes.length > 400 ? `${attributes.slice(0, 400)}…` : attributes)] : []),
  ];
}

function setUpLayer() {
  const names = LAYERS.map((layer) => layer.name);
  const turn = (by) => {
    const index = Math.max(0, Math.min(names.length - 1, names.indexOf(view.layer) + by));
    show({ layer: names[index], operation: null });
  };
  const select = h("select", { "aria-label": "Layer", onchange: (event) => show({ layer: event.target.value, operation: null }) },
    names.map((name) => h("option", { value: name }, `${name} · ${LAYER[name].mode}`)));
  const steps = h("span", {});
  $("#layer .bar").append(h("button", { type: "button", onclick: () => turn(-1), "aria-label": "previous layer" }, "←"), select,
    h("button", { type: "button", onclick: () => turn(1), "aria-label": "next layer" }, "→"), steps);
  watchers.push((before) => {
    select.value = view.layer;
    if (before.step !== view.step || !steps.firstChild) {
      steps.replaceChildren(choice(Object.keys(STEPS), view.step, (value) => show({ step: value, operation: null }), (value) => STEPS[value]));
    }
    if (before.layer !== view.layer || before.step !== view.step) drawLayer();
    else if (before.operation !== view.operation) drawOperation();
  });
}
