/**
 * The address of what is shown: `#view?column=filter&.q=search&.sort=column.down&.row=7`. Further tables of a view have
 * "2:", "3:" and so on before their names.
 * @typedef {import("./types.js").Params} Params
 */

/** @returns {{view: string, query: URLSearchParams}} */
export function whereAmI() {
  const hash = location.hash.slice(1), at = hash.indexOf("?");
  const view = at < 0 ? hash : hash.slice(0, at);
  return { view: readable(view), query: new URLSearchParams(at < 0 ? "" : hash.slice(at + 1)) };
}

/** @param {string} text */
function readable(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/**
 * @param {string} view
 * @param {URLSearchParams} query
 */
function fragment(view, query) {
  const text = query.toString().replace(/\+/g, "%20");
  return `#${encodeURIComponent(view)}${text ? `?${text}` : ""}`;
}

/**
 * The part of the address that belongs to one table of the view.
 * @param {string} view
 * @param {number} place  which table of the view, from 0
 * @returns {Params}
 */
export function paramsOf(view, place) {
  const prefix = place === 0 ? "" : `${place + 1}:`;
  const mine = (/** @type {string} */ name) => (prefix ? name.startsWith(prefix) : !/^\d+:/.test(name));
  return {
    get: (name) => whereAmI().query.get(prefix + name) ?? "",
    names: () => [...whereAmI().query.keys()].filter(mine).map((name) => name.slice(prefix.length)),
    set: (values) => {
      const { query } = whereAmI();
      for (const [name, value] of Object.entries(values)) {
        if (value === "") query.delete(prefix + name);
        else query.set(prefix + name, value);
      }
      history.replaceState(null, "", fragment(view, query));
    },
  };
}
