/**
 * The block "heat": a map of numbers on a canvas, which says what is under the pointer or the cursor.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Kind} Kind
 */
import { el, redraw, style } from "./dom.js";
import { markdownTable, section } from "./markdown.js";
import { numeric, show } from "./numbers.js";
import { framed } from "./text_blocks.js";
import { say } from "./words.js";

const LABELS = 190, HEAT_HEAD = 20, HEAT_FOOT = 20, COPIED_COLUMNS = 12;

/**
 * How strong the colour of a value is, from 0 to 1.
 * @param {Block} block
 */
function strength(block) {
  const log = block.scale === "log", seen = block.values.map(numeric).filter((/** @type {number} */ one) => Number.isFinite(one) && (!log || one > 0));
  let low = Infinity, high = -Infinity;
  for (const one of seen) {
    low = Math.min(low, one);
    high = Math.max(high, one);
  }
  const scale = log ? Math.log : (/** @type {number} */ value) => value;
  const of = (/** @type {number} */ value) => {
    if (value === Infinity) return 1;
    if (value === -Infinity || (log && value <= 0)) return 0;
    return high > low ? (scale(value) - scale(low)) / (scale(high) - scale(low)) : 0.5;
  };
  return { of, low, high };
}

/** @param {string} text */
function parts(text) {
  return text.split(",").map(Number);
}

/** @param {number} share */
function heatColour(share) {
  const low = parts(style("heat-low")), high = parts(style("heat-high")), middle = parts(style("heat-middle"));
  const [from, to, at] = share < 0.5 ? [low, middle, share * 2] : [middle, high, share * 2 - 1];
  return `rgb(${from.map((one, i) => Math.round(one + (to[i] - one) * at)).join(",")})`;
}

/** @param {Block} block @param {number} width */
function layout(block, width) {
  const rows = block.rows.length, columns = block.columns.length, left = Math.min(LABELS, width * 0.35);
  const tall = Math.max(6, Math.min(20, Math.floor(520 / Math.max(1, rows)))), wide = Math.min(40, (width - left) / Math.max(1, columns));
  return { rows, columns, left, tall, wide, height: HEAT_HEAD + rows * tall + HEAT_FOOT };
}

/**
 * @param {Block} block
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 */
function drawHeat(block, canvas, width) {
  const { rows, columns, left, tall, wide, height } = layout(block, width), ratio = devicePixelRatio, { of } = strength(block);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  const foreground = style("fg"), mapped = Array.from({ length: 65 }, (_, i) => heatColour(i / 64));
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const value = numeric(block.values[row * columns + column]), x = left + column * wide, y = HEAT_HEAD + row * tall;
      if (Number.isNaN(value)) continue;
      pen.fillStyle = mapped[Math.round(of(value) * 64)];
      pen.fillRect(x, y, Math.max(0.7, wide - (wide > 4 ? 0.5 : 0)), tall - (tall > 8 ? 1 : 0));
      if (Number.isFinite(value)) continue;
      pen.fillStyle = style("bg");
      pen.fillText("∞", x + wide / 2 - 4, y + tall / 2 + 4);
    }
    pen.fillStyle = foreground;
    if (tall >= 10 || row % Math.ceil(10 / tall) === 0) pen.fillText(clipped(pen, block.rows[row], left - 8), 0, HEAT_HEAD + row * tall + tall / 2 + 4);
  }
  pen.fillStyle = style("soft");
  const every = Math.max(1, Math.ceil((46 * columns) / Math.max(1, columns * wide)));
  for (let column = 0; column < columns; column += every)
    for (const y of [HEAT_HEAD - 6, HEAT_HEAD + rows * tall + 14]) pen.fillText(block.columns[column], left + column * wide, y);
}

/**
 * The end of a name says more than its beginning.
 * @param {CanvasRenderingContext2D} pen
 * @param {string} text
 * @param {number} room
 */
function clipped(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let from = 1;
  while (from < text.length && pen.measureText(`…${text.slice(from)}`).width > room) from++;
  return `…${text.slice(from)}`;
}

/** @param {Block} block */
function legendOf(block) {
  const { low, high } = strength(block), strip = el("canvas", { class: "strip", width: "128", height: "10", "aria-hidden": "true" });
  const paint = () => {
    const pen = /** @type {CanvasRenderingContext2D} */ (strip.getContext("2d"));
    for (let x = 0; x < 128; x++) {
      pen.fillStyle = heatColour(x / 127);
      pen.fillRect(x, 0, 1, 10);
    }
  };
  paint();
  document.addEventListener("themechange", paint);
  return Number.isFinite(low) ? el("p", { class: "soft heat-legend" }, show(low, block.unit), " ", strip, " ", show(high, block.unit), block.scale === "log" ? " (log)" : "") : el("p");
}

/**
 * Says what is at a place; the arrow keys go from cell to cell.
 * @param {Block} block
 * @param {HTMLCanvasElement} canvas
 * @param {HTMLElement} told
 */
function listen(block, canvas, told) {
  let row = 0, column = 0;
  const tell = () => {
    const value = block.values[row * block.columns.length + column];
    told.textContent = `${block.rows[row]} · ${block.columns[column]}: ${show(value, block.unit) || "–"}`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const { left, tall, wide, rows, columns } = layout(block, canvas.clientWidth);
    const y = Math.floor((event.offsetY - HEAT_HEAD) / tall), x = Math.floor((event.offsetX - left) / wide);
    if (y < 0 || y >= rows || x < 0 || x >= columns) return;
    [row, column] = [y, x];
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    /** @type {Record<string, [number, number]>} */
    const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
    if (!(event.key in steps)) return;
    row = Math.max(0, Math.min(block.rows.length - 1, row + steps[event.key][0]));
    column = Math.max(0, Math.min(block.columns.length - 1, column + steps[event.key][1]));
    tell();
    event.preventDefault();
  });
}

/** @type {Kind} */
export const HEAT = {
  show: (block) => {
    const canvas = el("canvas", { class: "heat-canvas", tabindex: "0", role: "img", "aria-label": say(block.title) }), told = el("p", { class: "told", role: "status" }, "\u00a0");
    const place = el("div", {}, canvas);
    place.style.minHeight = `${layout(block, 900).height}px`;
    redraw(place, (width) => drawHeat(block, canvas, width));
    listen(block, canvas, told);
    return { element: framed(block, place, legendOf(block), told) };
  },
  markdown: (block) => {
    const step = Math.max(1, Math.ceil(block.columns.length / COPIED_COLUMNS)), width = block.columns.length;
    const kept = block.columns.map((/** @type {string} */ _, /** @type {number} */ i) => i).filter((/** @type {number} */ i) => i % step === 0);
    const rows = block.rows.map((/** @type {string} */ name, /** @type {number} */ row) => [name, ...kept.map((/** @type {number} */ i) => show(block.values[row * width + i], block.unit))]);
    return section(say(block.title), markdownTable(["", ...kept.map((/** @type {number} */ i) => block.columns[i])], rows, [false, ...kept.map(() => true)]));
  },
};
