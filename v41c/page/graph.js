// The operations of a layer as graphs: one lane for each sublayer, with pills for what comes from and goes to others.
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
    if (!known || (step === "decode" ? tokens(graph) < tokens(known) : tokens(graph) > tokens(known)))
      chosen.set(graph.bare, graph);
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
  const nodes = operations.map((operation) => ({
    id: operation.index,
    operation,
    width: NODE.width,
    height: laneHeight(operation),
  }));
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
      if (name === null || operation.roles[index] === "weight" || HIDDEN.has(name) || name.startsWith("rope_table"))
        return;
      const producer = graph.producer.get(name);
      if (inside.has(producer)) sources.add(producer.index);
      else if (operation.roles[index] === "state") sources.add(pill(`state ${name}`, plain(name, layer), "state"));
      else if (producer && producer.layer !== layer)
        sources.add(pill(`from ${producer.layer || name}`, name, "link", producer.layer || null));
      else if (!producer) sources.add(pill(`in ${name}`, name, "link", null));
    });
    for (const source of sources) edges.push([source, operation.index]);
    const far = new Set(
      operation.names
        .flatMap((name) => (graph.users.get(name) || []).map((user) => user.layer))
        .filter((name) => name && name !== layer),
    );
    if (far.size)
      edges.push([
        operation.index,
        pill(`out ${operation.index}`, far.size > 1 ? `→ ${far.size} layers` : `→ ${[...far][0]}`, "link", [...far][0]),
      ]);
  }
  for (const one of pills.values()) {
    one.text = one.texts.size > 1 ? `${one.target} · ${one.texts.size} values` : [...one.texts][0];
    one.width = Math.max(46, one.text.length * 5.6 + 14);
  }
  return { nodes: [...nodes, ...pills.values()], edges };
}
