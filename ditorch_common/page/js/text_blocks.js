/**
 * Blocks that are read: banner, facts, text, list, code, command.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Kind} Kind
 * @typedef {import("./types.js").Text} Text
 */
import { copy, el } from "./dom.js";
import { escapeMarkdown, fenced, inlineCode, section } from "./markdown.js";
import { SIGNS } from "./verdicts.js";
import { say, word } from "./words.js";

/**
 * A block's own frame, with its title.
 * @param {Block} block
 * @param {...Node} content
 */
export function framed(block, ...content) {
  const title = say(block.title);
  return el("section", { class: `block ${block.kind}` }, title ? el("h3", {}, title) : null, ...content);
}

/** @param {string} text */
export function copyButton(text) {
  const button = el("button", { type: "button", class: "copy" }, word("copy"));
  button.addEventListener("click", async () => {
    button.textContent = word((await copy(text)) ? "copied" : "failed");
    setTimeout(() => { button.textContent = word("copy"); }, 1500);
  });
  return button;
}

/** @type {Kind} */
export const BANNER = {
  show: (block) => {
    const state = block.state in SIGNS ? block.state : "unknown";
    const sign = el("span", { class: "sign", "aria-label": word(state), role: "img" }, SIGNS[state]);
    const lines = block.lines.map((/** @type {Text} */ line) => el("p", {}, say(line)));
    return { element: el("section", { class: `block banner ${state}` }, sign, el("div", {}, el("h2", {}, say(block.headline)), ...lines)) };
  },
  markdown: (block) => [`## ${SIGNS[block.state] ?? "?"} ${escapeMarkdown(say(block.headline))}`,
    ...block.lines.map((/** @type {Text} */ line) => escapeMarkdown(say(line)))].join("\n\n"),
};

/** @type {Kind} */
export const FACTS = {
  show: (block) => ({ element: framed(block, el("dl", { class: "facts-list" }, ...block.rows.flatMap(
    (/** @type {[Text, string]} */ [name, value]) => [el("dt", {}, say(name)), el("dd", {}, say(value))]))) }),
  markdown: (block) => section(say(block.title),
    block.rows.map((/** @type {[Text, string]} */ [name, value]) => `- ${escapeMarkdown(say(name))}: ${inlineCode(say(value))}`).join("\n")),
};

/** @type {Kind} */
export const TEXT = {
  show: (block) => ({ element: framed(block, el("p", { class: "prose" }, say(block.text))) }),
  markdown: (block) => section(say(block.title), say(block.text).split("\n").map(escapeMarkdown).join("  \n")),
};

/** @type {Kind} */
export const LIST = {
  show: (block) => ({ element: framed(block, el("ul", {}, ...block.items.map((/** @type {Text} */ item) => el("li", {}, say(item))))) }),
  markdown: (block) => section(say(block.title), block.items.map((/** @type {Text} */ item) => `- ${escapeMarkdown(say(item))}`).join("\n")),
};

/** @type {Kind} */
export const CODE = {
  show: (block) => {
    const lines = block.lines.map((/** @type {[number, string]} */ [number, text]) => el("div",
      { class: number === block.mark ? "line marked" : "line", "aria-current": number === block.mark ? "true" : null },
      el("span", { class: "pointer", "aria-hidden": "true" }, number === block.mark ? "▶" : ""), el("span", { class: "number" }, String(number)),
      el("code", {}, text || " ")));
    const file = block.file ? el("div", { class: "file" }, block.file) : "";
    return { element: framed(block, el("div", { class: "source", tabindex: "0" }, file, ...lines)) };
  },
  markdown: (block) => {
    const body = block.lines.map((/** @type {[number, string]} */ [number, text]) => `${number === block.mark ? ">" : " "} ${String(number).padStart(5)}  ${text}`);
    const file = block.file ? `${inlineCode(block.file)}\n\n` : "";
    return section(say(block.title), file + fenced(body.join("\n"), "python"));
  },
};

/**
 * A command whose options stay in one piece where the line is broken ("--steps", not "--" and "steps").
 * @param {string} text
 */
export function commandText(text) {
  return text.split(/(\s+)/).map((part) => (part.startsWith("-") && part.length <= 30 ? el("span", { class: "option" }, part) : part));
}

/** @type {Kind} */
export const COMMAND = {
  show: (block) => ({ element: framed(block, el("div", { class: "command-line" }, el("pre", { tabindex: "0" }, ...commandText(block.text)), copyButton(block.text))) }),
  markdown: (block) => section(say(block.title), fenced(block.text, "sh")),
};
