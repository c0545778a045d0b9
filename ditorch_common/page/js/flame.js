/**
 * The block "flame": what a whole is made of, level under level; a click makes a part the whole.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Kind} Kind
 * @typedef {{name: string, value: number, parent: number, children: number[], depth: number}} Part
 */
import { el } from "./dom.js";
import { markdownTable, section } from "./markdown.js";
import { numeric, show } from "./numbers.js";
import { framed } from "./text_blocks.js";
import { say, word } from "./words.js";

const LEVEL = 24, NARROWEST = 0.0012;

/**
 * The nodes with their children; a node is at least as large as what it is made of.
 * @param {Block} block
 * @returns {Part[]}
 */
function partsOf(block) {
  /** @type {Part[]} */
  const parts = [{ name: word("whole"), value: 0, parent: -1, children: [], depth: 0 }];
  for (const [parent, name, value] of block.nodes) {
    const above = parent + 1, number = numeric(value);
    parts[above].children.push(parts.length);
    parts.push({ name, value: Number.isFinite(number) ? Math.max(0, number) : 0, parent: above, children: [], depth: parts[above].depth + 1 });
  }
  for (let i = parts.length - 1; i >= 0; i--) {
    const sum = parts[i].children.reduce((all, child) => all + parts[child].value, 0);
    parts[i].value = Math.max(parts[i].value, sum);
    parts[i].children.sort((a, b) => parts[b].value - parts[a].value);
  }
  return parts;
}

class Flame {
  /** @param {Block} block */
  constructor(block) {
    this.block = block;
    this.parts = partsOf(block);
    this.top = this.parts[0].children.length === 1 ? this.parts[0].children[0] : 0;
    this.path = el("p", { class: "path" });
    this.area = el("div", { class: "flame-area", role: "group", "aria-label": say(block.title) });
    this.draw(this.top);
  }

  /** @param {number} focus */
  draw(focus) {
    const part = this.parts[focus];
    /** @type {HTMLElement[]} */
    const boxes = [];
    let deepest = 0;
    const add = (/** @type {number} */ place, /** @type {number} */ left, /** @type {number} */ width) => {
      const one = this.parts[place], level = one.depth - part.depth;
      deepest = Math.max(deepest, level);
      boxes.push(this.box(place, left, width, level, part.value));
      let at = left;
      for (const child of one.children) {
        const share = part.value ? this.parts[child].value / part.value : 0;
        if (share >= NARROWEST) add(child, at, share);
        at += share;
      }
    };
    add(focus, 0, 1);
    this.area.style.height = `${(deepest + 1) * LEVEL}px`;
    this.area.style.minHeight = this.area.style.height;
    this.area.replaceChildren(...boxes);
    this.showPath(focus);
  }

  /**
   * @param {number} place
   * @param {number} left
   * @param {number} width
   * @param {number} level
   * @param {number} whole
   */
  box(place, left, width, level, whole) {
    const part = this.parts[place], share = whole ? (100 * part.value) / whole : 0;
    const text = `${part.name} · ${show(part.value, this.block.unit, 3)} · ${show(share, "%", 3)}`;
    const box = el("button", { type: "button", class: `flame-box tone-${tone(part.name)}`, title: text, click: () => this.draw(place) },
      width > 0.03 ? (width > 0.14 ? text : part.name) : "");
    box.style.left = `${100 * left}%`;
    box.style.width = `${100 * width}%`;
    box.style.top = `${level * LEVEL}px`;
    return box;
  }

  /** @param {number} focus */
  showPath(focus) {
    const way = [];
    for (let at = focus; at >= 0; at = this.parts[at].parent) way.unshift(at);
    const shown = this.top ? way.filter((at) => at !== 0) : way;
    this.path.replaceChildren(...shown.flatMap((at, i) => [i ? " › " : "",
      el("button", { type: "button", class: "crumb", "aria-current": at === focus ? "true" : null, click: () => this.draw(at) }, this.parts[at].name)]),
      ` ${show(this.parts[focus].value, this.block.unit, 3)}`);
  }
}

/** @param {string} name */
function tone(name) {
  let sum = 7;
  for (const sign of name.replace(/\d+/g, "")) sum = (sum * 31 + (sign.codePointAt(0) ?? 0)) % 997;
  return sum % 5;
}

/** @type {Kind} */
export const FLAME = {
  show: (block) => {
    const flame = new Flame(block);
    return { element: framed(block, flame.path, flame.area) };
  },
  markdown: (block) => {
    const parts = partsOf(block), all = parts[0].value || 1, rows = parts.slice(1).filter((part) => part.depth <= 3 && part.value / all > 0.01)
      .map((part) => [`${"  ".repeat(part.depth - 1)}${part.name}`.replace(/ {2}/g, "· "), show(part.value, block.unit, 3), show((100 * part.value) / all, "%", 3)]);
    return section(say(block.title), markdownTable([word("name"), block.unit || word("count"), "%"], rows, [false, true, true]));
  },
};
