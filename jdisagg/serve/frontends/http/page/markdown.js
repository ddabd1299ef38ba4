// What a model wrote, as nodes: fenced code, `code`, **bold**, ## headings. All else is text as it stands, HTML too.

import { el } from "./dom.js";

const FENCE = /^\s{0,3}```\s*([\w+#.-]*)\s*$/;
const HEADING = /^#{2,5}\s+(.*\S)\s*$/;
const INLINE = /(`[^`\n]+`)|(\*\*(?=\S)[^*\n]+?\S?\*\*(?![\w*]))/g;

/** Replaces what is in `node` by `text`. */
export function show(node, text) {
  const blocks = [];
  let code = null;
  let lines = [];
  const flush = () => {
    const block = lines.join("\n").replace(/^\n+|\n+$/g, "");
    if (block) blocks.push(inline(el("p"), block));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    if (code !== null) {
      if (fence && !fence[1]) {
        blocks.push(listing(code));
        code = null;
      } else code.push(line);
    } else if (fence) {
      flush();
      code = [];
    } else if (HEADING.test(line)) {
      flush();
      blocks.push(inline(el("p", { class: "heading" }), HEADING.exec(line)[1]));
    } else lines.push(line);
  }
  flush();
  if (code !== null) blocks.push(listing(code)); // not closed yet
  node.replaceChildren(...blocks);
}

function listing(lines) {
  return el("pre", { tabindex: "0" }, el("code", { text: lines.join("\n") }));
}

function inline(node, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    node.append(text.slice(end, match.index));
    node.append(match[1] ? el("code", { text: match[0].slice(1, -1) }) : el("strong", { text: match[0].slice(2, -2) }));
    end = match.index + match[0].length;
  }
  node.append(text.slice(end));
  return node;
}
