/**
 * Which rows of a table, in which order: passes over typed arrays, no object per row.
 * @typedef {import("./types.js").TableData} TableData
 * @typedef {import("./types.js").ColumnData} ColumnData
 * @typedef {import("./types.js").Query} Query
 */
import { stateOf } from "./verdicts.js";

const DIGIT = 11;
const BUCKETS = 1 << DIGIT;

/**
 * @param {TableData} table
 * @param {string} name
 * @returns {ColumnData | undefined}
 */
export function columnOf(table, name) {
  return table.columns.find((column) => column.name === name);
}

/** @param {ColumnData} column */
export function isWords(column) {
  return column.kind !== "number" && column.kind !== "flag";
}

/**
 * The place of each word among all in order; very many are in the order of their characters, which is quicker.
 * @param {ColumnData} column
 * @returns {Uint32Array}
 */
function wordRanks(column) {
  if (column.ranks) return column.ranks;
  const { words } = column, collate = new Intl.Collator("en", { numeric: true }).compare;
  const plain = (/** @type {string} */ a, /** @type {string} */ b) => (a < b ? -1 : a > b ? 1 : 0), compare = words.length > 20_000 ? plain : collate;
  const ranks = new Uint32Array(words.length);
  Array.from(words.keys()).sort((a, b) => compare(words[a], words[b])).forEach((code, rank) => { ranks[code] = rank; });
  column.ranks = ranks;
  return ranks;
}

/**
 * Keys that go up as the values do: one or two arrays of 32 bits, the low one first. What is no number comes last both ways.
 * @param {ColumnData} column
 * @param {boolean} down
 * @returns {Uint32Array[]}
 */
function keysOf(column, down) {
  const { values } = column, rows = values.length, flip = down ? 0xffffffff : 0;
  const keys = new Uint32Array(rows);
  if (isWords(column)) {
    const ranks = wordRanks(column), last = ranks.length - 1;
    for (let i = 0; i < rows; i++) keys[i] = down ? last - ranks[values[i]] : ranks[values[i]];
    return [keys];
  }
  if (values instanceof Float64Array) {
    const parts = new Uint32Array(values.buffer, values.byteOffset, rows * 2), low = new Uint32Array(rows);
    for (let i = 0; i < rows; i++) {
      const high = parts[2 * i + 1], turn = high >>> 31 ? 0xffffffff : 0, none = values[i] !== values[i];
      keys[i] = none ? 0xffffffff : ((high ^ turn ^ flip) ^ (turn ? 0 : 0x80000000)) >>> 0;
      low[i] = none ? 0xffffffff : (parts[2 * i] ^ turn ^ flip) >>> 0;
    }
    return [low, keys];
  }
  if (values instanceof Float32Array) {
    const parts = new Uint32Array(values.buffer, values.byteOffset, rows);
    for (let i = 0; i < rows; i++) {
      const bits = parts[i], turn = bits >>> 31 ? 0xffffffff : 0x80000000;
      keys[i] = values[i] !== values[i] ? 0xffffffff : (bits ^ turn ^ flip) >>> 0;
    }
    return [keys];
  }
  const sign = values instanceof Int16Array || values instanceof Int32Array ? 0x80000000 : 0;
  for (let i = 0; i < rows; i++) keys[i] = (values[i] ^ sign ^ flip) >>> 0;
  return [keys];
}

/**
 * Rows and their keys, in the same order; the keys move along, so that every pass reads them one after the other.
 * @typedef {{rows: Uint32Array, keys: Uint32Array}} Sorted
 */

/**
 * One pass of a radix sort over some bits of the keys.
 * @param {Sorted} before
 * @param {number} shift
 * @returns {Sorted}
 */
function sortPass(before, shift) {
  const { rows, keys } = before, length = rows.length, mask = BUCKETS - 1, places = new Uint32Array(BUCKETS);
  for (let i = 0; i < length; i++) places[(keys[i] >>> shift) & mask]++;
  for (let bucket = 0, at = 0; bucket < BUCKETS; bucket++) {
    const count = places[bucket];
    places[bucket] = at;
    at += count;
  }
  const sortedRows = new Uint32Array(length), sortedKeys = new Uint32Array(length);
  for (let i = 0; i < length; i++) {
    const key = keys[i], place = places[(key >>> shift) & mask]++;
    sortedRows[place] = rows[i];
    sortedKeys[place] = key;
  }
  return { rows: sortedRows, keys: sortedKeys };
}

