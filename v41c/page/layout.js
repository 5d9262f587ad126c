// Layered drawing of a directed acyclic graph, top to bottom (Sugiyama's method): ranks by longest path, long edges
// through invisible nodes, order by barycentres, places by averaging what neighbours above and below want.
const GAP = { x: 16, y: 21 };

// nodes: [{id, width, height}], edges: [[from, to]] by id. Sets x and y (top left) on nodes; gives size and paths.
function layered(nodes, edges) {
  const byId = new Map(nodes.map((node) => [node.id, { ...node, above: [], below: [] }]));
  const rank = longestPath(byId, edges);
  const ranks = Array.from({ length: Math.max(0, ...rank.values()) + 1 }, () => []);
  for (const [id, node] of byId) ranks[rank.get(id)].push(node);
  const chains = edges.map(([from, to]) => chain(byId.get(from), byId.get(to), rank.get(from), rank.get(to), ranks));
  for (let sweep = 0; sweep < 12; sweep++) order(ranks, sweep % 2 === 0);
  place(ranks);
  const width = Math.max(...ranks.flat().map((node) => node.x + node.width));
  let y = 0;
  for (const row of ranks) {
    const tall = Math.max(...row.map((node) => node.height));
    for (const node of row) node.y = y + (tall - node.height) / 2;
    y += tall + GAP.y;
  }
  for (const node of nodes) Object.assign(node, { x: byId.get(node.id).x, y: byId.get(node.id).y });
  return { width, height: y - GAP.y, paths: chains.map(path) };
}

function longestPath(byId, edges) {
  const rank = new Map([...byId.keys()].map((id) => [id, 0]));
  for (let changed = true; changed;) {
    changed = false;
    for (const [from, to] of edges) {
      if (rank.get(to) <= rank.get(from)) {
        rank.set(to, rank.get(from) + 1);
        changed = true;
      }
    }
  }
  // a node that only gives hangs right above the first that takes
  for (const id of byId.keys()) {
    const takers = edges.filter(([from]) => from === id).map(([, to]) => rank.get(to));
    if (takers.length && !edges.some(([, to]) => to === id)) rank.set(id, Math.min(...takers) - 1);
  }
  return rank;
}

function chain(from, to, first, last, ranks) {
  const nodes = [from];
  for (let rank = first + 1; rank < last; rank++) {
    const dummy = { width: 6, height: 0, above: [], below: [] };
    ranks[rank].push(dummy);
    nodes.push(dummy);
  }
  nodes.push(to);
  for (let index = 1; index < nodes.length; index++) {
    nodes[index - 1].below.push(nodes[index]);
    nodes[index].above.push(nodes[index - 1]);
  }
  return nodes;
}

function order(ranks, down) {
  ranks.forEach((row) =>
    row.forEach((node, index) => {
      node.index = index;
    }),
  );
  const rows = down ? ranks : [...ranks].reverse();
  for (const row of rows) {
    for (const node of row) {
      const near = down ? node.above : node.below;
      node.wish = near.length ? near.reduce((sum, other) => sum + other.index, 0) / near.length : node.index;
    }
    row.sort((a, b) => a.wish - b.wish || a.index - b.index);
    row.forEach((node, index) => {
      node.index = index;
    });
  }
}

function place(ranks) {
  for (const row of ranks) {
    let x = 0;
    for (const node of row) {
      node.x = x;
      x += node.width + GAP.x;
    }
  }
  const middle = (node) => node.x + node.width / 2;
  for (let sweep = 0; sweep < 24; sweep++) {
    const rows = sweep % 2 ? [...ranks].reverse() : ranks;
    for (const row of rows) {
      for (const node of row) {
        const near = sweep % 2 ? node.below : node.above;
        const wanted = near.length ? near.reduce((sum, other) => sum + middle(other), 0) / near.length : middle(node);
        node.wish = wanted - node.width / 2;
      }
      settle(row);
    }
  }
  const least = Math.min(...ranks.flat().map((node) => node.x));
  for (const node of ranks.flat()) node.x -= least;
}

// As close to the wishes as order and gaps allow: the mean of pushing to the right and pushing to the left.
function settle(row) {
  const right = [],
    left = [];
  row.forEach((node, index) => {
    right[index] = index ? Math.max(node.wish, right[index - 1] + row[index - 1].width + GAP.x) : node.wish;
  });
  for (let index = row.length - 1; index >= 0; index--) {
    left[index] =
      index + 1 < row.length ? Math.min(row[index].wish, left[index + 1] - row[index].width - GAP.x) : row[index].wish;
  }
  row.forEach((node, index) => {
    node.x = (right[index] + left[index]) / 2;
  });
}

function path(nodes) {
  const points = nodes.flatMap((node, index) => {
    const x = node.x + node.width / 2;
    if (index === 0) return [[x, node.y + node.height]];
    if (index === nodes.length - 1) return [[x, node.y]];
    return [[x, node.y]];
  });
  return points
    .map(([x, y], index) => {
      if (!index) return `M${x},${y}`;
      const [fromX, fromY] = points[index - 1];
      const bend = (fromY + y) / 2;
      return `C${fromX},${bend} ${x},${bend} ${x},${y}`;
    })
    .join("");
}
