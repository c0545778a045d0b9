/**
 * Elements, made without markup: every text is a text node, so that nothing in a text can become an element.
 *
 * @typedef {string | number | Node | null | undefined | false} Child
 * @typedef {Record<string, string | number | boolean | null | undefined | ((event: any) => void)>} Attributes
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @param {Element} element
 * @param {Attributes} attributes  functions are listeners, by the name of the event
 * @param {Child[]} children
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(typeof child === "number" ? String(child) : child);
    }
  }
}

/**
 * An element of the page.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

/**
 * An element of a drawing.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  const element = /** @type {SVGElement} */ (document.createElementNS(SVG, tag));
  fill(element, attributes, children);
  return element;
}

/**
 * Calls once things have settled.
 * @param {() => void} action
 * @param {number} milliseconds
 */
export function later(action, milliseconds) {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let waiting;
  return () => {
    clearTimeout(waiting);
    waiting = setTimeout(action, milliseconds);
  };
}

/**
 * Does some things one by one while the browser has nothing else to do, as long as `wanted` says so.
 * @param {(() => void)[]} things
 * @param {() => boolean} wanted
 */
export function whenIdle(things, wanted) {
  const ask = globalThis.requestIdleCallback ?? ((/** @type {() => void} */ action) => setTimeout(action, 100));
  const [first, ...rest] = things;
  if (!first) return;
  ask(() => {
    if (!wanted()) return;
    first();
    whenIdle(rest, wanted);
  });
}

/**
 * The value of a colour or another variable of the styles, as it is now.
 * @param {string} name
 */
export function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/**
 * Copies a text; browsers without a clipboard (a page from disk may have none) select it in a field instead.
 * @param {string} text
 * @returns {Promise<boolean>}
 */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = el("textarea", { class: "unseen", readonly: true });
    field.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

/**
 * Draws again whenever an element gets another width or the page another theme, as long as it is there.
 * @param {HTMLElement} element
 * @param {(width: number) => void} draw
 */
export function redraw(element, draw) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (element.clientWidth && element.clientWidth !== width) {
      width = element.clientWidth;
      draw(width);
    }
  });
  observer.observe(element);
  const themed = () => {
    if (element.isConnected) draw(element.clientWidth);
    else document.removeEventListener("themechange", themed);
  };
  document.addEventListener("themechange", themed);
}
