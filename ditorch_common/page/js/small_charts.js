/**
 * Small drawings: histogram, map of a tensor, bars.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Kind} Kind
 */
import { el, svg } from "./dom.js";
import { markdownTable, section } from "./markdown.js";
import { numeric, show, whole } from "./numbers.js";
import { framed } from "./text_blocks.js";
import { say, word } from "./words.js";

const WIDTH = 560, HEIGHT = 170, FOOT = 34, TOP = 16;

/**
 * Where a value is among edges that need not be evenly spaced: bins are drawn equally wide.
 * @param {number[]} edges
 * @param {number} value
 */
function placeOf(edges, value) {
  const last = edges.length - 1;
  if (value <= edges[0]) return 0;
  if (value >= edges[last]) return last;
  const bin = edges.findIndex((edge, i) => i < last && value >= edge && value < edges[i + 1]);
  const low = edges[bin], high = edges[bin + 1];
  return bin + (Number.isFinite(low) && Number.isFinite(high) ? (value - low) / (high - low) : 0.5);
}

/** @param {Block} block */
function drawHistogram(block) {
  const edges = block.edges.map(numeric), { counts } = block, bins = counts.length, step = WIDTH / Math.max(1, bins);
  const most = Math.max(1, ...counts), least = Math.min(...counts.filter(Boolean)), log = most > 50 * least;
  const height = (/** @type {number} */ count) => (count === 0 ? 0 : (HEIGHT - TOP) * (log ? (Math.log(count) + 0.7) / (Math.log(most) + 0.7) : count / most));
  const mark = numeric(block.mark), at = Number.isNaN(mark) ? NaN : placeOf(edges, mark) * step;
  const picture = svg("svg", { viewBox: `-30 0 ${WIDTH + 60} ${HEIGHT + FOOT}`, class: "chart", role: "img", "aria-label": say(block.title) });
  const every = Math.ceil(bins / 9), labelled = bins <= 24;
  counts.forEach((/** @type {number} */ count, /** @type {number} */ i) => {
    const tall = height(count), beyond = !Number.isNaN(mark) && edges[i] >= mark;
    const bar = svg("rect", { x: i * step + 1, y: HEIGHT - tall, width: Math.max(1, step - 2), height: tall, class: beyond ? "beyond" : "bar" },
      svg("title", {}, `${show(edges[i])} … ${show(edges[i + 1])}: ${whole(count)}`));
    picture.append(bar);
    if (labelled && count) picture.append(svg("text", { x: (i + 0.5) * step, y: HEIGHT - tall - 4, class: "middle small" }, compact(count)));
  });
  edges.forEach((/** @type {number} */ edge, /** @type {number} */ i) => {
    if (i % every === 0 || i === bins) picture.append(svg("text", { x: i * step, y: HEIGHT + 14, class: "middle small" }, show(edge, "", 2)));
  });
  picture.append(svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT, class: "axis" }),
    svg("text", { x: WIDTH / 2, y: HEIGHT + 30, class: "middle soft" }, say(block.unit)));
  if (!Number.isNaN(at)) {
    const left = at > WIDTH - 80;
    picture.append(svg("line", { x1: at, x2: at, y1: 0, y2: HEIGHT, class: "limit" }),
      svg("text", { x: at + (left ? -5 : 5), y: 11, class: left ? "end limit-text" : "limit-text" }, `${word("bound")} ${show(mark)}`));
  }
  return picture;
}

/**
 * A count in at most four characters, which is what fits above a bar: 999, 6.3k, 22k, 3.1M.
 * @param {number} count
 */
