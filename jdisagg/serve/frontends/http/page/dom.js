// Elements made of nodes, never of strings, and numbers as people read them.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `given`: class, text, on (events), style (properties); all else are attributes. */
export function el(tag, given = {}, ...children) {
  return fill(document.createElement(tag), given, children);
}

export function svg(tag, given = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), given, children);
}

function fill(node, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Sets text only where it changed, so that nothing is read out again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Keeps one child of `parent` for each item, in order; what stays is updated, so that the focus stays too. */
export function keyed(parent, items, keyOf, make, update) {
  const before = (parent.keyed ??= new Map());
  const seen = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    let node = before.get(key);
    if (!node) before.set(key, (node = make(item)));
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const [key, node] of before) {
    if (seen.has(key)) continue;
    node.remove();
    before.delete(key);
  }
}

// ------------------------------------------------------------ numbers

export function time(seconds) {
  if (seconds < 0.0005) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.01) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 100) return `${seconds.toFixed(2)} s`;
  return `${Math.round(seconds)} s`;
}

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

export function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${digits(count / size)} ${unit}`;
  }
  return `${Math.round(count)} B`;
}

/** GB/s, with as many places as it takes to see something. */
export function rate(perSecond) {
  const gigabytes = perSecond / 1e9;
  if (gigabytes <= 0) return "0 GB/s";
  const places = Math.min(5, Math.max(0, 1 - Math.floor(Math.log10(gigabytes))));
  return `${gigabytes.toFixed(places)} GB/s`;
}

export function count(number) {
  return Math.round(number).toLocaleString("en-US");
}

export function digits(number) {
  return number >= 100 ? count(number) : number >= 10 ? number.toFixed(1) : number.toFixed(2);
}

export function share(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}
