/** The one dialog of the page: details of a row, the list of keys. */
import { el } from "./dom.js";
import { word } from "./words.js";

/** @type {HTMLDialogElement | null} */
let current = null;

/** @param {() => void} [closed] */
function made(closed) {
  current?.remove();
  const dialog = el("dialog", { class: "dialog" });
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (current === dialog) current = null;
    closed?.();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  current = dialog;
  return dialog;
}

/**
 * @param {string} title
 * @param {Node[]} content
 * @param {() => void} [closed]
 */
export function openDialog(title, content, closed) {
  const dialog = made(closed);
  const close = el("button", { type: "button", class: "close", click: () => dialog.close() }, word("close"));
  dialog.append(el("div", { class: "dialog-head" }, el("h3", {}, title), close), ...content);
  dialog.showModal();
}

export function closeDialog() {
  current?.close();
}
