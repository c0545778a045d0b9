/**
 * The block "timeline": spans on rows, on a canvas; wheel and keys change the part of it that is shown.
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Kind} Kind
 * @typedef {{row: number, from: number, length: number, name: string, group: string}} Span
 */
import { el, redraw, style } from "./dom.js";
import { markdownTable, section } from "./markdown.js";
import { numeric, show } from "./numbers.js";
import { framed } from "./text_blocks.js";
import { say, word } from "./words.js";

const LANE = 22, MARGIN = 110, AXIS = 20, COPIED_SPANS = 30;

class Timeline {
  /** @param {Block} block */
  constructor(block) {
    this.block = block;
    /** @type {Span[]} */
    this.spans = block.spans.map((/** @type {any[]} */ [row, from, length, name, group]) => ({ row, from: numeric(from), length: numeric(length), name, group }));
    this.groups = [...new Set(this.spans.map((span) => span.group))];
    let start = Infinity, end = -Infinity;
    for (const span of this.spans) {
      start = Math.min(start, span.from);
      end = Math.max(end, span.from + span.length);
    }
    this.limits = start < end ? [start, end] : [0, 1];
    this.shown = [...this.limits];
    this.canvas = el("canvas", { class: "timeline-canvas", tabindex: "0", role: "img", "aria-label": say(block.title) });
    this.told = el("p", { class: "told", role: "status" }, "\u00a0");
    this.place = el("div", {}, this.canvas);
    this.place.style.minHeight = `${this.height}px`;
    redraw(this.place, () => this.draw());
    this.listen();
  }

  get height() {
    return this.block.rows.length * LANE + AXIS;
  }

  get margin() {
    return Math.min(MARGIN, this.canvas.clientWidth * 0.25);
  }

  /** @param {number} time */
  x(time) {
    return this.margin + ((time - this.shown[0]) / (this.shown[1] - this.shown[0])) * (this.canvas.clientWidth - this.margin);
  }

  draw() {
    const { canvas } = this, width = this.place.clientWidth, ratio = devicePixelRatio;
    canvas.style.height = `${this.height}px`;
    canvas.width = width * ratio;
    canvas.height = this.height * ratio;
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    const colours = this.groups.map((_, i) => style(`series-${i % 6}`)), place = new Map(this.groups.map((group, i) => [group, i]));
    const paper = style("bg");
    for (const span of this.spans) {
      const from = Math.max(this.margin, this.x(span.from)), to = this.x(span.from + span.length);
      if (to < this.margin || from > width) continue;
      pen.fillStyle = colours[place.get(span.group) ?? 0];
      pen.fillRect(from, span.row * LANE + 2, Math.max(1, to - from - 0.5), LANE - 4);
      if (to - from < 34) continue;
      pen.fillStyle = paper;
      pen.save();
      pen.beginPath();
      pen.rect(from, span.row * LANE, to - from - 3, LANE);
      pen.clip();
      pen.fillText(span.name, from + 4, span.row * LANE + 15);
      pen.restore();
    }
    this.drawLabels(pen, width);
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {number} width
   */
  drawLabels(pen, width) {
    pen.fillStyle = style("fg");
    this.block.rows.forEach((/** @type {string} */ name, /** @type {number} */ row) => pen.fillText(name, 0, row * LANE + 15, this.margin - 6));
    pen.fillStyle = style("soft");
    const ticks = Math.max(2, Math.floor((width - this.margin) / 130));
    for (let i = 0; i < ticks; i++) {
      const time = this.shown[0] + ((this.shown[1] - this.shown[0]) * i) / ticks;
      pen.fillText(show(time - this.limits[0], this.block.unit, 4) || "0", this.x(time), this.height - 5);
    }
  }

  /**
   * @param {number} factor
   * @param {number} middle
   */
  zoom(factor, middle) {
    const [low, high] = this.limits, least = (high - low) / 1e6, length = Math.min(high - low, Math.max(least, (this.shown[1] - this.shown[0]) * factor));
    const share = (middle - this.shown[0]) / (this.shown[1] - this.shown[0]);
    this.go(middle - share * length, length);
  }

  /**
   * @param {number} from
   * @param {number} length
   */
  go(from, length) {
    const [low, high] = this.limits, start = Math.max(low, Math.min(high - length, from));
    this.shown = [start, start + length];
    this.draw();
  }

  /** @param {MouseEvent} event */
  time(event) {
    return this.shown[0] + ((event.offsetX - this.margin) / (this.canvas.clientWidth - this.margin)) * (this.shown[1] - this.shown[0]);
  }

  listen() {
    const { canvas } = this, length = () => this.shown[1] - this.shown[0];
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
      event.preventDefault();
      if (event.ctrlKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event));
      else this.go(this.shown[0] + Math.sign(event.deltaY + event.deltaX) * length() * 0.1, length());
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.time(event)));
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) this.go(this.shown[0] - (event.movementX / (canvas.clientWidth - this.margin)) * length(), length());
      this.tell(Math.floor(event.offsetY / LANE), this.time(event));
    });
    canvas.addEventListener("keydown", (event) => {
      const middle = (this.shown[0] + this.shown[1]) / 2;
      if (event.key === "+" || event.key === "ArrowUp") this.zoom(0.7, middle);
      else if (event.key === "-" || event.key === "ArrowDown") this.zoom(1.4, middle);
      else if (event.key === "ArrowLeft") this.go(this.shown[0] - length() * 0.1, length());
      else if (event.key === "ArrowRight") this.go(this.shown[0] + length() * 0.1, length());
      else return;
      event.preventDefault();
    });
  }

  /**
   * @param {number} row
   * @param {number} time
   */
  tell(row, time) {
    const found = this.spans.find((span) => span.row === row && time >= span.from && time <= span.from + span.length);
    const { unit } = this.block;
    this.told.textContent = found ? `${found.name} · ${found.group} · ${show(found.length, unit, 3)} @ ${show(found.from - this.limits[0], unit, 4) || "0"}` : "\u00a0";
  }

  tools() {
    const button = (/** @type {string} */ text, /** @type {string} */ key, /** @type {() => void} */ action) => el("button", { type: "button", title: word(key), "aria-label": word(key), click: action }, text);
    const middle = () => (this.shown[0] + this.shown[1]) / 2;
    const legend = this.groups.map((group, i) => el("span", { class: `key key-${i % 6}` }, group));
    return el("div", { class: "legend" }, button("+", "in", () => this.zoom(0.6, middle())), button("−", "out", () => this.zoom(1.7, middle())),
      button(word("whole"), "whole", () => this.go(this.limits[0], this.limits[1] - this.limits[0])), ...legend);
  }
}

/** @type {Kind} */
export const TIMELINE = {
  show: (block) => {
    const timeline = new Timeline(block);
    return { element: framed(block, timeline.tools(), timeline.place, timeline.told) };
  },
  markdown: (block) => {
    const longest = [...block.spans].sort((a, b) => numeric(b[2]) - numeric(a[2])).slice(0, COPIED_SPANS);
    const rows = longest.map(([row, from, length, name, group]) => [block.rows[row], name, group, show(from, block.unit), show(length, block.unit)]);
    return section(say(block.title), markdownTable(["", word("name"), "", "@", block.unit || "…"], rows, [false, false, false, true, true]));
  },
};
