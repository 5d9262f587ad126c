// The graphs of a layer on a canvas: drag to move, buttons or ctrl and wheel to zoom.
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
  let x = 0,
    tall = 0;
  for (const lane of lanes) {
    const { nodes, edges } = laneGraph(lane, layer);
    const { width, height, paths } = layered(nodes, edges);
    const group = s("g", { transform: `translate(${x + 20},44)` });
    scene.append(
      s("rect", { class: "lane", x, y: 0, width: width + 40, height: height + 64, rx: 12 }),
      s("text", { x: x + 18, y: 26, style: "font-size:13px;font-weight:600" }, lane.title),
    );
    paths.forEach((d, index) =>
      group.append(
        s("path", {
          class: "edge",
          d,
          "data-from": edges[index][0],
          "data-to": edges[index][1],
          "data-graph": lane.graph.name,
        }),
      ),
    );
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
  canvas.replaceChildren(
    svg,
    h(
      "div",
      { class: "tools" },
      [
        ["+", 1.25],
        ["−", 0.8],
        ["⤢", 0],
      ].map(([text, factor]) =>
        h(
          "button",
          {
            type: "button",
            "aria-label": { "+": "zoom in", "−": "zoom out", "⤢": "fit" }[text],
            onclick: () => zoom(factor),
          },
          text,
        ),
      ),
    ),
    h("div", { class: "hint" }, "drag to move · ctrl + wheel to zoom · bars: traffic and arithmetic within the layer"),
  );
  drawTable(operations, layer);
  drawOperation();
}

const traffic = (operation) =>
  operation.cost.weight_bytes + operation.cost.state_bytes + operation.cost.activation_bytes;

function operationNode({ operation, x, y, width, height }, layer, scale) {
  const fused = operation.made_by !== "trace" && operation.parts.length > 0;
  const module = operation.module.split(".").pop();
  const type = operation.results[operation.results.length - 1].split(": ")[1];
  const said = ["attn", "ffn", ...operation.layer.split(".")].includes(module) ? type : `${module} · ${type}`;
  const bar = (share, color, line) =>
    s("rect", {
      x: 8,
      y: height - 8 + line * 3,
      width: Math.max(share > 0 ? 1 : 0, share * (width - 16)),
      height: 2.4,
      fill: color,
    });
  return s(
    "g",
    {
      class: `node${fused ? " fused" : ""}${operation.view ? " view" : ""}`,
      transform: `translate(${x},${y})`,
      "data-operation": operation.path,
      tabindex: 0,
      role: "button",
      "aria-label": operation.op,
      "data-tip": operationTip(operation, layer),
      onclick: () => show({ operation }),
      onkeydown: (event) => {
        if (event.key === "Enter") show({ operation });
      },
    },
    s("rect", { class: "frame", width, height, rx: 6 }),
    s("text", { class: "op", x: 9, y: 16 }, operation.op.length > 19 ? `${operation.op.slice(0, 18)}…` : operation.op),
    operation.parts.map((part, index) => [
      s("rect", { class: "part", x: 8, y: 21 + index * NODE.part, width: width - 16, height: NODE.part - 2, rx: 3 }),
      s("text", { class: "part-name", x: 13, y: 30.5 + index * NODE.part }, part),
    ]),
    s("text", { class: "type", x: 9, y: height - 14 }, said.length > 27 ? `${said.slice(0, 26)}…` : said),
    bar(traffic(operation) / scale.traffic, "var(--traffic)", 0),
    bar(operation.cost.flops / scale.flops, "var(--arithmetic)", 1),
  );
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
  return s(
    "g",
    {
      class: `pill ${kind === "state" ? "state" : known ? "link" : ""}`,
      transform: `translate(${x},${y})`,
      "data-tip": [...texts].join("\n"),
      onclick: () => known && show({ layer: target, operation: null }),
    },
    s("rect", { width, height, rx: 9 }),
    s("text", { x: width / 2, y: 12.5, "text-anchor": "middle" }, text),
  );
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
        const start = [from.x + NODE.width, from.y + from.node.height / 2],
          end = [to.x, to.y + to.node.height / 2];
        const bend = Math.max(40, Math.abs(end[0] - start[0]) / 2);
        edges.push(
          s("path", {
            class: "edge far",
            d: `M${start}C${start[0] + bend},${start[1]} ${end[0] - bend},${end[1]} ${end}`,
            "data-from": source.index,
            "data-to": operation.index,
            "data-graph": lane.graph.name,
          }),
        );
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
  svg.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX - at.x, y: event.clientY - at.y, moved: false };
  });
  svg.addEventListener("pointermove", (event) => {
    if (!held || !event.buttons) return;
    if (!held.moved && Math.hypot(event.clientX - at.x - held.x, event.clientY - at.y - held.y) < 4) return;
    if (!held.moved) svg.setPointerCapture(event.pointerId);
    held.moved = true;
    at.x = event.clientX - held.x;
    at.y = event.clientY - held.y;
    apply();
  });
  svg.addEventListener("pointerup", () => {
    held = null;
  });
  svg.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = svg.getBoundingClientRect();
      about(event.clientX - box.left, event.clientY - box.top, Math.exp(-event.deltaY * 0.01));
    },
    { passive: false },
  );
  requestAnimationFrame(fit);
  return (factor) => {
    const box = svg.getBoundingClientRect();
    if (factor) about(box.width / 2, box.height / 2, factor);
    else fit();
  };
}
