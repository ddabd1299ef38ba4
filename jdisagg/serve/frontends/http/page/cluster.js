// The cluster live: one document, asked for twice a second while somebody looks, and what changed since the last.

import { json } from "./api.js";
import { ago, byId, bytes, count, digits, el, keyed, rate, say, share, time } from "./dom.js";
import { bar, setBar } from "./ledger.js";
import { drawArrows } from "./links.js";
import { drawList, makeCard, updateCard } from "./workers.js";

const WATCHED_MS = 500;
const UNWATCHED_MS = 5000; // the view is not open: only whether the server is there
const SHOWN_REQUESTS = 10;
const SHOWN_DECISIONS = 8;
const GONE_S = 60; // that a worker that left is still shown
const STEADY_S = 1.2; // workers of other processes report each second: rates are over longer

export class Cluster {
  /** `about` is told each document; `open`: what a click on a request or a decision shows. */
  constructor(about, open) {
    this.about = about;
    this.open = open;
    this.last = null; // the latest document
    this.earlier = []; // those before it that rates are measured from
    this.cards = new Map();
    this.known = new Map(); // workers by name, those that left too
    this.changes = null; // the latest that was told
    this.timer = null;
    this.asked = 0;
    document.addEventListener("visibilitychange", () => this.watch());
    new ResizeObserver(() => this.arrows()).observe(byId("topology"));
  }

  get isWatched() {
    return byId("cluster").getClientRects().length > 0;
  }

  /** Asks now, and goes on. */
  watch() {
    clearTimeout(this.timer);
    if (!document.hidden) this.ask(++this.asked);
  }

