/**
 * The blocks "tree" and "pair_tree": nodes that open step by step, with columns and search.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Context} Context
 * @typedef {import("./grid.js").GridColumn} GridColumn
 * @typedef {{name: string, title?: import("./types.js").Text, unit?: string}} TreeColumn
 */
import { el, later } from "./dom.js";
import { Grid, ROW } from "./grid.js";
import { markdownTable, section } from "./markdown.js";
import { numeric, show, whole } from "./numbers.js";
import { framed } from "./text_blocks.js";
import { SIGNS, stateOf } from "./verdicts.js";
import { say, verdictWord, widthOfText, word } from "./words.js";

const OPEN_AT_FIRST = 30, COPIED_NODES = 200, SHOWN_ROWS = 22;

/** Which nodes there are, which are open, and which can be seen. */
class Nodes {
  /**
   * @param {number[]} parents
   * @param {string[]} labels
   */
  constructor(parents, labels) {
    this.parents = parents;
    this.labels = labels;
    /** @type {number[][]} */
    this.children = parents.map(() => []);
    /** @type {number[]} */
    this.roots = [];
    this.depth = new Uint16Array(parents.length);
    parents.forEach((parent, i) => {
      (parent < 0 ? this.roots : this.children[parent]).push(i);
      this.depth[i] = parent < 0 ? 0 : this.depth[parent] + 1;
    });
    /** @type {Set<number>} */
    this.open = new Set();
  }

  /** Opens the first levels, as long as they are few rows; a node that alone holds too many stays closed. */
  openFirst() {
    let level = this.roots, rows = level.length;
    while (level.length) {
      const most = this.open.size ? OPEN_AT_FIRST : 8 * OPEN_AT_FIRST;
      const some = level.length > 1 ? level.filter((node) => this.children[node].length <= OPEN_AT_FIRST) : level;
      const next = some.flatMap((node) => this.children[node]);
      rows += next.length;
      if (rows > most) return;
      for (const node of some) if (this.children[node].length) this.open.add(node);
      level = next;
    }
  }

  /**
   * Opens the way to a node, where it is few rows more.
   * @param {number} node
   */
  openTo(node) {
    const before = new Set(this.open);
    this.reveal(node);
    if (this.visible().length > 8 * OPEN_AT_FIRST) this.open = before;
  }

  /** @param {number} node */
  path(node) {
    const names = [];
    for (let at = node; at >= 0; at = this.parents[at]) names.unshift(this.labels[at]);
    return names.join("\u001f");
  }

  visible() {
    /** @type {number[]} */
    const rows = [];
    const stack = [...this.roots].reverse();
    while (stack.length) {
      const node = /** @type {number} */ (stack.pop());
      rows.push(node);
      if (!this.open.has(node)) continue;
      for (let i = this.children[node].length - 1; i >= 0; i--) stack.push(this.children[node][i]);
    }
    return rows;
  }

  /** @param {number} node */
  reveal(node) {
    for (let at = this.parents[node]; at >= 0; at = this.parents[at]) this.open.add(at);
  }
}

/**
 * The part of both kinds that is the same.
 * @typedef {{labels: string[], parents: number[], columns: GridColumn[], role?: string, first?: number,
 *   paint: (cell: HTMLElement, node: number, column: number, nodes: Nodes) => void,
 *   dress?: (node: number, row: HTMLElement) => void, chosen?: (node: number) => void}} TreeLook
 */
class TreeBlock {
  /**
   * @param {Block} block
   * @param {Context} context
   * @param {TreeLook} look
   */
  constructor(block, context, look) {
    this.context = context;
    this.look = look;
    this.nodes = new Nodes(look.parents, look.labels);
    this.lower = look.labels.map((label) => label.toLowerCase());
    this.recall();
    this.grid = new Grid({ columns: look.columns, label: say(block.title), role: "treegrid", open: (node) => this.toggle(node),
      paint: (cell, node, column) => look.paint(cell, node, column, this.nodes), key: (node, key) => this.key(node, key),
      dress: (node, row) => this.dress(node, row), chosen: (node) => look.chosen?.(node) });
    this.search = el("input", { type: "search", class: "search", placeholder: word("search"), "aria-label": word("search"), spellcheck: "false",
      input: later(() => this.find(0), 120), keydown: (/** @type {KeyboardEvent} */ event) => { if (event.key === "Enter") this.find(1); } });
    this.found = el("span", { class: "count", role: "status" });
    this.bar = el("div", { class: "filters", role: "search" }, this.search,
      el("button", { type: "button", click: () => this.find(1) }, word("next")), el("button", { type: "button", click: () => this.all(true) }, word("open_all")),
      el("button", { type: "button", click: () => this.all(false) }, word("close_all")), this.found);
    this.grid.element.style.height = `${(Math.min(look.parents.length, SHOWN_ROWS) + 1) * ROW + 16}px`;
    this.grid.setItems(this.nodes.visible());
  }