function compact(count) {
  if (count < 1000) return String(count);
  const [size, letter] = /** @type {[number, string]} */ ([[1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([least]) => count >= Number(least) * 0.9995) ?? [1e3, "k"]);
  const share = count / size;
  return (share < 9.95 ? share.toFixed(1).replace(/\.0$/, "") : share.toFixed(0)) + letter;
}

/** @type {Kind} */
export const HISTOGRAM = {
  show: (block) => ({ element: framed(block, drawHistogram(block)) }),
  markdown: (block) => section(say(block.title), markdownTable([say(block.unit) || "…", word("count")], block.counts.map(
    (/** @type {number} */ count, /** @type {number} */ i) => [`${show(block.edges[i])} … ${show(block.edges[i + 1])}`, whole(count)]), [false, true])),
};

/** @param {Block} block */
function drawMap(block) {
  const { rows, columns, cells } = block, size = Math.max(3, Math.min(22, Math.floor(440 / columns), Math.floor(260 / rows)));
  const wide = Math.max(size, Math.min(22, Math.floor(440 / columns))), width = wide * columns, height = size * rows;
  const picture = svg("svg", { viewBox: `-18 -16 ${width + 36} ${height + 34}`, width: width + 36, height: height + 34, class: "chart map", role: "img",
    "aria-label": say(block.title) });
  picture.append(svg("rect", { x: 0, y: 0, width, height, class: "tensor" }));
  cells.forEach((/** @type {any} */ given, /** @type {number} */ i) => {
    const share = Math.min(1, Math.max(0, numeric(given) || 0)), row = Math.floor(i / columns), column = i % columns;
    if (share === 0) return;
    picture.append(svg("rect", { x: column * wide, y: row * size, width: wide, height: size, class: "beyond", "fill-opacity": 0.35 + 0.65 * share },
      svg("title", {}, `${row}, ${column}: ${show(100 * share, "%", 3)}`)));
    if (size >= 12 && wide >= 12) picture.append(svg("text", { x: (column + 0.5) * wide, y: (row + 0.5) * size + 4, class: "middle small cross" }, "×"));
  });
  picture.append(svg("text", { x: width / 2, y: -5, class: "middle small" }, `${say(block.labels?.[1])} →`),
    svg("text", { x: -6, y: height / 2, class: "middle small", transform: `rotate(-90 -6 ${height / 2})` }, `← ${say(block.labels?.[0])}`));
  return picture;
}

/** @param {Block} block */
function mapSummary(block) {
  const bad = block.cells.filter((/** @type {any} */ share) => numeric(share) > 0).length;
  return `${word("shape")} [${block.shape.join(", ")}] · ${word("wrong_cells", whole(bad), whole(block.cells.length))}`;
}

/** @type {Kind} */
export const TENSOR_MAP = {
  show: (block) => ({ element: framed(block, drawMap(block), el("p", { class: "soft" }, mapSummary(block))) }),
  markdown: (block) => {
    const signs = Array.from({ length: block.rows }, (_, row) => block.cells.slice(row * block.columns, (row + 1) * block.columns)
      .map((/** @type {any} */ share) => (numeric(share) > 0.5 ? "#" : numeric(share) > 0 ? "+" : ".")).join(""));
    return section(say(block.title), `${mapSummary(block)}\n\n\`\`\`\n${signs.join("\n")}\n\`\`\``);
  },
};

/** @param {Block} block */
function sortedBars(block) {
  return block.labels.map((/** @type {string} */ label, /** @type {number} */ i) => ({ label, value: numeric(block.values[i]) }))
    .sort((/** @type {any} */ a, /** @type {any} */ b) => b.value - a.value);
}

const BARS_FIRST = 20;

/** @type {Kind} */
export const BARS = {
  show: (block) => {
    const all = sortedBars(block), most = Math.max(...all.map((/** @type {any} */ one) => (Number.isFinite(one.value) ? one.value : 0)), 1e-300);
    const line = (/** @type {any} */ one) => {
      const bar = el("div", { class: "bar" });
      bar.style.width = `${Math.max(0.3, Math.min(100, (100 * one.value) / most))}%`;
      return [el("div", { class: "label", title: one.label }, one.label), el("div", { class: "track" }, bar), el("div", { class: "value" }, show(one.value, block.unit, 3))];
    };
    const list = el("div", { class: "bars-list" }, ...all.slice(0, BARS_FIRST).flatMap(line)), element = framed(block, list);
    if (all.length > BARS_FIRST) {
      const more = el("button", { type: "button", click: () => { list.append(...all.slice(BARS_FIRST).flatMap(line)); more.remove(); } },
        `${word("all")} (${whole(all.length)})`);
      element.append(more);
    }
    return { element };
  },
  markdown: (block) => section(say(block.title), markdownTable([word("name"), block.unit || word("count")],
    sortedBars(block).slice(0, 50).map((/** @type {any} */ one) => [one.label, show(one.value, block.unit, 3)]), [false, true])),
};
