/**
 * Tables out of their packed form: typed arrays, unpacked by the browser itself.
 * @typedef {import("./types.js").TableData} TableData
 * @typedef {import("./types.js").Values} Values
 * @typedef {import("./types.js").ColumnData} ColumnData
 */

/** @type {Record<string, any>} */
const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, int16: Int16Array, uint32: Uint32Array, int32: Int32Array,
  float32: Float32Array, float64: Float64Array };

/**
 * @param {string} text  base64
 * @returns {Uint8Array}
 */
export function fromBase64(text) {
  const native = /** @type {any} */ (Uint8Array).fromBase64;
  if (native) return native.call(Uint8Array, text);
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/**
 * @param {Uint8Array} packed  deflate-raw
 * @returns {Promise<Uint8Array>}
 */
async function inflate(packed) {
  const stream = new Blob([/** @type {any} */ (packed)]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * One column's bytes as numbers.
 * @param {Uint8Array} bytes  its own, so that it begins where an array may begin
 * @param {any} type
 * @param {string[]} coding
 * @returns {Values}
 */
function decode(bytes, type, coding) {
  const size = type.BYTES_PER_ELEMENT, rows = bytes.length / size;
  let own = bytes;
  if (coding.includes("shuffle")) {
    own = new Uint8Array(bytes.length);
    for (let part = 0; part < size; part++) {
      for (let i = 0, from = part * rows, to = part; i < rows; i++, from++, to += size) own[to] = bytes[from];
    }
  }
  const values = new type(own.buffer);
  if (coding.includes("delta")) {
    for (let i = 1; i < rows; i++) values[i] += values[i - 1];
  }
  return values;
}

/**
 * @param {Uint8Array} packed
 * @returns {Promise<TableData>}
 */
export async function unpack(packed) {
  const data = await inflate(packed);
  const length = new DataView(data.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(data.subarray(4, 4 + length)));
  let at = 4 + length;
  /** @type {ColumnData[]} */
  const columns = [];
  for (const about of header.columns) {
    const type = ARRAYS[about.type], size = header.rows * type.BYTES_PER_ELEMENT;
    const values = decode(data.slice(at, at + size), type, about.coding);
    at += size;
    columns.push({ name: about.name, title: about.title, kind: about.kind, unit: about.unit, digits: about.digits, values,
      words: about.words ?? [], orders: {} });
  }
  return { name: header.name, rows: header.rows, columns };
}
