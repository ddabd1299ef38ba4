// Where a request's time went: the parts of its ledger as one bar, with names and times.

import { el, time } from "./dom.js";

export const PARTS = [
  ["queue", "queue"],
  ["reserve_wait", "reserve"],
  ["prefill", "prefill"],
  ["transfer", "transfer"],
  ["first_step", "first step"],
  ["decode", "decode"],
];

function words(parts) {
  return PARTS.map(([part, name]) => `${name} ${time((parts[part] ?? 0) / 1e9)}`).join(", ");
}

/** Colours alone, for rows of lists; the words are for screen readers. */
export function bar(parts) {
  const node = el("span", { class: "bar", role: "img" });
  for (const [part] of PARTS) node.append(el("i", { class: `part-${part}` }));
  setBar(node, parts);
  return node;
}

export function setBar(node, parts) {
  const whole = Object.values(parts).reduce((sum, each) => sum + each, 0);
  PARTS.forEach(([part], index) => {
    const grow = whole > 0 ? (parts[part] ?? 0) / whole : 0;
    node.children[index].style.setProperty("flex-grow", grow.toFixed(4));
    node.children[index].hidden = grow === 0;
  });
  node.setAttribute("aria-label", words(parts));
}

/** The bar with its legend. */
export function ledger(parts) {
  const legend = PARTS.map(([part, name]) =>
    el("li", {}, el("i", { class: `part-${part}` }), el("span", { text: name }),
      el("b", { text: time((parts[part] ?? 0) / 1e9) })));
  return el("div", { class: "ledger" }, bar(parts), el("ul", { class: "legend", "aria-hidden": "true" }, ...legend));
}
