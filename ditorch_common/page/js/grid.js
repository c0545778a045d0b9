/**
 * Rows of any number, of which only the visible ones are in the document; with a cursor for the keyboard. Paper does not
 * scroll: while the page is printed the first `PRINTED_ROWS` are there, with a line that says how many were left out.
 *
 * @typedef {{title: string, width: number, right?: boolean, mono?: boolean, grow?: boolean, sorted?: string,
 *   press?: () => void}} GridColumn  width in characters
 * @typedef {object} GridOptions
 * @property {GridColumn[]} columns
 * @property {(cell: HTMLElement, item: number, column: number) => void} paint  fills an empty cell
 * @property {(item: number, row: HTMLElement) => void} [dress]  classes and roles of a row
 * @property {(item: number) => void} open  Enter, or a click
 * @property {(item: number, key: string) => boolean} [key]  other keys on a row; true where it was one
 * @property {(item: number) => void} [chosen]  the cursor has moved here
 * @property {string} label
 * @property {string} [role]
 */
import { el } from "./dom.js";
import { whole } from "./numbers.js";
import { word } from "./words.js";

export const ROW = 26;
export const PRINTED_ROWS = 2000;
const PRINTED_WIDTH = 26;
const TALLEST = 8_000_000;
const SPARE = 6;
let gridCount = 0;

/**
 * On a small screen a long text leaves room for another column.
 * @param {GridColumn} column
 */
function widthIn(column) {
  return column.width > 16 ? `clamp(16ch, 48vw, ${column.width}ch)` : `${column.width}ch`;
}

/**
 * Calls `change` when the page is about to be printed and again afterwards.
 * @param {HTMLElement} element  of which the page tells it
 * @param {(printing: boolean) => void} change
 */
export function whenPrinted(element, change) {
  element.classList.add("printable");
  element.addEventListener("print-begin", () => change(true));
  element.addEventListener("print-end", () => change(false));
}

/**
 * What a printed list says where it does not print all.
 * @param {number} length
 */
export function leftOut(length) {
  const left = length - PRINTED_ROWS;
  return left > 0 ? word("not_printed", whole(PRINTED_ROWS), whole(length), whole(left)) : "";
}

