/**
 * The block "lines", drawn by uPlot.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Kind} Kind
 * @typedef {{name: string, y: any[], band: [any[], any[]] | null}} Series
 */
import { el, redraw, style } from "./dom.js";
import { markdownTable, section } from "./markdown.js";
import { numeric, show } from "./numbers.js";
import { framed } from "./text_blocks.js";
import { say, word } from "./words.js";

const CURVE_HEIGHT = 280;
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4], [4, 2]];
const COPIED_POINTS = 50;
const WHOLE_STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

/** @param {any[]} values */
function finite(values) {
  return values.map((value) => (Number.isFinite(numeric(value)) ? numeric(value) : null));
}

/** @param {Block} block */
function curveData(block) {
  const columns = [block.x.map(numeric)];
  /** @type {any[]} */
  const series = [{ label: say(block.x_title) || "x", value: (/** @type {any} */ _, /** @type {any} */ value) => show(value) }];
  /** @type {any[]} */
  const bands = [];
  block.series.forEach((/** @type {Series} */ one, /** @type {number} */ i) => {
    const colour = style(`series-${i % 6}`);
    columns.push(finite(one.y));
    series.push({ label: one.name, stroke: colour, width: 1.6, dash: DASHES[i % DASHES.length], spanGaps: false,
      value: (/** @type {any} */ _, /** @type {any} */ value) => show(value, block.unit) || "–" });
    if (!one.band) return;
    for (const edge of one.band) {
      columns.push(finite(edge));
      series.push({ label: "", stroke: colour, width: 0.6, points: { show: false }, class: "edge" });
    }
    bands.push({ series: [series.length - 1, series.length - 2], fill: `color-mix(in srgb, ${colour} 16%, transparent)` });
  });
  return { columns, series, bands };
}

/**
 * Lines at the marks, drawn over the curves.
 * @param {Block} block
 */
function marksOver(block) {
  return (/** @type {any} */ plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = style("wrong");
    ctx.fillStyle = style("wrong");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.setLineDash([4, 3]);
    block.marks.forEach((/** @type {any} */ mark, /** @type {number} */ i) => {
      const x = plot.valToPos(numeric(mark.x), "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(String(i + 1), x + 3, bbox.top + 12 * devicePixelRatio);
    });
    ctx.restore();
  };
}

/**
 * @param {Block} block
 * @param {HTMLElement} place
 */
function drawCurves(block, place) {
  /** @type {any} */
  let plot = null;
  return (/** @type {number} */ width) => {
    const library = /** @type {any} */ (globalThis).uPlot;
    const { columns, series, bands } = curveData(block);
    const axis = { stroke: style("soft"), grid: { stroke: style("line"), width: 1 }, ticks: { stroke: style("line"), width: 1 } };
    const values = (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => show(tick, block.unit, 3));
    plot?.destroy();
    plot = new library({
      width: Math.max(240, width), height: CURVE_HEIGHT, series, bands, scales: { x: { time: false } },
      axes: [{ ...axis, label: say(block.x_title), labelSize: 18, ...(columns[0].every(Number.isInteger) ? { incrs: WHOLE_STEPS } : {}) }, { ...axis, values, size: 74 }],
      legend: { live: true }, cursor: { y: false }, hooks: { draw: [marksOver(block)] },
    }, columns, place);
    for (const row of place.querySelectorAll(".edge")) row.remove();
  };
}

/** @type {Kind} */
export const CURVES = {
  show: (block) => {
    const place = el("div", { class: "curves" });
    place.style.minHeight = `${CURVE_HEIGHT + 40}px`;
    const draw = drawCurves(block, place);
    redraw(place, (width) => {
      draw(width);
      marks.classList.remove("waiting"); // the legend has its height
    });
    const marks = el("ol", { class: "marks waiting" }, ...block.marks.map((/** @type {any} */ mark) => el("li", {}, `${say(block.x_title) || "x"} ${show(mark.x)}: ${say(mark.text)}`)));
    return { element: framed(block, place, ...(block.marks.length ? [marks] : [])) };
  },
  markdown: (block) => {
    const step = Math.max(1, Math.ceil(block.x.length / COPIED_POINTS));
    const rows = block.x.map((/** @type {any} */ x, /** @type {number} */ i) => [show(x), ...block.series.map((/** @type {Series} */ one) => show(one.y[i], block.unit))])
      .filter((/** @type {any} */ _, /** @type {number} */ i) => i % step === 0);
    const titles = [say(block.x_title) || "x", ...block.series.map((/** @type {Series} */ one) => one.name)];
    const more = step > 1 ? `\n\n${word("shortened", rows.length, block.x.length)}` : "";
    return section(say(block.title), markdownTable(titles, rows, titles.map(() => true)) + more);
  },
};
