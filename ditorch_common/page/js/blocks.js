/**
 * All kinds of blocks, and how a list of them becomes part of the page.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Context} Context
 * @typedef {import("./types.js").Kind} Kind
 * @typedef {import("./types.js").Shown} Shown
 */
import { CURVES } from "./curves.js";
import { el } from "./dom.js";
import { FLAME } from "./flame.js";
import { HEAT } from "./heat.js";
import { escapeMarkdown, section } from "./markdown.js";
import { BARS, HISTOGRAM, TENSOR_MAP } from "./small_charts.js";
import { showTable } from "./table.js";
import { BANNER, CODE, COMMAND, FACTS, LIST, TEXT, framed } from "./text_blocks.js";
import { TIMELINE } from "./timeline.js";
import { showPairTree, showTree } from "./tree.js";
import { say, word } from "./words.js";

/** @type {Record<string, Kind>} */
const KINDS = { banner: BANNER, facts: FACTS, text: TEXT, list: LIST, code: CODE, command: COMMAND, histogram: HISTOGRAM,
  tensor_map: TENSOR_MAP, bars: BARS, lines: CURVES, heat: HEAT, flame: FLAME, timeline: TIMELINE };

/**
 * @param {Block} block
 * @param {Context} context
 * @returns {Shown}
 */
function showKind(block, context) {
  if (block.kind === "table") {
    const made = showTable(block, { ...context, params: context.tableParams() });
    return { ...made, element: framed(block, made.element), markdown: () => section(say(block.title), made.markdown()) };
  }
  if (block.kind === "tree") return showTree(block, context, (blocks, inner) => showAll(blocks, inner).element);
  if (block.kind === "pair_tree") return showPairTree(block, context);
  if (block.kind === "group") return showGroup(block, context);
  const kind = Object.hasOwn(KINDS, block.kind) ? KINDS[block.kind] : null;
  if (!kind) {
    const text = word("unknown_kind", block.kind);
    return { element: framed({ ...block, kind: "unknown" }, el("p", { class: "soft" }, text)), markdown: () => escapeMarkdown(text) };
  }
  return { ...kind.show(block, context), markdown: () => kind.markdown(block) };
}

/**
 * One block; what cannot be shown says so and leaves the others alone.
 * @param {Block} block
 * @param {Context} context
 * @returns {Shown}
 */
export function showBlock(block, context) {
  try {
    return showKind(block, context);
  } catch (error) {
    const text = word("failed_block", String(error));
    return { element: framed({ ...block, kind: "unknown" }, el("p", { class: "soft" }, text)), markdown: () => escapeMarkdown(text) };
  }
}

/**
 * @param {Block[]} blocks
 * @param {Context} context
 */
export function showAll(blocks, context) {
  const shown = blocks.map((block, i) => showBlock(block, { ...context, place: `${context.place}/${i}` }));
  return {
    element: el("div", { class: "blocks" }, ...shown.map((one) => one.element)),
    refresh: async () => { for (const one of shown) await one.refresh?.(); },
    markdown: () => shown.map((one) => one.markdown?.() ?? "").filter(Boolean).join("\n\n"),
  };
}

/**
 * @param {Block} block
 * @param {Context} context
 * @returns {Shown}
 */
function showGroup(block, context) {
  const inner = showAll(block.blocks, context), { memory, place } = context;
  const element = el("details", { class: "block group", open: memory.get(place) ?? block.open, toggle: () => memory.set(place, element.open) },
    el("summary", {}, say(block.title)), inner.element);
  return { element, refresh: inner.refresh, markdown: () => `### ${escapeMarkdown(say(block.title))}\n\n${inner.markdown()}` };
}
