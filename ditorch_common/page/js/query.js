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

/** Arrays that a sort needs while it runs; they are kept, since new memory costs as much as a pass. @type {Map<string, Uint32Array>} */
const workspace = new Map();

/**
 * An array of a sort, with whatever was in it.
 * @param {string} name
 * @param {number} length
 * @returns {Uint32Array}
 */
function workArray(name, length) {
  const kept = workspace.get(name);
  if (kept && kept.length >= length) return kept.subarray(0, length);
  const made = new Uint32Array(length);
  workspace.set(name, made);
  return made;
}

/**
 * @param {ColumnData} column
 * @param {boolean} down
 * @param {Uint32Array} keys  is written
 */
function keysOfWords(column, down, keys) {
  const { values } = column, ranks = down ? wordRanks(column).map((rank) => column.words.length - 1 - rank) : wordRanks(column);
  for (let i = 0; i < keys.length; i++) keys[i] = ranks[values[i]];
}

/**
 * @param {Float32Array} values
 * @param {number} flip
 * @param {Uint32Array} keys  is written
 */
function keysOfFloats(values, flip, keys) {
  const parts = new Uint32Array(values.buffer, values.byteOffset, values.length);
  for (let i = 0; i < keys.length; i++) {
    const bits = parts[i], turn = (bits >> 31) | 0x80000000;
    keys[i] = (bits & 0x7fffffff) > 0x7f800000 ? 0xffffffff : bits ^ turn ^ flip;
  }
}

/**
 * @param {Float64Array} values
 * @param {number} flip
 * @param {Uint32Array} low  is written
 * @param {Uint32Array} keys  is written
 */
function keysOfDoubles(values, flip, low, keys) {
  const parts = new Uint32Array(values.buffer, values.byteOffset, values.length * 2);
  for (let i = 0; i < keys.length; i++) {
    const high = parts[2 * i + 1], turn = high >> 31, none = values[i] !== values[i];
    keys[i] = none ? 0xffffffff : high ^ (turn | 0x80000000) ^ flip;
    low[i] = none ? 0xffffffff : parts[2 * i] ^ turn ^ flip;
  }
}

/**
 * Keys that go up as the values do: one or two arrays of 32 bits, the low one first. What is no number comes last both ways.
 * @param {ColumnData} column
 * @param {boolean} down
 * @returns {Uint32Array[]}
 */
function keysOf(column, down) {
  const { values } = column, rows = values.length, flip = down ? 0xffffffff : 0, keys = workArray("keys", rows);
  if (isWords(column)) keysOfWords(column, down, keys);
  else if (values instanceof Float32Array) keysOfFloats(values, flip, keys);
  else if (values instanceof Float64Array) {
    const low = workArray("low", rows);
    keysOfDoubles(values, flip, low, keys);
    return [low, keys];
  } else {
    const sign = values instanceof Int16Array || values instanceof Int32Array ? 0x80000000 : 0;
    for (let i = 0; i < rows; i++) keys[i] = values[i] ^ sign ^ flip;
  }
  return [keys];
}

/**
 * How often each digit of the keys has each value: three tables, from one pass.
 * @param {Uint32Array} keys
 * @returns {Uint32Array[]}
 */
function digitCounts(keys) {
  const low = new Uint32Array(BUCKETS), middle = new Uint32Array(BUCKETS), high = new Uint32Array(BUCKETS), mask = BUCKETS - 1;
  for (let i = 0; i < keys.length; i++) {
    const key = keys[i];
    low[key & mask]++;
    middle[(key >>> DIGIT) & mask]++;
    high[key >>> (2 * DIGIT)]++;
  }
  return [low, middle, high];
}

/**
 * Rows and their keys, in the same order; the keys move along, so that every pass reads them one after the other. Without
 * rows they are as they come.
 * @typedef {{rows: Uint32Array | null, keys: Uint32Array}} Sorted
 */

/**
 * One pass of a radix sort over some bits of the keys.
 * @param {Sorted} before
 * @param {Uint32Array} places  how many keys have each digit; is lost
 * @param {number} shift
 * @param {Uint32Array} sortedRows  is written
 * @param {Uint32Array | null} sortedKeys  is written, where it is wanted
 */
function sortPass(before, places, shift, sortedRows, sortedKeys) {
  const { rows, keys } = before, mask = BUCKETS - 1;
  for (let bucket = 0, at = 0; bucket < BUCKETS; bucket++) {
    const count = places[bucket];
    places[bucket] = at;
    at += count;
  }
  for (let i = 0; i < keys.length; i++) {
    const key = keys[i], place = places[(key >>> shift) & mask]++;
    sortedRows[place] = rows ? rows[i] : i;
    if (sortedKeys) sortedKeys[place] = key;
  }
}

/**
 * Sorts by keys, equal ones as they come; digits that all keys share need no pass. The rows are a new array, the keys are
 * sorted where `both` is said.
 * @param {Sorted} before
 * @param {boolean} [both]
 * @returns {{rows: Uint32Array, keys: Uint32Array}}
 */
function sortByKeys(before, both = false) {
  const { length } = before.keys, passes = digitCounts(before.keys).map((counts, digit) => ({ counts, shift: digit * DIGIT }))
    .filter(({ counts, shift }) => counts[(before.keys[0] >>> shift) & (BUCKETS - 1)] < length);
  let { rows, keys } = before;
  passes.forEach(({ counts, shift }, i) => {
    const last = i === passes.length - 1, sortedRows = last ? new Uint32Array(length) : workArray(`rows ${i % 2}`, length);
    const sortedKeys = last && !both ? null : workArray(`keys ${i % 2}`, length);
    sortPass({ rows, keys }, counts, shift, sortedRows, sortedKeys);
    rows = sortedRows;
    keys = sortedKeys ?? keys;
  });
  return { rows: passes.length && rows ? rows : inOrder(rows, length), keys };
}

/**
 * A new array of rows, as they come where there are none.
 * @param {Uint32Array | null} rows
 * @param {number} length
 */
function inOrder(rows, length) {
  const made = new Uint32Array(length);
  for (let i = 0; i < length; i++) made[i] = rows ? rows[i] : i;
  return made;
}

/**
 * Puts rows whose high halves are equal in the order of their low halves; false where so many are equal that passes are quicker.
 * @param {{rows: Uint32Array, keys: Uint32Array}} sorted  by their high halves
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
  const [low, high] = keysOf(column, down);
  let sorted = sortByKeys({ rows: null, keys: high ?? low }, Boolean(high));
  if (high && !settleTies(sorted, low)) {
    const { rows } = sortByKeys({ rows: null, keys: low }), keys = workArray("ties", rows.length);
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
