/**
 * The bar above a table: a search field, one menu or field per filter, and how many rows are left.
 * @typedef {import("./types.js").TableData} TableData
 * @typedef {import("./types.js").ColumnData} ColumnData
 * @typedef {import("./types.js").Params} Params
 * @typedef {import("./types.js").Query} Query
 */
import { el, later } from "./dom.js";
import { show, whole } from "./numbers.js";
import { columnOf, isWords, rangeOf } from "./query.js";
import { stateOf } from "./verdicts.js";
import { say, verdictWord, word } from "./words.js";

const MENU = 60;
const LISTED = 500;

/** @param {ColumnData} column */
export function titleOf(column) {
  return say(column.title) || column.name;
}

/**
 * The values of a column that a menu can offer, as value and text; null where there are too many.
 * @param {ColumnData} column
 * @returns {[string, string][] | null}
 */
function choices(column) {
  if (column.kind === "flag") return [["yes", word("yes")], ["no", word("no")]];
  if (isWords(column)) {
    if (column.words.length > MENU) return null;
    const compare = new Intl.Collator("en", { numeric: true }).compare;
    const named = column.words.filter(Boolean).sort(compare).map((one) => /** @type {[string, string]} */ ([one, column.kind === "verdict" ? verdictWord(one) : one]));
    if (column.words.includes("")) named.unshift(["*any", word("any")], ["*none", word("none")]);
    if (column.words.some((one) => stateOf(one) === "wrong") && column.kind === "verdict") named.unshift(["*wrong", word("not_right")]);
    return named;
  }
  const seen = new Set();
  for (let i = 0; i < column.values.length && seen.size <= MENU; i++) seen.add(column.values[i]);
  if (seen.size > MENU) return null;
  return [...seen].filter((one) => !Number.isNaN(one)).sort((a, b) => a - b).map((one) => [String(one), show(one, column.unit, column.digits)]);
}

/**
 * @param {ColumnData} column
 * @param {string} value
 * @param {() => void} changed
 * @returns {HTMLInputElement | HTMLSelectElement}
 */
function control(column, value, changed) {
  const found = choices(column), title = titleOf(column);
  if (found) {
    if (value && !found.some(([one]) => one === value)) found.push([value, value]);
    const menu = el("select", { "aria-label": title, change: changed },
      el("option", { value: "" }, `${title}: ${word("all")}`),
      ...found.map(([one, text]) => el("option", { value: one, selected: one === value }, text)));
    return menu;
  }
  const quick = later(changed, 120);
  const field = el("input", { type: "search", "aria-label": title, value, input: quick, spellcheck: "false",
    placeholder: isWords(column) ? title : word("range_hint", title) });
  if (isWords(column)) offer(field, column);
  return field;
}

/**
 * Offers the words of a column while one types.
 * @param {HTMLInputElement} field
 * @param {ColumnData} column
 */
function offer(field, column) {
  const list = el("datalist", { id: `words-${column.name}-${Math.random().toString(36).slice(2)}` });
  field.setAttribute("list", list.id);
  field.addEventListener("focus", () => {
    if (!list.childElementCount) list.append(...column.words.slice(0, LISTED).map((one) => el("option", { value: one })));
  }, { once: true });
  field.append(list);
}

export class FilterBar {
  /**
   * @param {TableData} table
   * @param {string[]} names
   * @param {Params} params
   * @param {() => void} changed
   */
  constructor(table, names, params, changed) {
    this.params = params;
    this.take(table);
    const update = () => { this.store(); changed(); };
    this.search = el("input", { type: "search", class: "search", placeholder: word("search"), "aria-label": word("search"),
      value: params.get(".q"), input: later(update, 120), spellcheck: "false" });
    /** @type {Map<string, HTMLInputElement | HTMLSelectElement>} */
    this.controls = new Map();
    const given = params.names().filter((name) => !name.startsWith("."));
    for (const name of new Set([...names, ...given])) {
      const column = columnOf(table, name);
      if (column) this.controls.set(name, control(column, params.get(name), update));
    }
    this.count = el("span", { class: "count", role: "status" });
    this.clear = el("button", { type: "button", class: "clear", click: () => this.reset(update) }, word("clear"));
    this.element = el("div", { class: "filters", role: "search" }, this.search, ...this.controls.values(), this.clear, this.count);
  }

  /**
   * The same bar for new data.
   * @param {TableData} table
   */
  take(table) {
    this.columns = new Map(table.columns.map((column) => [column.name, column]));
  }

  /** @param {() => void} update */
  reset(update) {
    this.search.value = "";
    for (const field of this.controls.values()) field.value = "";
    update();
  }

  store() {
    const values = Object.fromEntries([...this.controls].map(([name, field]) => [name, field.value]));
    this.params.set({ ...values, ".q": this.search.value });
  }

  /** @returns {{search: string, filters: Record<string, string>}} */
  read() {
    /** @type {Record<string, string>} */
    const filters = {};
    for (const [name, field] of this.controls) {
      const column = this.columns?.get(name), bad = Boolean(column && !isWords(column) && column.kind !== "flag" && field.value && !rangeOf(field.value));
      field.setAttribute("aria-invalid", String(bad));
      field.classList.toggle("set", field.value !== "");
      filters[name] = field.value;
    }
    this.search.classList.toggle("set", this.search.value !== "");
    this.clear.disabled = !this.search.value && !Object.values(filters).some(Boolean);
    return { search: this.search.value, filters };
  }

  /**
   * @param {number} shown
   * @param {number} all
   */
  tell(shown, all) {
    this.count.textContent = word("rows", whole(shown), whole(all));
  }
}
