// Calls of this server: the key that it may ask for, JSON, and streams of events.

import { byId } from "./dom.js";

const KEY = "jdisagg.key";
let asking = null; // the one dialog that all calls wait for

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The answer, once the key is right. Throws Refused with the server's own words. */
export async function call(path, options = {}) {
  for (;;) {
    const sent = sessionStorage.getItem(KEY);
    const answer = await fetch(path, { ...options, headers: headers(options.headers ?? {}), cache: "no-store" });
    if (answer.status === 401) {
      await newKey(sent);
      options.signal?.throwIfAborted();
      continue;
    }
    if (!answer.ok) throw new Refused(answer.status, await words(answer));
    return answer;
  }
}

async function words(answer) {
  try {
    const body = await answer.json();
    return body.error?.message ?? body.detail ?? `HTTP ${answer.status}`;
  } catch {
    return `HTTP ${answer.status}`;
  }
}

export async function json(path, options) {
  return (await call(path, options)).json();
}

/** Events of a stream: objects, until "[DONE]" or the end of the connection. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const text = line.slice(6);
      if (text === "[DONE]") return;
      yield JSON.parse(text);
    }
  }
}

/** Waits until the reader gave another key than `wrong`; one dialog, however many calls were refused. */
function newKey(wrong) {
  if (sessionStorage.getItem(KEY) !== wrong) return Promise.resolve();
  asking ??= ask(wrong).finally(() => (asking = null));
  return asking;
}

function ask(wrong) {
  const dialog = byId("key");
  const input = byId("key-input");
  byId("key-wrong").textContent = wrong ? "That key was refused." : "";
  input.value = "";
  return new Promise((resolve) => {
    const take = (event) => {
      event.preventDefault();
      const key = input.value.trim();
      if (!/^[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?$/.test(key)) {
        byId("key-wrong").textContent = "A key is printable ASCII.";
        return;
      }
      sessionStorage.setItem(KEY, key);
      byId("key-form").removeEventListener("submit", take);
      dialog.removeEventListener("cancel", stay);
      dialog.close();
      resolve();
    };
    const stay = (event) => event.preventDefault(); // nothing works without it
    byId("key-form").addEventListener("submit", take);
    dialog.addEventListener("cancel", stay);
    if (!dialog.open) dialog.showModal();
    input.focus();
  });
}
