/** Markdown out of texts: nothing in a text can become markup of its own. */

/** @param {string} text */
export function escapeMarkdown(text) {
  return text.replace(/[\\`*_{}[\]<>#|~]/g, "\\$&").replace(/\s*\n\s*/g, " ");
}

/** @param {string} text */
export function inlineCode(text) {
  const ticks = "`".repeat(1 + Math.max(0, ...Array.from(text.matchAll(/`+/g), (found) => found[0].length)));
  const room = text.startsWith("`") || text.endsWith("`") ? " " : "";
  return ticks + room + text.replace(/\s*\n\s*/g, " ") + room + ticks;
}

/**
 * @param {string} text
 * @param {string} [language]
 */
export function fenced(text, language = "") {
  const ticks = "`".repeat(Math.max(3, 1 + Math.max(0, ...Array.from(text.matchAll(/`+/g), (found) => found[0].length))));
  return `${ticks}${language}\n${text}\n${ticks}`;
}

/**
 * @param {string[]} titles
 * @param {string[][]} rows
 * @param {boolean[]} [right]
 */
export function markdownTable(titles, rows, right = []) {
  const line = (/** @type {string[]} */ cells) => `| ${cells.join(" | ")} |`;
  const rule = titles.map((_, i) => (right[i] ? "---:" : "---"));
  return [line(titles.map(escapeMarkdown)), line(rule), ...rows.map((row) => line(row.map(escapeMarkdown)))].join("\n");
}

/**
 * A title and what is under it.
 * @param {string} title
 * @param {string} body
 */
export function section(title, body) {
  return title && body ? `**${escapeMarkdown(title)}**\n\n${body}` : body;
}