/**
 * Sorts by keys, equal ones as they come; bits that all keys share need no pass.
 * @param {Sorted} before
 * @returns {Sorted}
 */
function sortByKeys(before) {
  const { keys } = before;
  let spread = 0, sorted = before;
  for (let i = 0; i < keys.length; i++) spread |= keys[i] ^ keys[0];
  for (let shift = 0; shift < 32; shift += DIGIT) {
    if ((spread >>> shift) & (BUCKETS - 1)) sorted = sortPass(sorted, shift);
  }
  return sorted;
}

/**
 * Puts rows whose high halves are equal in the order of their low halves; false where so many are equal that passes are quicker.
 * @param {Sorted} sorted  by their high halves
 * @param {Uint32Array} low  by row
 */
function settleTies(sorted, low) {
  const { rows, keys } = sorted;
  for (let i = 1, from = 0; i < rows.length; i++) {
    if (keys[i] !== keys[i - 1]) {
      from = i;
      continue;
    }
    if (i - from > 64) return false;
    const row = rows[i], key = low[row];
    let at = i;
    for (; at > from && low[rows[at - 1]] > key; at--) rows[at] = rows[at - 1];
    rows[at] = row;
  }
  return true;
}

/**
 * The rows in the order of a column, equal ones as they come; kept for the next time.
 * @param {ColumnData} column
 * @param {boolean} down
 * @returns {Uint32Array}
 */
export function orderBy(column, down) {
  const way = down ? "down" : "up";
  if (column.orders[way]) return column.orders[way];
  const natural = () => {
    const rows = new Uint32Array(column.values.length);
    for (let i = 0; i < rows.length; i++) rows[i] = i;
    return rows;
  };
  const [low, high] = keysOf(column, down);
  let sorted = sortByKeys({ rows: natural(), keys: high ?? low });
  if (high && !settleTies(sorted, low)) {
    const { rows } = sortByKeys({ rows: natural(), keys: low });
    const keys = new Uint32Array(rows.length);
    for (let i = 0; i < keys.length; i++) keys[i] = high[rows[i]];
    sorted = sortByKeys({ rows, keys });
  }
  column.orders[way] = sorted.rows;
  return sorted.rows;
}

/** @param {ColumnData} column */
function lowerWords(column) {
  column.lower ??= column.words.map((one) => one.toLowerCase());
  return column.lower;
}

/**
 * Which words of a column a filter means: the word itself, or else those that contain it. "*wrong" are verdicts that are not
 * right, "*any" is every text, "*none" the empty one.
 * @param {ColumnData} column
 * @param {string} wanted
 * @returns {Uint8Array}
 */
function matchingWords(column, wanted) {
  const match = new Uint8Array(column.words.length), exact = column.words.indexOf(wanted);
  if (wanted === "*wrong") column.words.forEach((one, i) => { match[i] = stateOf(one) === "wrong" ? 1 : 0; });
  else if (wanted === "*any") column.words.forEach((one, i) => { match[i] = one ? 1 : 0; });
  else if (wanted === "*none") column.words.forEach((one, i) => { match[i] = one ? 0 : 1; });
  else if (exact >= 0) match[exact] = 1;
  else {
    const part = wanted.toLowerCase();
    lowerWords(column).forEach((one, i) => { match[i] = one.includes(part) ? 1 : 0; });
  }
  return match;
}

/**
 * The ends of a range as a user writes it: "5", "2..8", ">3", "<= 4"; null where it is none.
 * @param {string} text
 * @returns {{low: number, high: number, lowOpen: boolean, highOpen: boolean} | null}
 */