export class Grid {
  /** @param {GridOptions} options */
  constructor(options) {
    this.options = options;
    this.prefix = `grid${++gridCount}-`;
    /** @type {ArrayLike<number>} */
    this.items = [];
    this.cursor = -1;
    this.printing = false;
    this.place = 0;
    this.head = el("div", { class: "grid-head", role: "row" });
    this.rows = el("div", { class: "grid-rows", role: "rowgroup" });
    this.space = el("div", { class: "grid-space", role: "presentation" }, this.rows);
    this.element = el("div", { class: "grid", role: options.role ?? "grid", tabindex: "0", "aria-label": options.label },
      el("div", { role: "rowgroup", class: "grid-top" }, this.head), this.space);
    this.unprinted = el("p", { class: "unprinted", hidden: true });
    this.element.append(this.unprinted);
    whenPrinted(this.element, (printing) => this.print(printing));
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.press(event));
    this.rows.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.setColumns(options.columns);
  }

  /**
   * Other columns; the rows follow with the next `setItems`.
   * @param {GridColumn[]} columns
   */
  setColumns(columns) {
    this.options.columns = columns;
    const last = columns.findLastIndex((column) => column.grow);
    const widths = columns.map((column, i) => (i === last ? `minmax(${widthIn(column)}, 1fr)` : widthIn(column)));
    this.element.style.setProperty("--columns", widths.join(" "));
    this.element.style.setProperty("--printed-columns", columns.map((column) => `minmax(0, ${Math.min(column.width, PRINTED_WIDTH)}fr)`).join(" "));
    const focused = [...this.head.children].findIndex((cell) => cell.contains(document.activeElement));
    this.head.replaceChildren(...columns.map((column) => this.headCell(column)));
    if (focused >= 0) this.head.children[focused]?.querySelector("button")?.focus();
    this.element.setAttribute("aria-colcount", String(columns.length));
  }

  /** @param {GridColumn} column */
  headCell(column) {
    const sign = column.sorted === "up" ? " ▲" : column.sorted === "down" ? " ▼" : "";
    const order = column.sorted === "up" ? "ascending" : column.sorted === "down" ? "descending" : null;
    const inner = column.press ? el("button", { type: "button", click: column.press }, column.title + sign)
      : el("span", {}, column.title);
    return el("div", { role: "columnheader", class: column.right ? "right" : null, "aria-sort": order, title: column.title }, inner);
  }

  /**
   * Shows other items; the cursor stays on its item where that is still there.
   * @param {ArrayLike<number>} items
   * @param {boolean} [keep]  the place, too
   */
  setItems(items, keep = false) {
    const item = this.cursor >= 0 ? this.items[this.cursor] : -1;
    this.items = items;
    this.cursor = item < 0 ? -1 : Array.prototype.indexOf.call(items, item);
    this.space.style.height = `${Math.min(items.length * ROW, TALLEST)}px`;
    this.element.setAttribute("aria-rowcount", String(items.length));
    if (!keep) this.element.scrollTop = 0;
    this.draw();
  }

  /** How many rows fit. */
  get visible() {
    return Math.max(1, Math.floor((this.element.clientHeight - this.head.offsetHeight) / ROW));
  }

  /** Rows stand for more than a pixel can where there are very many: the place is then a share of the whole. */
  get scaled() {
    return this.items.length * ROW > TALLEST;
  }

  get first() {
    const { scrollTop } = this.element;
    if (!this.scaled) return Math.floor(scrollTop / ROW);
    const room = Math.max(1, TALLEST + this.head.offsetHeight - this.element.clientHeight);
    return Math.round(Math.min(1, scrollTop / room) * (this.items.length - this.visible));
  }

  /** @param {number} row */
  scrollTo(row) {
    const least = Math.min(row, this.items.length - this.visible);
    const room = Math.max(1, TALLEST + this.head.offsetHeight - this.element.clientHeight);
    this.element.scrollTop = this.scaled ? (Math.max(0, least) / (this.items.length - this.visible)) * room : row * ROW;
  }

  /** @param {boolean} printing */
  print(printing) {
    if (printing) this.place = this.element.scrollTop;
    this.printing = printing;
    this.unprinted.textContent = leftOut(this.items.length);
    this.unprinted.hidden = !printing || !this.unprinted.textContent;
    this.draw();
    if (!printing) this.element.scrollTop = this.place;
  }

  /** From which row to which the document has them. */
  range() {
    const { length } = this.items, spare = this.scaled ? 0 : SPARE;
    if (this.printing) return [0, Math.min(length, PRINTED_ROWS)];
    return [Math.max(0, this.first - spare), Math.min(length, this.first + this.visible + 2 + spare)];
  }

  draw() {
    const [from, to] = this.range();
    const top = this.scaled ? Math.min(this.element.scrollTop, TALLEST - (to - from) * ROW) : from * ROW;
    this.rows.style.transform = `translateY(${Math.max(0, top)}px)`;
    /** @type {HTMLElement[]} */
    const rows = [];
    for (let row = from; row < to; row++) rows.push(this.rowElement(row));
    this.rows.replaceChildren(...rows);
    const active = this.cursor >= from && this.cursor < to ? this.prefix + this.cursor : "";
    this.element.setAttribute("aria-activedescendant", active);
  }

  /** @param {number} row */
  rowElement(row) {
    const { columns, paint, dress } = this.options, item = this.items[row];
    const element = el("div", { role: "row", class: "grid-row", id: this.prefix + row, "aria-rowindex": row + 1,
      "aria-selected": row === this.cursor ? "true" : "false" });
    element.dataset.row = String(row);
    columns.forEach((column, place) => {
      const cell = el("div", { role: "gridcell", class: `cell${column.right ? " right" : ""}${column.mono ? " mono" : ""}` });
      paint(cell, item, place);
      if (!cell.title && cell.textContent && cell.textContent.length > column.width - 2) cell.title = cell.textContent;
      element.append(cell);
    });
    dress?.(item, element);
    return element;
  }

  /** @param {MouseEvent} event */
  click(event) {
    const target = /** @type {HTMLElement} */ (event.target), row = target.closest(".grid-row");
    if (!(row instanceof HTMLElement) || target.closest("a") || String(getSelection())) return;
    this.move(Number(row.dataset.row));
    this.options.open(this.items[this.cursor]);
  }

  /** @param {number} row */
  move(row) {
    if (!this.items.length) return;
    this.cursor = Math.max(0, Math.min(this.items.length - 1, row));
    const first = this.first, last = first + this.visible - 1;
    if (this.cursor < first) this.scrollTo(this.cursor);
    else if (this.cursor > last) this.scrollTo(this.cursor - this.visible + 1);
    this.draw();
    this.options.chosen?.(this.items[this.cursor]);
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.element) return;
    /** @type {Record<string, number>} */
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: this.visible, PageUp: -this.visible, j: 1, k: -1 };
    if (event.key in steps) this.move(this.cursor < 0 ? this.first : this.cursor + steps[event.key]);
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(this.items.length - 1);
    else if (this.cursor < 0) return;
    else if (event.key === "Enter" || event.key === " ") this.options.open(this.items[this.cursor]);
    else if (!this.options.key?.(this.items[this.cursor], event.key)) return;
    event.preventDefault();
  }
}
