/**
 * Where the data come from: the file itself, or a server that says when something is new.
 * @typedef {import("./types.js").Head} Head
 * @typedef {import("./types.js").TableData} TableData
 * @typedef {{live: boolean, head: () => Promise<Head>, table: (name: string) => Promise<TableData>, forget: () => void,
 *   listen: (changed: () => void, state: (connected: boolean) => void) => void}} Source
 */
import { fromBase64, unpack } from "./columns.js";

/**
 * Keeps what was asked for.
 * @param {(name: string) => Promise<TableData>} get
 */
function kept(get) {
  /** @type {Map<string, Promise<TableData>>} */
  const tables = new Map();
  const table = (/** @type {string} */ name) => {
    const known = tables.get(name) ?? get(name);
    tables.set(name, known);
    return known;
  };
  return { table, forget: () => tables.clear() };
}

/** @returns {Source} */
function fileSource() {
  const text = (/** @type {string} */ id) => {
    const found = document.getElementById(id);
    if (!found) throw new Error(`no ${id}`);
    return found.textContent ?? "";
  };
  const { table, forget } = kept(async (name) => unpack(fromBase64(text(`table-${name}`))));
  return { live: false, head: async () => JSON.parse(text("head")), table, forget, listen: () => undefined };
}

/**
 * @param {string} base
 * @returns {Source}
 */
function liveSource(base) {
  const get = async (/** @type {string} */ path) => {
    const answer = await fetch(`${base.replace(/\/$/, "")}/${path}${location.search}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer;
  };
  const { table, forget } = kept(async (name) => unpack(new Uint8Array(await (await get(`table/${encodeURIComponent(name)}`)).arrayBuffer())));
  return {
    live: true, table, forget,
    head: async () => (await get("head")).json(),
    listen: (changed, state) => {
      const events = new EventSource(`${base.replace(/\/$/, "")}/events${location.search}`);
      events.addEventListener("message", changed);
      events.addEventListener("open", () => { state(true); changed(); });
      events.addEventListener("error", () => state(false));
    },
  };
}

/** @returns {Source} */
export function findSource() {
  const base = document.getElementById("data-url");
  return base ? liveSource(base.textContent ?? "") : fileSource();
}
