/**
 * The rows of a table as a matrix: names down, one column per value across, a letter for each row there.
 * @typedef {import("./types.js").TableData} TableData
 * @typedef {import("./types.js").ColumnData} ColumnData
 * @typedef {import("./types.js").Params} Params
 * @typedef {{down: string, within?: string, across: string, cell: string, verdict: string, strange?: string, letters?: Record<string, string>,
 *   order?: string[]}} Matrix
 * @typedef {{name: number, cells: Map<number, number[]>, right: number, judged: number, failures: number}} Line
 */
import { el } from "./dom.js";
import { PRINTED_ROWS, ROW, leftOut, whenPrinted } from "./grid.js";
import { whole } from "./numbers.js";
import { columnOf } from "./query.js";
import { stateOf } from "./verdicts.js";
import { verdictWord, word } from "./words.js";

const LINES = 40;

export class MatrixView {
  /**
   * @param {Matrix} matrix
   * @param {TableData} table
   * @param {Params} params
   * @param {(row: number) => void} open
   */
  constructor(matrix, table, params, open) {
    const need = (/** @type {string | undefined} */ name) => /** @type {ColumnData} */ (columnOf(table, name ?? ""));
    this.matrix = matrix;
    this.open = open;
    this.down = need(matrix.down);
    this.across = need(matrix.across);
    this.cell = need(matrix.cell);
    this.verdict = need(matrix.verdict);
    this.strange = columnOf(table, matrix.strange ?? "");
    this.within = columnOf(table, matrix.within ?? "");
    this.states = this.verdict.words.map(stateOf);
    this.letters = this.cell.words.map((one) => matrix.letters?.[one] ?? one.slice(0, 1).toUpperCase());
    this.rank = ranks(this.cell.words, Object.keys(matrix.letters ?? {}));
    this.names = new Set(Array.from(this.down.values, (_, row) => this.keyOf(row))).size;
    /** @type {Line[]} */
    this.lines = [];
    this.printing = false;
    this.sort = el("select", { "aria-label": word("by_name"), change: () => {
      params.set({ ".lines": this.sort.value === "by_name" ? "" : this.sort.value });
      this.arrange();
    } }, ...["by_name", "by_failures", "by_share"].map((key) => el("option", { value: key, selected: key === params.get(".lines") }, word(key))));
    this.shown = el("span", { class: "count matrix-count" });
    this.head = el("thead");
    this.body = el("tbody");
    this.before = el("div");
    this.after = el("div");
    this.scroll = el("div", { class: "matrix-scroll", tabindex: "0" }, this.before,
      el("table", { class: "matrix" }, this.head, this.body), this.after);
    this.scroll.addEventListener("scroll", () => this.paint(), { passive: true });
    this.body.addEventListener("click", (event) => this.click(event));
    this.unprinted = el("p", { class: "unprinted", hidden: true });
    this.element = el("div", { class: "matrix-block" }, this.legend(), this.scroll, this.unprinted);
    whenPrinted(this.scroll, (printing) => this.print(printing));
  }

  /** @param {number} row */
  keyOf(row) {
    return this.down.values[row] + this.down.words.length * (this.within?.values[row] ?? 0);
  }

  /**
   * Rows that a list should show: failures, and what is not as expected.
   * @param {Uint32Array} rows
   */
  notable(rows) {
    const { strange } = this;
    return rows.filter((row) => this.states[this.verdict.values[row]] === "wrong" || Boolean(strange?.words[strange.values[row]]));
  }

  legend() {
    const states = this.verdict.words.map((one, i) => el("span", {}, el("i", { class: `mark ${this.states[i]} s-${slug(one)}` }, "\u00a0"), ` ${verdictWord(one)}`));
    const strange = this.strange ? [el("span", {}, el("i", { class: "mark wrong strange" }, "\u00a0"), ` ${word("strange")}`)] : [];
    const letters = this.cell.words.map((one, i) => /** @type {[string, string, number]} */ ([one, this.letters[i], this.rank[i]]))
      .sort((a, b) => a[2] - b[2]).map(([one, letter]) => el("span", {}, el("b", {}, letter), ` ${one}`));
    return el("div", { class: "legend" }, ...states, ...strange, ...letters);
  }

  /** @param {Event} event */
  click(event) {
    const target = /** @type {HTMLElement} */ (event.target).closest("[data-row]");
    if (target instanceof HTMLElement) this.open(Number(target.dataset.row));
  }

