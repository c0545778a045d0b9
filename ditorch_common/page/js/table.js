/**
 * The block "table": filters, rows, details of a row, and where asked for a matrix of the same rows.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Context} Context
 * @typedef {import("./types.js").ColumnData} ColumnData
 * @typedef {import("./types.js").TableData} TableData
 */
import { closeDialog, openDialog } from "./dialog.js";
import { el, whenIdle } from "./dom.js";
import { FilterBar, titleOf } from "./filters.js";
import { Grid, ROW } from "./grid.js";
import { markdownTable } from "./markdown.js";
import { MatrixView } from "./matrix.js";
import { show, whole } from "./numbers.js";
import { columnOf, isWords, orderBy, select } from "./query.js";
import { copyButton } from "./text_blocks.js";
import { SIGNS, stateOf } from "./verdicts.js";
import { say, verdictWord, widthOfText, word } from "./words.js";

const COPIED_ROWS = 100, SAMPLED_ROWS = 300, MANY_ROWS = 200_000;

/**
 * @param {ColumnData} column
 * @param {number} row
 */
export function textOf(column, row) {
  const value = column.values[row];
  if (isWords(column)) return column.words[value] ?? "";
  if (column.kind === "flag") return word(value ? "yes" : "no");
  return show(value, column.unit, column.digits);
}

/** @param {string} verdict */
export function verdictBadge(verdict) {
  const state = stateOf(verdict);
  return el("span", { class: `verdict ${state}` }, verdict ? `${SIGNS[state]} ${verdictWord(verdict)}` : "");
}

