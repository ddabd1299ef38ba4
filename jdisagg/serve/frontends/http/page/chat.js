// The conversation: asked, streamed, stopped, asked again; each answer with its ledger. Kept for this tab alone.

import { call, events, json } from "./api.js";
import { byId, count, digits, el, say, share, time } from "./dom.js";
import { ledger } from "./ledger.js";
import { show } from "./markdown.js";

const KEPT = "jdisagg.chat";
const MOST_MESSAGES = 200;
const MOST_CHARACTERS = 1_000_000;
const DRAWN_MS = 80; // text is laid out no more often
const CUT_OFF = "Cut off when the page was left.";

export class Chat {
  /** `openRequest` shows the life of a request by its id. */
  constructor(openRequest) {
    this.openRequest = openRequest;
    this.messages = restored();
    this.abort = null; // of the answer under way
    this.withTemplate = true; // whether the model has one: else a text is continued
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    window.addEventListener("pagehide", () => this.keep());
    this.draw();
  }

  /** What the server says of its model. */
  about(document) {
    this.withTemplate = document.chat;
    byId("prompt").placeholder = document.chat ? `Ask ${document.model}` : `A text for ${document.model} to continue`;
  }

  send() {
    const text = byId("prompt").value;
    if (!text.trim() || this.abort) return;
    byId("prompt").value = "";
    this.messages.push({ role: "user", text: this.withTemplate ? text.trim() : text });
    this.answer();
  }

  /** Asks again for the last answer. */
  again() {
    if (this.abort) return;
    while (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    if (this.messages.length) this.answer();
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.keep();
    this.draw();
    byId("prompt").focus();
  }

  // ---------------------------------------------------------- one answer

  async answer() {
    const message = { role: "assistant", text: "", request: drawnId(), running: true };
    const asked = this.asked();
    this.messages.push(message);
    this.abort = new AbortController();
    this.draw();
    say(byId("told"), "Answering");
    const drawing = setInterval(() => this.drawText(message), DRAWN_MS);
    try {
      await this.stream(message, asked, this.abort.signal);
    } catch (error) {
      if (this.abort.signal.aborted) message.note = "Stopped.";
      else message.error = error.message || String(error);
    }
    clearInterval(drawing);
    this.abort = null;
    delete message.running;
    if (!message.parts) await this.fetchLedger(message);
    this.keep();
    this.draw();
    say(byId("told"), message.error ?? message.note ?? `Answered with ${message.usage?.completion_tokens ?? 0} tokens`);
  }

  /** [path, body] of the conversation so far. */
  asked() {
    const temperature = Number.parseFloat(byId("temperature").value);
    const most = Number.parseInt(byId("max-tokens").value, 10);
    const body = { stream: true, stream_options: { include_usage: true }, ledger: true };
    if (Number.isFinite(temperature)) body.temperature = temperature;
    if (most > 0) body.max_tokens = most;
    if (!this.withTemplate) return ["/v1/completions", { ...body, prompt: this.messages.at(-1).text }];
    const said = this.messages.filter((each) => each.text).map((each) => ({ role: each.role, content: each.text }));
    return ["/v1/chat/completions", { ...body, messages: said }];
  }

  async stream(message, [path, body], signal) {
    const answer = await call(path, {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", "X-Request-Id": message.request },
    });
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) message.usage = event.usage;
      const [choice] = event.choices ?? [];
      if (!choice) continue;
      message.text += choice.delta?.content ?? choice.text ?? "";
      message.finish = choice.finish_reason ?? message.finish;
      if (choice.ledger) {
        message.parts = choice.ledger.parts_ns;
        message.drafts = choice.ledger.accepted_draft_tokens;
      }
    }
    if (!message.finish) throw new Error("The connection ended before the answer did.");
    if (message.finish === "length") message.note = "Ended at its most tokens.";
  }

  /** Of an answer that was stopped or failed: the server knows it a moment later. */
  async fetchLedger(message) {
    for (let tries = 0; tries < 5 && !message.parts; tries++) {
      try {
        const [trace] = (await json(`/debug/requests/${message.request}`)).requests;
        message.usage ??= {
          completion_tokens: trace.tokens, prompt_tokens: trace.prompt_tokens,
          prompt_tokens_details: { cached_tokens: trace.cached_tokens },
        };
        message.parts = trace.ledger?.parts_ns;
      } catch {
        return; // it never began, or nothing is remembered
      }
      if (!message.parts) await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }

  // ---------------------------------------------------------- what is seen

  draw() {
    const log = byId("log");
    const busy = this.abort !== null;
    byId("stop").hidden = !busy;
    byId("send").hidden = busy;
    log.setAttribute("aria-busy", String(busy));
    if (!this.messages.length) {
      log.replaceChildren(el("p", { class: "empty", text: "Answers come with a ledger: where each one's time went." }));
      return;
    }
    log.replaceChildren(...this.messages.map((each, index) => this.drawn(each, index === this.messages.length - 1)));
    log.scrollTop = log.scrollHeight;
  }

  drawn(message, isLast) {
    const text = el("div", { class: "text" });
    if (message.role === "user") text.textContent = message.text;
    else show(text, message.text);
    const node = el("article", { class: `message ${message.role}`, "aria-label": message.role === "user" ? "You" : "Answer" }, text);
    message.node = text;
    if (message.running) node.classList.add("running");
    if (message.error) node.append(el("p", { class: "wrong", role: "alert", text: message.error }));
    if (message.note) node.append(el("p", { class: "note", text: message.note }));
    if (message.parts) node.append(ledger(message.parts), facts(message));
    if (message.role === "assistant" && !message.running) node.append(this.buttons(message, isLast));
    return node;
  }

  buttons(message, isLast) {
    const row = el("p", { class: "buttons" });
    if (isLast) row.append(el("button", { type: "button", class: "quiet", text: "Regenerate", on: { click: () => this.again() } }));
    if (message.parts) {
      row.append(el("button", { type: "button", class: "quiet", text: "Its life", on: { click: () => this.openRequest(message.request) } }));
    }
    return row;
  }

  drawText(message) {
    const log = byId("log");
    if (!message.node || message.drawn === message.text.length) return;
    message.drawn = message.text.length;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    show(message.node, message.text);
    if (atEnd) log.scrollTop = log.scrollHeight;
    this.keep();
  }

  keep() {
    const kept = this.messages.slice(-MOST_MESSAGES).map(({ node, drawn, ...rest }) => rest);
    const text = JSON.stringify(kept);
    if (text.length < MOST_CHARACTERS) sessionStorage.setItem(KEPT, text);
  }
}