  /** @param {Uint32Array} rows */
  draw(rows) {
    /** @type {Map<number, Line>} */
    const lines = new Map();
    for (const row of rows) {
      const name = this.down.values[row], across = this.across.values[row], state = this.states[this.verdict.values[row]];
      const key = this.keyOf(row);
      let line = lines.get(key);
      if (!line) lines.set(key, line = { name, cells: new Map(), right: 0, judged: 0, failures: 0 });
      const cells = line.cells.get(across);
      if (cells) cells.push(row);
      else line.cells.set(across, [row]);
      line.right += state === "right" ? 1 : 0;
      line.judged += state === "unknown" ? 0 : 1;
      line.failures += state === "wrong" ? 1 : 0;
    }
    this.lines = [...lines.values()];
    const place = ranks(this.across.words, this.matrix.order ?? []), seen = new Set(this.lines.flatMap((line) => [...line.cells.keys()]));
    this.columns = [...seen].sort((a, b) => place[a] - place[b]);
    this.shown.textContent = word("names", whole(this.lines.length), whole(this.names));
    this.head.replaceChildren(el("tr", {}, el("th", { class: "name" }, word("name")), el("th", {}, word("share")),
      ...this.columns.map((code) => el("th", {}, this.across.words[code]))));
    this.arrange();
  }

  arrange() {
    const words = this.down.words, key = this.sort.value;
    const byName = (/** @type {Line} */ a, /** @type {Line} */ b) => a.name - b.name;
    const share = (/** @type {Line} */ line) => line.right / (line.judged || 1);
    if (key === "by_failures") this.lines.sort((a, b) => b.failures - a.failures || byName(a, b));
    else if (key === "by_share") this.lines.sort((a, b) => share(a) - share(b) || byName(a, b));
    else this.lines.sort(byName);
    this.scroll.style.height = `${(Math.min(words.length, 18) + 1) * ROW + 16}px`;
    this.scroll.scrollTop = 0;
    this.paint();
  }

  /** @param {boolean} printing */
  print(printing) {
    this.printing = printing;
    this.unprinted.textContent = leftOut(this.lines.length);
    this.unprinted.hidden = !printing || !this.unprinted.textContent;
    this.paint();
  }

  /** Only the lines that can be seen are in the document, or those that are printed. */
  paint() {
    const first = this.printing ? 0 : Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - 8);
    const last = Math.min(this.lines.length, this.printing ? PRINTED_ROWS : first + LINES);
    this.before.style.height = `${first * ROW}px`;
    this.after.style.height = `${(this.lines.length - last) * ROW}px`;
    this.body.replaceChildren(...this.lines.slice(first, last).map((line) => this.line(line)));
  }

  /** @param {Line} line */
  line(line) {
    const name = this.down.words[line.name], row = el("tr", {}, el("td", { class: "name", title: name }, name),
      el("td", { class: "right" }, `${line.right}/${line.judged}`));
    row.dataset.name = name;
    for (const code of this.columns ?? []) {
      const cells = (line.cells.get(code) ?? []).sort((a, b) => this.rank[this.cell.values[a]] - this.rank[this.cell.values[b]]);
      row.append(el("td", {}, ...cells.map((one) => this.mark(one))));
    }
    return row;
  }

  /** @param {number} row */
  mark(row) {
    const verdict = this.verdict.words[this.verdict.values[row]], check = this.cell.words[this.cell.values[row]];
    const strange = this.strange && this.strange.words[this.strange.values[row]] ? " strange" : "";
    const where = `${this.down.words[this.down.values[row]]} ${this.across.words[this.across.values[row]]} ${check}: ${verdict}`;
    const button = el("button", { type: "button", class: `mark ${stateOf(verdict)} s-${slug(verdict)}${strange}`, title: where, "aria-label": where },
      this.letters[this.cell.values[row]]);
    button.dataset.row = String(row);
    return button;
  }
}

/** @param {string} text */
function slug(text) {
  return text.toLowerCase().replace(/[^a-z]+/g, "-");
}

/**
 * The place of each word in an order; others follow as they come.
 * @param {string[]} words
 * @param {string[]} order
 */
function ranks(words, order) {
  return words.map((one, i) => (order.includes(one) ? order.indexOf(one) : order.length + i));
}