/** @param {string} target */
function safeAddress(target) {
  return /^(#|https:\/\/|http:\/\/(localhost|127\.0\.0\.1)[:/])/.test(target) ? target : null;
}

/**
 * @param {HTMLElement} cell
 * @param {ColumnData} column
 * @param {number} row
 */
function paintValue(cell, column, row) {
  const text = textOf(column, row), target = column.kind === "link" ? safeAddress(text) : null;
  if (column.kind === "verdict") cell.append(verdictBadge(text));
  else if (target) cell.append(el("a", { href: target, rel: "noopener noreferrer" }, text));
  else cell.textContent = text;
}

/**
 * How many characters a column needs.
 * @param {ColumnData} column
 */
function widthOf(column) {
  const title = widthOfText(titleOf(column)) + 5;
  let longest = 4;
  if (!isWords(column)) {
    const step = Math.max(1, Math.floor(column.values.length / SAMPLED_ROWS));
    for (let row = 0; row < column.values.length; row += step) longest = Math.max(longest, textOf(column, row).length);
    return Math.max(title, longest + 4);
  }
  for (const one of column.words.slice(0, 2000)) longest = Math.max(longest, widthOfText(one));
  return Math.max(title, Math.min(longest + (column.kind === "verdict" ? 6 : 3), 44));
}

/** @param {string} text */
function shellQuoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`;
}

/**
 * A pattern with the texts of a row in place of {column}; "{{" is a brace.
 * @param {TableData} table
 * @param {string} pattern
 * @param {number} row
 * @param {(text: string) => string} quoted
 */
function filled(table, pattern, row, quoted) {
  return pattern.replace(/\{\{|\{([^{}]+)\}/g, (whole, name) => {
    const column = name && columnOf(table, name);
    return column ? quoted(textOf(column, row)) : whole === "{{" ? "{" : whole;
  });
}

class TableBlock {
  /**
   * @param {Block} block
   * @param {Context} context
   */
  constructor(block, context) {
    this.block = block;
    this.context = context;
    this.element = el("div", { class: "table-block" }, el("p", { class: "soft" }, word("loading")));
    /** @type {Uint32Array} */
    this.chosen = new Uint32Array(0);
    /** @type {TableData | null} */
    this.table = null;
    /** @type {Grid | null} */
    this.grid = null;
    this.base = 0;
  }

  /**
   * Gets the table; null where there is none, or nothing in it to show.
   * @returns {Promise<TableData | null>}
   */
  async load() {
    const { block } = this, say = (/** @type {string} */ text) => this.element.replaceChildren(el("p", { class: "soft" }, text));
    try {
      this.table = await this.context.table(block.table);
    } catch {
      say(word("no_table", block.table));
      return null;
    }
    const { table } = this;
    this.base = block.where ? select(table, { search: "", filters: {}, sort: null }, block.where).length : table.rows;
    const names = block.columns ?? table.columns.map((/** @type {ColumnData} */ column) => column.name);
    this.shown = names.map((/** @type {string} */ name) => columnOf(table, name)).filter(Boolean);
    if (!this.base) say(word("empty_table"));
    return this.base ? table : null;
  }

  async fill() {
    const { block, context } = this, table = await this.load();
    this.grid = null;
    if (!table) return;
    this.bar = this.newBar(table);
    this.grid = new Grid({ columns: this.gridColumns(), label: say(block.title) || block.table, open: (row) => this.open(row),
      paint: (cell, row, place) => paintValue(cell, this.shown[place], row) });
    this.matrix = block.matrix ? new MatrixView(block.matrix, table, context.params, (row) => this.details(row)) : null;
    this.none = el("p", { class: "soft none", hidden: true }, word("no_rows"));
    this.grid.element.style.height = `${(Math.min(this.base, block.matrix ? 14 : 24) + 1) * ROW + 16}px`;
    if (this.matrix) this.bar.element.append(this.matrix.sort, this.matrix.shown);
    this.notable = el("h3", { hidden: !this.matrix });
    this.element.replaceChildren(this.bar.element, ...(this.matrix ? [this.matrix.element] : []), this.notable, this.none, this.grid.element);
    this.apply(false);
    const row = context.params.get(".row");
    if (row && Number(row) < table.rows) this.details(Number(row));
    this.prepare(table);
  }

  /**
   * The first sort of many rows by fractions is the dearest: it is made when nobody waits for it.
   * @param {TableData} table
   */
  prepare(table) {
    if (table.rows < MANY_ROWS) return;
    const fractions = this.shown.filter((/** @type {ColumnData} */ { values }) => values instanceof Float32Array || values instanceof Float64Array);
    whenIdle(fractions.map((/** @type {ColumnData} */ column) => () => orderBy(column, true)), () => this.element.isConnected && this.table === table);
  }

  /** @param {TableData} table */
  newBar(table) {
    return new FilterBar(table, this.block.filters ?? [], this.context.params, () => this.apply(false));
  }

  /** New data: the filters, the sort, the place and what is chosen stay; menus change when nobody is using them. */
  async refresh() {
    if (!this.grid || this.matrix) {
      await this.fill();
      return;
    }
    const table = await this.load();
    if (!table || !this.bar) {
      this.grid = null;
      return;
    }
    if (!this.bar.element.contains(document.activeElement)) {
      const before = this.bar.element;
      this.bar = this.newBar(table);
      before.replaceWith(this.bar.element);
    } else this.bar.take(table);
    this.apply(true);
  }

  get sort() {
    const given = this.context.params.get(".sort"), at = given.lastIndexOf(".");
    if (at > 0) return /** @type {[string, string]} */ ([given.slice(0, at), given.slice(at + 1)]);
    return given === "none" ? null : this.block.sort ?? null;
  }

  gridColumns() {
    const { sort } = this;
    return this.shown.map((/** @type {ColumnData} */ column) => ({
      title: titleOf(column),
      width: widthOf(column), right: !isWords(column), mono: column.kind === "code", grow: isWords(column),
      sorted: sort && sort[0] === column.name ? sort[1] : undefined, press: () => this.sortBy(column),
    }));
  }

  /** @param {ColumnData} column */
  sortBy(column) {
    const { sort } = this, first = isWords(column) ? "up" : "down", second = first === "up" ? "down" : "up";
    const now = sort && sort[0] === column.name ? sort[1] : "";
    const next = now === first ? second : now === second ? "" : first;
    this.context.params.set({ ".sort": next ? `${column.name}.${next}` : this.block.sort ? "none" : "" });
    this.apply(false);
  }

  /** @param {boolean} keep */
  apply(keep) {
    if (!this.table || !this.bar || !this.grid || !this.none) return;
    const query = { ...this.bar.read(), sort: this.sort }, start = performance.now();
    this.chosen = select(this.table, query, this.block.where ?? null);
    this.bar.tell(this.chosen.length, this.base ?? 0);
    this.none.hidden = this.chosen.length > 0;
    this.grid.setColumns(this.gridColumns());
    const listed = this.matrix?.notable(this.chosen) ?? this.chosen;
    this.grid.setItems(listed, keep);
    this.matrix?.draw(this.chosen);
    if (this.notable) this.notable.textContent = word("failures", whole(listed.length));
    performance.measure("table", { start }); // for the browser's own tools
  }

  /** @param {number} row */
  open(row) {
    const link = this.block.rows_link && this.table ? columnOf(this.table, this.block.rows_link) : undefined;
    const target = link && safeAddress(textOf(link, row));
    if (target?.startsWith("#")) location.hash = target;
    else this.details(row);
  }

  /** @param {number} row */
  details(row) {
    if (!this.table) return;
    const { params } = this.context, { table } = this;
    const rows = table.columns.filter((column) => textOf(column, row) !== "").map((column) => detail(column, row));
    params.set({ ".row": String(row) });
    const first = table.columns.find(isWords), { row_title: pattern, command } = this.block;
    const title = pattern ? filled(table, pattern, row, (text) => text) : first ? textOf(first, row) : String(row);
    const line = command ? filled(table, command, row, shellQuoted) : "";
    const offered = line ? [el("div", { class: "command-line" }, el("pre", {}, line), copyButton(line))] : [];
    openDialog(title, [el("dl", { class: "details" }, ...rows.flat()), ...offered], () => {
      params.set({ ".row": "" });
      this.grid?.element.focus({ preventScroll: true });
    });
  }

  markdown() {
    const { table } = this;
    if (!table || !this.shown) return "";
    const rows = Array.from(this.chosen.subarray(0, COPIED_ROWS), (row) => this.shown.map((/** @type {ColumnData} */ column) => textOf(column, row)));
    const more = this.chosen.length > COPIED_ROWS ? `\n\n${word("first_rows", COPIED_ROWS, this.chosen.length)}` : "";
    return markdownTable(this.shown.map(titleOf), rows, this.shown.map((/** @type {ColumnData} */ column) => !isWords(column))) + more;
  }
}

/**
 * @param {ColumnData} column
 * @param {number} row
 */
function detail(column, row) {
  const text = textOf(column, row), value = el("dd");
  if (column.kind === "code") value.append(el("div", { class: "command-line" }, el("pre", {}, text), copyButton(text)));
  else if (text.includes("\n")) value.append(el("pre", {}, text));
  else paintValue(value, column, row);
  return [el("dt", {}, titleOf(column)), value];
}

/**
 * @param {Block} block
 * @param {Context} context
 */
export function showTable(block, context) {
  const made = new TableBlock(block, context);
  closeDialog();
  made.element.dataset.table = block.table;
  const ready = made.fill();
  return { element: made.element, ready, refresh: () => made.refresh(), markdown: () => made.markdown() };
}
