// Puts the page together: the chat, the cluster beside it, the details over both, the colours.

import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { Detail } from "./detail.js";
import { byId } from "./dom.js";

const THEME = "jdisagg.theme";
const THEMES = [["auto", "Auto", "as the system"], ["light", "Light", "light"], ["dark", "Dark", "dark"]];

const detail = new Detail();
const chat = new Chat((id) => detail.request(id));
const cluster = new Cluster((document) => chat.about(document), detail);

for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const each of document.querySelectorAll(".views button")) each.setAttribute("aria-pressed", String(each === button));
    cluster.watch();
  });
}

function colour(name) {
  const [, label, words] = THEMES.find(([each]) => each === name) ?? THEMES[0];
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = label;
  byId("theme").setAttribute("aria-label", `Colours: ${words}`);
}

byId("theme").addEventListener("click", () => {
  const now = THEMES.findIndex(([each]) => each === document.documentElement.dataset.theme);
  const [next] = THEMES[(now + 1) % THEMES.length];
  localStorage.setItem(THEME, next);
  colour(next);
});

colour(localStorage.getItem(THEME) ?? "auto");
cluster.watch();
byId("prompt").focus({ preventScroll: true });