  /** What was open when the page was shown before is open again. */
  recall() {
    const kept = this.context.memory.get(this.context.place);
    if (!kept) {
      this.nodes.openFirst();
      if (this.look.first !== undefined && this.look.first >= 0) this.nodes.openTo(this.look.first);
      return;
    }
    this.look.parents.forEach((_, node) => { if (kept.has(this.nodes.path(node))) this.nodes.open.add(node); });
  }

  remember() {
    this.context.memory.set(this.context.place, new Set(Array.from(this.nodes.open, (node) => this.nodes.path(node))));
  }

  /** @param {number} node */
  toggle(node) {
    if (this.nodes.open.has(node)) this.nodes.open.delete(node);
    else if (this.nodes.children[node].length) this.nodes.open.add(node);
    this.update();
  }

  update() {
    this.remember();
    this.grid.setItems(this.nodes.visible(), true);
  }

  /** @param {boolean} open */
  all(open) {
    this.nodes.open = new Set(open ? this.nodes.children.flatMap((children, node) => (children.length ? [node] : [])) : []);
    this.update();
  }

  /**
   * @param {number} node
   * @param {string} key
   */
  key(node, key) {
    const { nodes } = this, isOpen = nodes.open.has(node);
    if (key === "ArrowRight" && !isOpen) this.toggle(node);
    else if (key === "ArrowLeft" && isOpen) this.toggle(node);
    else if (key === "ArrowLeft" && nodes.parents[node] >= 0) this.grid.move(Array.prototype.indexOf.call(this.grid.items, nodes.parents[node]));
    else return key === "ArrowRight" || key === "ArrowLeft";
    return true;
  }

  /**
   * @param {number} node
   * @param {HTMLElement} row
   */
  dress(node, row) {
    row.setAttribute("aria-level", String(this.nodes.depth[node] + 1));
    if (this.nodes.children[node].length) row.setAttribute("aria-expanded", String(this.nodes.open.has(node)));
    if (this.hits?.has(node)) row.classList.add("hit");
    this.look.dress?.(node, row);
  }

  /** @param {number} step  0: the first, 1: the next */
  find(step) {
    const wanted = this.search.value.trim().toLowerCase();
    const hits = wanted ? this.lower.flatMap((label, node) => (label.includes(wanted) ? [node] : [])) : [];
    this.hits = new Set(hits);
    this.found.textContent = wanted ? word("found", whole(hits.length)) : "";
    if (hits.length) {
      const now = this.grid.cursor >= 0 ? this.grid.items[this.grid.cursor] : -1, next = hits.find((node) => node > now);
      const node = step && next !== undefined ? next : hits[0];
      this.nodes.reveal(node);
      this.update();
      this.grid.move(Array.prototype.indexOf.call(this.grid.items, node));
    } else this.grid.draw();
  }
}

/**
 * @param {HTMLElement} cell
 * @param {number} node
 * @param {Nodes} nodes
 * @param {...(Node | string)} content
 */
function paintLabel(cell, node, nodes, ...content) {
  const sign = nodes.children[node].length ? (nodes.open.has(node) ? "▾" : "▸") : "";
  const indent = el("span", { class: "indent", "aria-hidden": "true" }, sign);
  indent.style.marginLeft = `${nodes.depth[node] * 14}px`;
  cell.append(indent, ...content);
}

/**
 * @param {TreeColumn} column
 * @param {any} value
 */
function valueText(column, value) {
  if (typeof value === "string" && Number.isNaN(numeric(value))) return value;
  return show(value, column.unit ?? "", 4);
}

/**
 * @param {HTMLElement} cell
 * @param {TreeColumn} column
 * @param {any} value
 */
function paintTreeValue(cell, column, value) {
  const text = valueText(column, value);
  if (column.name === "verdict" && text) cell.append(el("span", { class: `verdict ${stateOf(text)}` }, `${SIGNS[stateOf(text)]} ${verdictWord(text)}`));
  else cell.textContent = text;
}

/**
 * @param {Block} block
 * @param {number} at  where a node has its values
 * @returns {GridColumn[]}
 */
function valueColumns(block, at) {
  return block.columns.map((/** @type {TreeColumn} */ column, /** @type {number} */ i) => {
    const title = say(column.title) || column.name;
    let longest = widthOfText(title), numbers = true;
    for (const node of block.nodes.slice(0, 2000)) {
      const value = node[at][i];
      if (value !== null && Number.isNaN(numeric(value))) numbers = false;
      longest = Math.max(longest, widthOfText(valueText(column, value)));
    }
    return { title, width: Math.min(longest, 36) + (column.name === "verdict" ? 6 : 3), right: numbers };
  });
}

/** @param {Block} block @param {number} column */
function labelWidth(block, column) {
  let longest = 20;
  for (const node of block.nodes.slice(0, 2000)) longest = Math.max(longest, (node[column] ?? "").length);
  return Math.min(longest, 40) + 12;
}

