// One card a worker: its mesh by stages and shards, its pages by use, its queue and its hit share.

import { count, digits, el, say, share } from "./dom.js";

export const USES = [["live", "live"], ["in_flight", "in flight"], ["cached", "cached"], ["free", "free"]];
const MOST_SHARDS = 16; // drawn of one stage; the rest is in the words

export function makeCard(worker) {
  const name = el("h4", { text: worker.worker });
  const shape = el("span", { class: "shape" });
  const mesh = el("div", { class: "mesh", role: "img" });
  const pages = el("div", { class: "pages", role: "img" }, ...USES.map(([use]) => el("i", { class: `use-${use}` })));
  const uses = el("p", { class: "uses" });
  const facts = el("dl", { class: "facts" });
  const node = el("article", { class: `card ${worker.role}`, "aria-label": `Worker ${worker.worker}` },
    el("header", {}, name, shape), mesh, pages, uses, facts);
  node.inside = { shape, mesh, pages, uses, facts };
  return node;
}

/** `before`: the same worker `elapsed` seconds ago, or undefined. `gone`: it left. */
export function updateCard(node, worker, before, elapsed) {
  const { shape, mesh, pages, uses, facts } = node.inside;
  node.classList.toggle("gone", Boolean(worker.gone));
  node.classList.toggle("leaving", Boolean(worker.leaving));
  const where = worker.gone ? "gone" : worker.leaving ? "leaving" : worker.role;
  say(shape, where);
  drawMesh(mesh, worker);
  const total = Math.max(1, worker.num_pages);
  USES.forEach(([use], index) => {
    pages.children[index].style.setProperty("flex-grow", String(worker.gone ? 0 : worker.pages[use] / total));
  });
  const told = USES.map(([use, name]) => `${count(worker.pages[use])} ${name}`).join(" · ");
  say(uses, worker.gone ? "Its pages went with it." : told);
  pages.setAttribute("aria-label", worker.gone ? "no pages" : `${count(worker.num_pages)} pages of ${worker.page_size} tokens: ${told}`);
  drawFacts(facts, worker, before, elapsed);
}

function drawMesh(mesh, worker) {
  const told = worker.stages.map((stage) => `${stage.layers} x${stage.shards}`).join(",");
  if (mesh.told === told) return;
  mesh.told = told;
  const stages = worker.stages.map((stage, index) => {
    const [first, stop] = stage.layers;
    const shards = Array.from({ length: Math.min(stage.shards, MOST_SHARDS) }, () => el("i"));
    return el("div", { class: "stage" }, index ? el("span", { text: "→" }) : null, el("span", { class: "shards" }, ...shards),
      el("span", { text: `${index ? "" : "layers "}${first}–${stop - 1}` }));
  });
  const shape = `${worker.stages.length > 1 ? `pp${worker.stages.length} ` : ""}tp${worker.stages[0]?.shards ?? 1}`;
  mesh.replaceChildren(...stages, el("span", { class: "shape", text: shape }));
  mesh.setAttribute("aria-label", `${worker.stages.length} ${worker.stages.length === 1 ? "stage" : "stages"}, ${worker.stages[0]?.shards ?? 1} shards each`);
}

function drawFacts(list, worker, before, elapsed) {
  const rows = [];
  const per = (field) => (before && elapsed > 0 ? Math.max(0, (worker[field] - before[field]) / elapsed) : 0);
  if (worker.num_slots) rows.push(["sequences", `${worker.sequences.running} of ${worker.num_slots}`]);
  if (worker.role !== "decode" || worker.backlog_tokens) rows.push(["queue", `${count(worker.backlog_tokens)} tok`]);
  if (worker.role !== "decode") rows.push(["prefill", `${pace(per("prefill_tokens"))} tok/s`]);
  if (worker.role !== "prefill") rows.push(["decode", `${pace(per("decode_tokens"))} tok/s`]);
  rows.push(["hits", share(worker.prefix_hits, worker.prefix_queries)]);
  if (worker.parts_resent) rows.push(["resent", count(worker.parts_resent)]);
  if (worker.failures) rows.push(["failures", count(worker.failures)]);
  drawList(list, worker.gone ? [] : rows);
}

function pace(perSecond) {
  return perSecond >= 100 ? count(perSecond) : perSecond > 0 ? digits(perSecond) : "0";
}

/** A list of names and values, changed where they changed. */
export function drawList(list, rows) {
  while (list.children.length > rows.length) list.lastElementChild.remove();
  rows.forEach(([name, value], index) => {
    if (!list.children[index]) list.append(el("div", {}, el("dt"), el("dd")));
    const [term, told] = list.children[index].children;
    say(term, name);
    say(told, value);
  });
}
