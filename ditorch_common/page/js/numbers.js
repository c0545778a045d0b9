/** Numbers as people read them. */

/** @type {[number, string][]} */
const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
/** @type {[number, string][]} */
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
/** @type {Record<string, [number, [number, string][]]>} */
const SCALES = { s: [1, SECONDS], ms: [1e-3, SECONDS], us: [1e-6, SECONDS], "µs": [1e-6, SECONDS], ns: [1e-9, SECONDS],
  B: [1, BYTES], bytes: [1, BYTES] };

/**
 * A number of the data, where "inf" and "-inf" stand for what JSON lacks; null and NaN are no number.
 * @param {any} value
 * @returns {number}
 */
export function numeric(value) {
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return typeof value === "number" ? value : NaN;
}

/** @param {number} value */
export function whole(value) {
  return value.toLocaleString("en").replace(/,/g, "\u202f");
}

/**
 * @param {number} value
 * @param {number | null} [digits]  those that count
 */
function plainNumber(value, digits) {
  if (Number.isInteger(value) && Math.abs(value) < 1e15 && !digits) return whole(value);
  const size = Math.abs(value), count = digits ?? 4;
  if (size !== 0 && (size >= 10 ** Math.max(7, count) || size < 1e-4)) {
    return value.toExponential(count - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  const text = value.toPrecision(count);
  return text.includes("e") ? whole(Math.round(value)) : text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/**
 * A number with its unit; seconds and bytes get the unit that fits.
 * @param {any} given
 * @param {string} [unit]
 * @param {number | null} [digits]
 */
export function show(given, unit = "", digits = null) {
  const value = numeric(given);
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const scale = SCALES[unit];
  if (scale && value !== 0) {
    const base = value * scale[0], [size, name] = scale[1].find(([least]) => Math.abs(base) >= least) ?? scale[1][scale[1].length - 1];
    return `${plainNumber(base / size, digits ?? 3)}\u202f${name}`;
  }
  return plainNumber(value, digits) + (unit ? `\u202f${unit}` : "");
}
