// Data, elements, numbers. Every number on the page is made by `num` from a path into the embedded data, which is what
// `v41c inspect --json` and `v41c report --json` print; the exact value stays in its attributes.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const at = (path) => path.split("/").reduce((value, key) => value[key], DATA);

function make(namespace, tag, attributes, children) {
  const element = namespace ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}
const h = (tag, attributes, ...children) => make(false, tag, attributes, children);
const s = (tag, attributes, ...children) => make(true, tag, attributes, children);

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return unit === "B" ? `${count.toFixed(0)} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}
function short(count) {
  for (const unit of ["", " k", " M", " G", " T"]) {
    if (Math.abs(count) < 1000)
      return unit ? `${Number(count.toPrecision(3))}${unit}` : String(Number(count.toPrecision(4)));
    count /= 1000;
  }
  return `${Number(count.toPrecision(3))} P`;
}
const exact = (count) => count.toLocaleString("en", { maximumFractionDigits: 3 });
const flop = (count) => (Math.abs(count) < 1000 ? `${short(count)} flop` : `${short(count)}flop`);
const WRITE = { bytes, short, exact, flop };

function marks(path) {
  return { "data-path": path, "data-value": at(path) };
}
function num(path, kind = "exact") {
  return h("span", { class: "num", title: exact(at(path)), ...marks(path) }, WRITE[kind](at(path)));
}

const LAYERS = DATA.inspect.layers;
const LAYER_PATH = Object.fromEntries(LAYERS.map((layer, index) => [layer.name, `inspect/layers/${index}`]));
const LAYER = Object.fromEntries(LAYERS.map((layer) => [layer.name, layer]));
const MODES = ["window", "full", "reindex", "reuse"];
const bare = (name) => name.split(":")[0];
const number = (layer) => layer.replace("layers.", "");

const tip = $("#tip");
document.addEventListener("pointermove", (event) => {
  const owner = event.target.closest("[data-tip]");
  tip.hidden = !owner;
  if (!owner) return;
  tip.textContent = owner.dataset.tip;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + box.height + 22 > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16}px`;
});

// A row of buttons of which one is pressed; `choose` is called with its value.
function choice(values, current, choose, label = (value) => value) {
  const buttons = values.map((value) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String(value === current),
        onclick: () => {
          buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(values[index] === value)));
          choose(value);
        },
      },
      label(value),
    ),
  );
  return h("span", { class: "choice" }, buttons);
}

// What is looked at, and who wants to know when it changes.
const view = { layer: null, step: "decode", operation: null };
const watchers = [];
function show(changes) {
  const before = { ...view };
  Object.assign(view, changes);
  watchers.forEach((watch) => watch(before));
}
function goTo(id) {
  document.getElementById(id).scrollIntoView();
}