/**
 * @param {Block} block
 * @param {Context} context
 * @param {(blocks: Block[], context: Context) => HTMLElement} showBlocks
 */
export function showTree(block, context, showBlocks) {
  const aside = el("div", { class: "tree-details", "aria-live": "polite" });
  const { nodes } = block, verdict = block.columns.findIndex((/** @type {TreeColumn} */ column) => column.name === "verdict");
  const parents = new Set(nodes.map((/** @type {any} */ node) => node[0]));
  const made = new TreeBlock(block, context, {
    first: verdict < 0 ? -1 : nodes.findIndex((/** @type {any} */ node, /** @type {number} */ i) => stateOf(node[3][verdict] ?? "") === "wrong" && !parents.has(i)),
    labels: nodes.map((/** @type {any} */ node) => node[1]), parents: nodes.map((/** @type {any} */ node) => node[0]),
    columns: [{ title: word("name"), width: labelWidth(block, 1), grow: true, mono: true }, ...valueColumns(block, 3)],
    paint: (cell, node, column, all) => {
      const [, label, kind, values] = nodes[node];
      if (column === 0) paintLabel(cell, node, all, el("span", { class: "node" }, label), kind ? el("span", { class: "kind" }, kind) : "");
      else paintTreeValue(cell, block.columns[column - 1], values[column - 1]);
    },
    chosen: (node) => {
      const details = nodes[node][4] >= 0 ? block.details[nodes[node][4]] : null;
      aside.replaceChildren(...(details ? [el("h3", {}, nodes[node][1]), showBlocks(details, context)] : []));
    },
  });
  return { element: framed(block, made.bar, made.grid.element, aside), markdown: () => treeMarkdown(block, made, 1, 3) };
}

/** @param {any} distance */
function apart(distance) {
  const value = numeric(distance);
  if (Number.isNaN(value)) return "";
  return value > 1 ? (value > 100 ? "far" : "near") : "same";
}

/**
 * @param {Block} block
 * @param {Context} context
 */
export function showPairTree(block, context) {
  const { nodes } = block, titles = block.titles ?? [word("left"), word("right_side")];
  const made = new TreeBlock(block, context, {
    labels: nodes.map((/** @type {any} */ node) => node[1] ?? node[2] ?? ""), parents: nodes.map((/** @type {any} */ node) => node[0]),
    columns: [{ title: say(titles[0]), width: labelWidth(block, 1), mono: true }, { title: say(titles[1]), width: labelWidth(block, 2), grow: true, mono: true },
      { title: word("distance"), width: 22, right: true }, ...valueColumns(block, 4)],
    paint: (cell, node, column, all) => {
      const [, left, right, distance, values] = nodes[node];
      if (column === 0) paintLabel(cell, node, all, left === null ? el("span", { class: "absent" }, "–") : el("span", { class: "node" }, left));
      else if (column === 1) paintLabel(cell, node, all, right === null ? el("span", { class: "absent" }, "–") : el("span", { class: "node" }, right));
      else if (column === 2) cell.textContent = left === null ? word("only_right") : right === null ? word("only_left") : distanceText(distance);
      else paintTreeValue(cell, block.columns[column - 3], values[column - 3]);
    },
    dress: (node, row) => {
      const [, left, right, distance] = nodes[node];
      row.classList.add(left === null || right === null ? "one-sided" : apart(distance) || "unmeasured");
    },
  });
  return { element: framed(block, made.bar, made.grid.element), markdown: () => treeMarkdown(block, made, 1, 4) };
}

/** @param {any} distance */
function distanceText(distance) {
  const text = show(distance, "", 3);
  return text ? `${numeric(distance) > 1 ? "✗ " : "✓ "}${text}` : "";
}

/**
 * @param {Block} block
 * @param {TreeBlock} made
 * @param {number} label
 * @param {number} values
 */
function treeMarkdown(block, made, label, values) {
  const rows = made.nodes.visible(), pair = values === 4;
  const titles = [word("name"), ...(pair ? [word("right_side"), word("distance")] : []), ...block.columns.map((/** @type {TreeColumn} */ column) => say(column.title) || column.name)];
  const cells = rows.slice(0, COPIED_NODES).map((node) => {
    const one = block.nodes[node], indent = "· ".repeat(made.nodes.depth[node]);
    const own = [indent + (one[label] ?? "–"), ...(pair ? [one[2] ?? "–", distanceText(one[3])] : [])];
    return [...own, ...block.columns.map((/** @type {TreeColumn} */ column, /** @type {number} */ i) => valueText(column, one[values][i]))];
  });
  const more = rows.length > COPIED_NODES ? `\n\n${word("first_rows", COPIED_NODES, rows.length)}` : "";
  return section(say(block.title), markdownTable(titles, cells) + more);
}
