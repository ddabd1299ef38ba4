// What a click shows: the life of a request on a time line, and who was weighed in a decision.

import { json } from "./api.js";
import { pair, short } from "./cluster.js";
import { byId, count, el, time } from "./dom.js";
import { PARTS } from "./ledger.js";

const AGAIN_MS = 1000; // a request that runs is looked at again
const NAMES = new Map(PARTS);
const TICKS = 4;

export class Detail {
  constructor() {
    this.dialog = byId("detail");
    this.timer = null;
    byId("detail-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => clearTimeout(this.timer));
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  open(title, ...body) {
    byId("detail-title").textContent = title;
    byId("detail-body").replaceChildren(...body);
    if (!this.dialog.open) this.dialog.showModal();
  }

  async request(id) {
    clearTimeout(this.timer);
    const title = `Request ${short(id)}`;
    try {
      const traces = (await json(`/debug/requests/${encodeURIComponent(id)}`)).requests;
      this.open(title, ...traces.map(life));
      if (traces.some((each) => each.finish === null)) {
        this.timer = setTimeout(() => this.dialog.open && this.request(id), AGAIN_MS);
      }
    } catch (error) {
      this.open(title, el("p", { class: "wrong", text: error.message }));
    }
  }

  async decision(brief) {
    clearTimeout(this.timer);
    const title = `Decision on ${short(brief.request_id)}`;
    let full = brief;
    try {
      const [trace] = (await json(`/debug/requests/${encodeURIComponent(brief.request_id)}`)).requests;
      full = trace.decisions.find((each) => each.at_s === brief.at_s) ?? brief;
    } catch {
      // its request is forgotten: what the list said is all there is
    }
    const body = [el("p", { class: "verdict" }, el("span", { class: `phase ${full.decision}`, text: full.decision }), pair(full.taken)),
      el("p", { text: full.reason })];
    for (const [kind, able] of Object.entries(full.candidates ?? {})) body.push(weighed(kind, able, full.taken));
    if (!full.candidates) body.push(el("p", { class: "note", text: "Nobody was weighed." }));
    const look = el("button", { type: "button", class: "quiet", text: "The request's life", on: { click: () => this.request(full.request_id) } });
    this.open(title, ...body, el("p", { class: "buttons" }, look));
  }
}

// ------------------------------------------------------------ a decision

const KINDS = { prefill: "For the prompt", decode: "For the answer", decode_alone: "A decode worker by itself", colocated: "One worker for both" };

function weighed(kind, able, taken) {
  const most = Math.max(1e-9, ...able.map((each) => each.cost).filter(Number.isFinite));
  const isTaken = (worker) => taken && (kind === "prefill" ? taken.prefill : taken.decode) === worker;
  const rows = able.map((each) =>
    el("tr", { class: isTaken(each.worker) ? "taken" : "" },
      el("th", { scope: "row", text: each.worker }),
      el("td", {}, el("span", { class: "cost", style: { "--share": String(Math.min(1, each.cost / most)) }, text: number(each.cost) })),
      el("td", { text: Object.entries(each.parts).map(([part, cost]) => `${part} ${number(cost)}`).join(" + ") }),
      el("td", { text: count(each.served) }),
      el("td", { text: isTaken(each.worker) ? "taken" : (each.last_resort ?? "") })));
  const head = ["worker", "cost", "made of", "served", ""].map((text) => el("th", { scope: "col", text }));
  return el("div", { class: "scroll" }, el("table", { class: "weighed" }, el("caption", { text: KINDS[kind] ?? kind }),
    el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

function number(cost) {
  return Number.isFinite(cost) ? String(Number(cost.toPrecision(4))) : "never";
}

// ------------------------------------------------------------ a life

function life(trace) {
  const start = trace.arrival_s;
  const end = Math.max(start + 1e-6, ...trace.spans.map((each) => each.end_s), trace.last_token_s ?? 0);
  const at = (seconds) => Math.min(100, Math.max(0, (100 * (seconds - start)) / (end - start)));
  const facts = [
    ["phase", trace.finish ? `${trace.phase} (${trace.finish.reason})` : trace.phase], ["workers", pair(trace.workers)],
    ["prompt", `${count(trace.prompt_tokens)} tokens, ${count(trace.cached_tokens)} reused`],
    ["output", `${count(trace.tokens)} of at most ${count(trace.max_tokens)}`], ["in all", time(end - start)],
  ];
  if (trace.ledger) facts.push(["transfer hidden", time(trace.ledger.transfer_ns.hidden / 1e9)]);
  return el("section", { class: "life", "aria-label": trace.request_id },
    el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value })))),
    trace.finish?.detail ? el("p", { class: "note", text: trace.finish.detail }) : null,
    el("div", { class: "line" }, ...lanes(trace, at), axis(end - start)),
    spanTable(trace, start), messageTable(trace, start));
}