  async ask(number) {
    let wait = this.isWatched ? WATCHED_MS : UNWATCHED_MS;
    try {
      this.take(await json("/debug/cluster", { signal: AbortSignal.timeout(10_000) }));
    } catch (error) {
      wait = this.failed(error);
    }
    if (number !== this.asked || document.hidden) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(number), wait);
  }

  /** How long to wait for the next try. */
  failed(error) {
    const off = error.status === 404;
    state(off ? "ready" : "unreachable");
    byId("cluster-note").hidden = false;
    say(byId("cluster-note"), off ? "Nothing is recorded here: the server runs with --debug_keep=0." : "The server does not answer. Trying again.");
    return off ? 60_000 : 2000;
  }

  take(document) {
    byId("cluster-note").hidden = true;
    state(document.state);
    if (this.last && document.now_s < this.last.now_s) this.earlier = []; // another server
    if (this.last && document.now_s > this.last.now_s) this.earlier.push(this.last);
    while (this.earlier.length > 1 && document.now_s - this.earlier[1].now_s >= STEADY_S) this.earlier.shift();
    this.last = document;
    this.about(document);
    this.tell(document);
    if (this.isWatched) this.draw();
  }

  draw() {
    const [before] = this.earlier;
    this.totals(this.last, before);
    this.workers(this.last, before);
    this.links(this.last, before);
    this.requests(this.last);
    this.decisions(this.last);
  }

  /** Who came and went, for those who do not see it. */
  tell(document) {
    const key = (change) => `${change.at_s} ${change.worker} ${change.what}`;
    const latest = document.changes.at(-1);
    if (this.changes !== null && latest && key(latest) !== this.changes) say(byId("cluster-told"), `${latest.worker} ${changed(latest)}`);
    this.changes = latest ? key(latest) : "";
  }

  // ---------------------------------------------------------- parts

  totals(document, before) {
    const { totals, workers } = document;
    const elapsed = before ? document.now_s - before.now_s : 0;
    const paced = elapsed > 0 ? Math.max(0, (totals.output_tokens - before.totals.output_tokens) / elapsed) : 0;
    const sum = (field) => workers.reduce((all, each) => all + each[field], 0);
    const rows = [
      ["waiting", count(totals.waiting)],
      ["running", count(totals.running)],
      ["tokens/s", paced ? digits(paced) : "0"],
      ["prefix hits", share(sum("prefix_hits"), sum("prefix_queries"))],
      ["workers", count(workers.length)],
    ];
    const latest = document.changes.at(-1);
    if (latest && document.now_s - latest.at_s < GONE_S) rows.push([latest.worker, `${changed(latest)} ${ago(document.now_s - latest.at_s)}`]);
    drawList(byId("totals"), rows);
  }

  workers(document, before) {
    const shown = this.present(document);
    const earlier = new Map(before?.workers.map((each) => [each.worker, each]) ?? []);
    const elapsed = before ? document.now_s - before.now_s : 0;
    for (const role of ["prefill", "decode", "colocated"]) {
      const own = shown.filter((each) => each.role === role);
      keyed(byId(`pool-${role}`), own, (each) => each.worker, (each) => {
        const card = makeCard(each);
        this.cards.set(each.worker, card);
        return card;
      }, (card, each) => updateCard(card, each, earlier.get(each.worker), elapsed));
      byId(`pool-${role}`).hidden = own.length === 0;
    }
  }

  /** Those that are there, then those that left a short while ago, as they were last seen. */
  present(document) {
    const names = new Set(document.workers.map((each) => each.worker));
    for (const each of document.workers) this.known.set(each.worker, { ...each, at_s: document.now_s });
    const gone = [];
    for (const [name, each] of this.known) {
      if (names.has(name)) continue;
      if (document.now_s - each.at_s < GONE_S && document.now_s >= each.at_s) gone.push({ ...each, gone: true });
      else {
        this.known.delete(name);
        this.cards.delete(name);
      }
    }
    return [...document.workers, ...gone];
  }

  links(document, before) {
    const earlier = new Map(before?.links.map((each) => [`${each.source} ${each.destination}`, each]) ?? []);
    this.flows = document.links.map((each) => {
      const old = earlier.get(`${each.source} ${each.destination}`) ?? { bytes: before ? 0 : each.bytes, wire_s: 0 };
      const moved = Math.max(0, each.bytes - old.bytes);
      const seconds = each.wire_s - old.wire_s;
      const speed = moved > 0 && seconds > 0 && old.wire_s > 0 ? moved / seconds : each.wire_s > 0 ? each.bytes / each.wire_s : 0;
      return { ...each, moves: moved > 0, label: rate(speed) };
    });
    keyed(byId("links"), this.flows, (flow) => `${flow.source} ${flow.destination}`, () =>
      el("li", {}, el("b"), el("span", { class: "way", "aria-hidden": "true" }), el("b"), el("span"), el("span")),
    (row, flow) => {
      row.classList.toggle("moves", flow.moves);
      [flow.source, "", flow.destination, flow.label, `${bytes(flow.bytes)} in ${count(flow.parts)} parts`]
        .forEach((text, index) => say(row.children[index], text));
    });
    this.arrows();
  }

  arrows() {
    if (this.flows && this.isWatched) drawArrows(byId("arrows"), byId("topology"), this.cards, this.flows);
  }

  requests(document) {
    keyed(byId("requests"), document.requests.slice(0, SHOWN_REQUESTS), (each) => each.request_id, (each) => {
      const parts = bar(each.parts_ns);
      const button = el("button", { type: "button", class: "row", on: { click: () => this.open.request(each.request_id) } },
        el("span", { class: "name" }), el("span", { class: "phase" }), el("span", { class: "where" }),
        el("span", { class: "tokens" }), parts, el("span", { class: "took" }));
      return el("li", {}, button);
    }, (row, each) => {
      const [name, phase, where, tokens, parts, took] = row.firstElementChild.children;
      const whole = Object.values(each.parts_ns).reduce((sum, part) => sum + part, 0);
      say(name, short(each.request_id));
      say(phase, each.finish && each.phase !== "finished" ? `${each.phase} · ${each.finish}` : each.phase);
      phase.className = `phase ${each.phase}`;
      say(where, pair(each.workers));
      say(tokens, `${count(each.prompt_tokens)} in · ${count(each.tokens)} out`);
      setBar(parts, each.parts_ns);
      say(took, time(whole / 1e9));
    });
    empty(byId("requests"), "No request yet.");
  }

  decisions(document) {
    keyed(byId("decisions"), document.decisions.slice(0, SHOWN_DECISIONS), (each) => `${each.at_s} ${each.request_id}`, (each) => {
      const button = el("button", { type: "button", class: "row", on: { click: () => this.open.decision(each) } },
        el("span", { class: "when" }), el("span", { class: `phase ${each.decision}`, text: each.decision }),
        el("span", { class: "where", text: pair(each.taken) }), el("span", { class: "reason", text: each.reason }));
      return el("li", {}, button);
    }, (row, each) => say(row.firstElementChild.firstElementChild, ago(document.now_s - each.at_s)));
    empty(byId("decisions"), "No decision yet.");
  }
}

function empty(list, text) {
  const none = !list.keyed?.size;
  if (none && !list.querySelector(".empty")) list.append(el("li", { class: "empty", text }));
  if (!none) list.querySelector(".empty")?.remove();
}

function changed(change) {
  return { joined: "joined", leaving: "is leaving", gone: "is gone" }[change.what] ?? change.what;
}

function state(name) {
  byId("state").dataset.state = name;
  say(byId("state-text"), name);
}

/** Without what the server put around the client's own id. */
export function short(id) {
  const own = id.replace(/^(chatcmpl|cmpl)-/, "").replace(/-[0-9a-f]{8}-\d+$/, "");
  return own.length > 16 ? `${own.slice(0, 9)}…${own.slice(-5)}` : own;
}

export function pair(workers) {
  if (!workers?.prefill && !workers?.decode) return "–";
  return workers.prefill === workers.decode ? workers.decode : `${workers.prefill ?? "–"} → ${workers.decode ?? "–"}`;
}
