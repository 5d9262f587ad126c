// The memory plan of a program: bytes of the arena upwards, commands to the right, a rectangle per value.
const KINDS = {
  input: "var(--window)",
  value: "var(--traffic)",
  output: "var(--reuse)",
  workspace: "var(--arithmetic)",
};

function drawMemory() {
  const programs = DATA.memory;
  const byTokens = (program) => Number(program.graph.split(":")[1] || 0);
  const first = programs.reduce(
    (best, program) => (program.graph.startsWith("draft") || byTokens(program) <= byTokens(best) ? best : program),
    programs[0],
  );
  const select = h(
    "select",
    { "aria-label": "Program", onchange: () => draw(programs[select.selectedIndex]) },
    programs.map((program) => h("option", {}, `${program.graph} · ${bytes(program.arena_bytes)}`)),
  );
  select.selectedIndex = programs.indexOf(first);
  $("#memory .bar").append(
    select,
    h(
      "div",
      { class: "legend" },
      Object.entries(KINDS).map(([kind, color]) => h("span", {}, h("i", { style: `background:${color}` }), kind)),
      h("span", {}, h("i", { style: "background:var(--ink);height:2px;width:16px;vertical-align:middle" }), "in use"),
    ),
  );
  draw(first);

  function draw(program) {
    const [width, height, left, top] = [1200, 400, 78, 30];
    const count = program.live_bytes.length;
    const x = (command) => left + (Math.max(0, Math.min(count, command)) / count) * (width - left - 8);
    const y = (offset) => top + height - (offset / program.arena_bytes) * height;
    const svg = s("svg", {
      viewBox: `0 0 ${width} ${height + top + 26}`,
      role: "img",
      "aria-label": `Memory plan of ${program.graph}`,
    });
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(
        s("path", { d: `M${left},${y(share * program.arena_bytes)}H${width - 8}`, stroke: "var(--line)" }),
        s(
          "text",
          { x: left - 8, y: y(share * program.arena_bytes) + 4, "text-anchor": "end", class: "dim" },
          bytes(share * program.arena_bytes),
        ),
      );
    }
    const bands = layerBands(program);
    bands.forEach(([layer, begin, end]) => {
      svg.append(s("path", { d: `M${x(begin)},${top - 6}V${top + height}`, stroke: "var(--line)" }));
      if (x(end) - x(begin) > 26)
        svg.append(
          s("text", { x: (x(begin) + x(end)) / 2, y: top - 12, "text-anchor": "middle", class: "dim" }, number(layer)),
        );
    });
    for (const place of program.places) {
      const span = x(place.end + 1) - x(place.begin);
      const tall = (place.size_bytes / program.arena_bytes) * height;
      svg.append(
        s("rect", {
          class: "place",
          x: x(place.begin),
          width: Math.max(1, span),
          y: y(place.offset + place.size_bytes),
          height: Math.max(0.6, tall),
          fill: KINDS[place.kind],
          "fill-opacity": 0.72,
          onclick: () => LAYER[place.layer] && show({ layer: place.layer, operation: null }),
          "data-tip": `${place.value}\n${place.kind}, ${bytes(place.size_bytes)} at offset ${exact(place.offset)}\ncommands ${Math.max(0, place.begin)} to ${place.end} of ${count}`,
        }),
      );
    }
    const line = program.live_bytes.map(
      (live, command) => `${command ? "L" : "M"}${x(command)},${y(live)}L${x(command + 1)},${y(live)}`,
    );
    svg.append(
      s("path", {
        d: line.join(""),
        fill: "none",
        stroke: "var(--ink)",
        "stroke-width": 1.3,
        "pointer-events": "none",
      }),
    );
    svg.append(
      s("text", { x: left, y: top + height + 20, class: "dim" }, "command 0"),
      s("text", { x: width - 8, y: top + height + 20, "text-anchor": "end", class: "dim" }, `command ${count - 1}`),
    );
    $("#memory .panel").replaceChildren(svg);
    const index = programs.indexOf(program);
    const peak = Math.max(...program.live_bytes);
    $("#memory .lead").replaceChildren(
      `${program.graph}: an arena of `,
      num(`memory/${index}/arena_bytes`, "bytes"),
      `, of which at most ${bytes(peak)} are in use at once (${((100 * peak) / program.arena_bytes).toFixed(0)} %). `,
      `${program.places.length} values and workspaces over ${count} operations; the plan serves every step of up to ${byTokens(program)} token${byTokens(program) > 1 ? "s" : ""}.`,
    );
  }

  // [layer, first operation, one past its last] of stretches of operations of one layer
  function layerBands(program) {
    const bands = [];
    program.layers.forEach((layer, index) => {
      const last = bands[bands.length - 1];
      if (last && last[0] === layer) last[2] = index + 1;
      else bands.push([layer, index, index + 1]);
    });
    return bands.filter(([layer]) => layer);
  }
}