export function rangeOf(text) {
  const both = text.match(/^\s*(\S+?)\s*\.\.\s*(\S+?)\s*$/), one = text.match(/^\s*(<=|>=|<|>|=)?\s*(\S+)\s*$/);
  if (both) return checkedRange(Number(both[1]), Number(both[2]), false, false);
  if (!one) return null;
  const value = one[2] === "inf" ? Infinity : Number(one[2]), sign = one[1] ?? "=";
  if (sign[0] === ">") return checkedRange(value, Infinity, sign === ">", false);
  if (sign[0] === "<") return checkedRange(-Infinity, value, false, sign === "<");
  return checkedRange(value, value, false, false);
}

/**
 * @param {number} low
 * @param {number} high
 * @param {boolean} lowOpen
 * @param {boolean} highOpen
 */
function checkedRange(low, high, lowOpen, highOpen) {
  return Number.isNaN(low) || Number.isNaN(high) ? null : { low, high, lowOpen, highOpen };
}

/**
 * Clears the mask of rows that a filter of one column does not let through.
 * @param {Uint8Array} mask
 * @param {ColumnData} column
 * @param {string} wanted
 */
function narrow(mask, column, wanted) {
  const { values } = column, rows = mask.length;
  if (isWords(column)) {
    const match = matchingWords(column, wanted);
    for (let i = 0; i < rows; i++) mask[i] &= match[values[i]];
    return;
  }
  const range = rangeOf(wanted === "yes" ? "1" : wanted === "no" ? "0" : wanted);
  if (!range) {
    mask.fill(0);
    return;
  }
  const { low, high, lowOpen, highOpen } = range;
  for (let i = 0; i < rows; i++) {
    const value = values[i];
    if (!((lowOpen ? value > low : value >= low) && (highOpen ? value < high : value <= high))) mask[i] = 0;
  }
}

/**
 * Clears the mask of rows in which no text has the term.
 * @param {Uint8Array} mask
 * @param {TableData} table
 * @param {string} term  in lower case
 */
function narrowByTerm(mask, table, term) {
  const rows = mask.length, hit = new Uint8Array(rows);
  for (const column of table.columns.filter(isWords)) {
    const { values } = column, match = new Uint8Array(column.words.length);
    let found = 0;
    lowerWords(column).forEach((one, i) => { if (one.includes(term)) found += match[i] = 1; });
    if (found === 0) continue;
    for (let i = 0; i < rows; i++) hit[i] |= match[values[i]];
  }
  for (let i = 0; i < rows; i++) mask[i] &= hit[i];
}

/**
 * Rows that a block keeps, whatever the user asks: each column has the value, or one of several.
 * @param {Uint8Array} mask
 * @param {TableData} table
 * @param {Record<string, any> | null} where
 */
function narrowByBlock(mask, table, where) {
  for (const [name, wanted] of Object.entries(where ?? {})) {
    const column = columnOf(table, name);
    if (!column) continue;
    const several = Array.isArray(wanted) ? wanted : [wanted];
    if (several.length === 1) {
      narrow(mask, column, String(several[0]));
      continue;
    }
    const any = new Uint8Array(mask.length);
    for (const one of several) {
      const part = mask.slice();
      narrow(part, column, String(one));
      for (let i = 0; i < any.length; i++) any[i] |= part[i];
    }
    mask.set(any);
  }
}

/**
 * The rows that pass, in order.
 * @param {TableData} table
 * @param {Query} query
 * @param {Record<string, any> | null} where
 * @returns {Uint32Array}
 */
export function select(table, query, where) {
  const { rows } = table, sorted = query.sort && columnOf(table, query.sort[0]);
  const order = sorted ? orderBy(sorted, query.sort?.[1] === "down") : null;
  const terms = query.search.toLowerCase().split(/\s+/).filter(Boolean);
  const filters = Object.entries(query.filters).filter(([, wanted]) => wanted !== "");
  if (order && !terms.length && !filters.length && !where) return order;
  const mask = new Uint8Array(rows).fill(1);
  narrowByBlock(mask, table, where);
  for (const [name, wanted] of filters) {
    const column = columnOf(table, name);
    if (column) narrow(mask, column, wanted);
  }
  for (const term of terms) narrowByTerm(mask, table, term);
  const chosen = new Uint32Array(rows);
  let count = 0;
  for (let i = 0; i < rows; i++) {
    const row = order ? order[i] : i;
    chosen[count] = row;
    count += mask[row];
  }
  return chosen.slice(0, count);
}