/** Numbers of one answer. */
function facts(message) {
  const { parts, usage } = message;
  const tokens = usage?.completion_tokens ?? 0;
  const decodeNs = parts.first_step + parts.decode;
  const firstNs = parts.queue + parts.reserve_wait + parts.prefill;
  const drafts = message.drafts ?? usage?.completion_tokens_details?.accepted_prediction_tokens;
  const rows = [["tokens", count(tokens)]];
  if (tokens > 1 && decodeNs > 0) rows.push(["tokens/s", digits(((tokens - 1) * 1e9) / decodeNs)]);
  if (tokens > 0) rows.push(["first token", time(firstNs / 1e9)]);
  if (usage) {
    const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
    rows.push(["reused of prompt", `${count(reused)} of ${count(usage.prompt_tokens)} (${share(reused, usage.prompt_tokens)})`]);
  }
  if (drafts !== undefined && drafts !== null) rows.push(["accepted drafts", count(drafts)]);
  return el("dl", { class: "facts" }, ...rows.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
}

function restored() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
    for (const message of kept) {
      if (!message.running) continue;
      delete message.running;
      message.note = CUT_OFF;
    }
    return kept;
  } catch {
    return [];
  }
}

/** By which its request is found again. (`randomUUID` is not there on plain HTTP from another machine.) */
function drawnId() {
  return `page-${Array.from(crypto.getRandomValues(new Uint8Array(8)), (each) => each.toString(16).padStart(2, "0")).join("")}`;
}