function lanes(trace, at) {
  const rows = [lane("ledger", trace.spans.map((span) =>
    block(at(span.start_s), at(span.end_s), `part-${span.part}`, `${NAMES.get(span.part)} ${time(span.end_s - span.start_s)}`)))];
  if (trace.chunks.length) {
    rows.push(lane("chunks", trace.chunks.map((chunk) =>
      point(at(chunk.at_s), "part-prefill", `tokens ${chunk.start} to ${chunk.start + chunk.tokens} on ${chunk.worker}`))));
  }
  const parts = shipped(trace.parts);
  if (parts.length) {
    rows.push(lane("KV parts", parts.map((part) =>
      block(at(part.left), at(part.arrived), "part-transfer", `part ${part.part}: ${part.pages} pages as ${part.wire}, ${time(part.arrived - part.left)}`))));
  }
  if (trace.first_token_s !== null) {
    rows.push(lane("tokens", [block(at(trace.first_token_s), at(trace.last_token_s), "part-decode", `${trace.tokens} tokens`)]));
  }
  const messages = trace.messages.map((each) => point(at(each.at_s), "tick", `${each.message}: ${each.from} to ${each.to}`));
  if (messages.length) rows.push(lane("messages", messages));
  return rows;
}

/** Each part from when it left to when it arrived. */
function shipped(rows) {
  const left = new Map();
  const done = [];
  for (const row of rows) {
    if (row.what === "to leave" || row.what === "left") left.set(row.part, row);
    else if (row.what.startsWith("arrived")) {
      const began = row.wire_s > 0 ? row.at_s - row.wire_s : (left.get(row.part)?.at_s ?? row.at_s);
      done.push({ part: row.part, left: began, arrived: row.at_s, pages: row.pages, wire: row.wire });
    }
  }
  return done;
}

function lane(name, marks) {
  return el("div", { class: "lane" }, el("span", { class: "lane-name", text: name }), el("div", { class: "track" }, ...marks));
}

function block(left, right, kind, title) {
  return el("i", { class: `block ${kind}`, title, style: { left: `${left}%`, width: `${Math.max(0, right - left)}%` } });
}

function point(left, kind, title) {
  return el("i", { class: `point ${kind}`, title, style: { left: `${left}%` } });
}

function axis(whole) {
  const ticks = Array.from({ length: TICKS + 1 }, (_, index) => el("span", { text: index ? time((whole * index) / TICKS) : "0" }));
  return el("div", { class: "lane axis", "aria-hidden": "true" }, el("span", { class: "lane-name" }), el("div", { class: "track" }, ...ticks));
}

function spanTable(trace, start) {
  const rows = trace.spans.map((span) => el("tr", {},
    el("td", {}, el("i", { class: `dot part-${span.part}` }), NAMES.get(span.part) ?? span.part),
    el("td", { text: time(span.start_s - start) }), el("td", { text: time(span.end_s - span.start_s) })));
  return table("Parts", ["part", "begins", "takes"], rows);
}

function messageTable(trace, start) {
  const rows = trace.messages.map((each) => {
    const { at_s, from, to, message, attempt, ...more } = each;
    const told = Object.entries(more).map(([name, value]) => `${name} ${value}`).join(", ");
    return el("tr", {}, el("td", { text: time(Math.max(0, at_s - start)) }), el("td", { text: `${from} → ${to}` }),
      el("td", { text: message }), el("td", { text: told }));
  });
  return el("details", {}, el("summary", { text: `${count(trace.messages.length)} messages${trace.left_out ? `, ${trace.left_out} rows left out` : ""}` }),
    table("Messages", ["at", "way", "message", ""], rows));
}

function table(caption, names, rows) {
  return el("div", { class: "scroll" }, el("table", {}, el("caption", { class: "unseen", text: caption }),
    el("thead", {}, el("tr", {}, ...names.map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...rows)));
}

