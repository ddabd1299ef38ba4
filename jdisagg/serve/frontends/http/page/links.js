// Transfers as arrows between the cards of workers: as wide as they are fast, in motion while something moves.

import { svg } from "./dom.js";

const MOST_ARROWS = 64; // beyond that the list has to do
const MOST_LABELS = 3; // of links at rest

/** Draws over `topology`; `cards`: elements by worker; `flows`: {source, destination, label, moves}. */
export function drawArrows(layer, topology, cards, flows) {
  const frame = topology.getBoundingClientRect();
  const across = getComputedStyle(layer).display !== "none";
  layer.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  if (!across || flows.length > MOST_ARROWS) {
    layer.replaceChildren();
    return;
  }
  const arrows = flows
    .filter((flow) => cards.has(flow.source) && cards.has(flow.destination))
    .map((flow) => arrow({ ...flow, isTold: flow.moves || flows.length <= MOST_LABELS }, ends(cards, flow, frame)));
  layer.replaceChildren(...arrows);
}

function ends(cards, flow, frame) {
  const from = cards.get(flow.source).getBoundingClientRect();
  const to = cards.get(flow.destination).getBoundingClientRect();
  return {
    x1: from.right - frame.left + 2, y1: from.top - frame.top + Math.min(from.height / 2, 84),
    x2: to.left - frame.left - 9, y2: to.top - frame.top + Math.min(to.height / 2, 84),
  };
}

function arrow(flow, { x1, y1, x2, y2 }) {
  const bend = (x2 - x1) / 2;
  const width = flow.moves ? 3 : 1.5;
  const path = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  const level = Math.abs(y2 - y1) < 8;
  const down = y2 > y1; // the label stands above the line: to the right of where it falls, to the left of where it rises
  const [x, y] = at(level ? 0.5 : down ? 0.4 : 0.6, [x1, x1 + bend, x2 - bend, x2], [y1, y1, y2, y2]);
  return svg("g", { class: flow.moves ? "arrow moves" : "arrow" },
    svg("path", { class: "line", d: path, "stroke-width": width }),
    svg("path", { class: "head", d: `M${x2 + 8} ${y2}l-9 -5v10z` }),
    flow.isTold ? svg("text", { x, y: y - 8, "text-anchor": level ? "middle" : down ? "start" : "end", text: flow.label }) : null);
}

/** A point of the curve. */
function at(t, xs, ys) {
  const weights = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3];
  const sum = (values) => weights.reduce((total, weight, index) => total + weight * values[index], 0);
  return [sum(xs), sum(ys)];
}
