/**
 * The page: its views, the one that is shown, keys, and what happens when data are new.
 * @typedef {import("./types.js").Head} Head
 * @typedef {import("./types.js").View} View
 * @typedef {import("./types.js").Block} Block
 * @typedef {import("./types.js").Shown} Shown
 */
import { paramsOf, whereAmI } from "./address.js";
import { showBlock } from "./blocks.js";
import { closeDialog, openDialog } from "./dialog.js";
import { copy, el } from "./dom.js";
import { escapeMarkdown } from "./markdown.js";
import { findSource } from "./source.js";
import { choiceMenus, recallChoices, recallTheme, setTheme } from "./theme.js";
import { say, word } from "./words.js";

/** @type {[string, string][]} */
const HELP = [["[ ]", "key_views"], ["/", "key_search"], ["↑ ↓ PgUp PgDn Home End j k", "key_rows"], ["Enter", "key_open"], ["← →", "key_tree"],
  ["Esc", "key_close"], ["?", "key_help"]];

class PageView {
  /** @param {Head} head */
  constructor(head) {
    this.head = head;
    this.source = findSource();
    this.root = /** @type {HTMLElement} */ (document.getElementById("page"));
    /** @type {Map<string, any>} */
    this.memory = new Map();
    /** @type {{key: string, shown: Shown}[]} */
    this.parts = [];
    this.view = "";
    this.copy = el("button", { type: "button", id: "copy-markdown" });
    this.nav = el("nav", { id: "views" });
    this.state = el("span", { id: "live", class: "live", role: "status", hidden: true });
    this.main = el("main", { id: "view", tabindex: "-1" });
  }

  /** Everything around the view; again when the language changes. */
  frame() {
    const { head } = this;
    this.copy.textContent = word("markdown");
    const keys = el("button", { type: "button", title: word("keys"), "aria-label": word("keys"), click: () => this.help() }, "?");
    const menus = choiceMenus(() => { this.frame(); this.open(true); });
    this.root.replaceChildren(
      el("header", { id: "top" }, el("div", { class: "titles" }, el("h1", {}, head.title), el("p", { class: "soft", id: "subtitle" }, say(head.subtitle))),
        el("div", { class: "tools" }, this.state, this.copy, ...menus, keys)),
      this.nav, this.main);
    this.drawNav();
  }

  drawNav() {
    this.nav.setAttribute("aria-label", word("name"));
    this.nav.replaceChildren(...this.head.views.map((view) => el("a", { href: `#${encodeURIComponent(view.id)}`,
      "aria-current": view.id === this.view ? "page" : null, class: view.blocks.length ? null : "vacant" }, say(view.title))));
  }

  /** @returns {View | undefined} */
  current() {
    const { view } = whereAmI();
    return view ? this.head.views.find((one) => one.id === view) : this.head.views[0];
  }

  /** @param {View} view */
  context(view) {
    let tables = 0;
    return { table: this.source.table, params: paramsOf(view.id, 0), tableParams: () => paramsOf(view.id, tables++), place: view.id, memory: this.memory };
  }

  /**
   * Shows the view of the address.
   * @param {boolean} [stay]  at the place in it
   */
  open(stay = false) {
    const view = this.current();
    closeDialog();
    this.view = view?.id ?? "";
    this.drawNav();
    if (!view) {
      this.parts = [];
      this.main.replaceChildren(el("p", { class: "empty" }, word("no_view", whereAmI().view)));
      return;
    }
    const context = this.context(view);
    this.parts = view.blocks.map((block, i) => ({ key: this.source.live ? JSON.stringify(block) : "", shown: showBlock(block, { ...context, place: `${view.id}/${i}` }) }));
    const empty = view.blocks.length ? [] : [el("p", { class: "empty" }, say(view.empty) || word("empty"))];
    this.settle(this.parts.map((part) => part.shown));
    this.main.replaceChildren(...empty, ...this.parts.map((part) => part.shown.element));
    this.main.setAttribute("aria-label", say(view.title));
    document.title = `${say(view.title)} · ${this.head.title}`;
    if (!stay) window.scrollTo(0, 0);
    this.nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /**
   * What follows a table waits, unseen, until that has its height: nothing jumps.
   * @param {Shown[]} shown
   */
  settle(shown) {
    const waiting = shown.slice(shown.findIndex((one) => one.ready) + 1).map((one) => one.element), pending = shown.filter((one) => one.ready);
    if (!pending.length || !waiting.length) return;
    for (const element of waiting) element.classList.add("waiting");
    Promise.allSettled(pending.map((one) => one.ready)).then(() => { for (const element of waiting) element.classList.remove("waiting"); });
  }

  /** New data: blocks that say the same stay as they are, with their place and what is chosen in them. */
  async renew() {
    const head = await this.source.head();
    this.source.forget();
    this.head = head;
    const subtitle = document.getElementById("subtitle");
    if (subtitle) subtitle.textContent = say(head.subtitle);
    const view = this.current();
    if (!view || view.id !== this.view || view.blocks.length === 0 || this.parts.length === 0) {
      this.open(true);
      return;
    }
    this.drawNav();
    const context = this.context(view), before = this.parts;
    this.parts = view.blocks.map((block, i) => {
      const key = JSON.stringify(block), old = before[i]?.key === key ? before[i] : null;
      if (old && block.kind === "table") context.tableParams();
      return old ?? { key, shown: showBlock(block, { ...context, place: `${view.id}/${i}` }) };
    });
    const top = window.scrollY;
    this.parts.forEach((part, i) => {
      if (before[i] === part) return;
      if (before[i]) before[i].shown.element.replaceWith(part.shown.element);
      else this.main.append(part.shown.element);
    });
    for (const gone of before.slice(this.parts.length)) gone.shown.element.remove();
    window.scrollTo(0, top);
    for (const part of this.parts) if (before.includes(part)) await part.shown.refresh?.();
  }

  async copyMarkdown() {
    const view = this.current();
    if (!view) return;
    const body = this.parts.map((part) => part.shown.markdown?.() ?? "").filter(Boolean).join("\n\n") || escapeMarkdown(say(view.empty));
    const done = await copy(`# ${escapeMarkdown(this.head.title)}: ${escapeMarkdown(say(view.title))}\n\n${body}\n`);
    this.copy.textContent = word(done ? "copied" : "failed");
    setTimeout(() => { this.copy.textContent = word("markdown"); }, 1500);
  }

  help() {
    openDialog(word("keys"), [el("dl", { class: "details" }, ...HELP.flatMap(([keys, what]) => [el("dt", {}, el("kbd", {}, keys)), el("dd", {}, word(what))]))]);
  }

  /** @param {number} step */
  turn(step) {
    const { views } = this.head, now = views.findIndex((view) => view.id === this.view);
    const next = views[Math.max(0, Math.min(views.length - 1, now + step))];
    if (next && next.id !== this.view) location.hash = `#${encodeURIComponent(next.id)}`;
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const typing = event.target instanceof HTMLElement && event.target.matches("input, textarea, select");
    if (event.key === "Escape" && typing) /** @type {HTMLElement} */ (event.target).blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "]") this.turn(1);
    else if (event.key === "[") this.turn(-1);
    else if (event.key === "?") this.help();
    else if (event.key === "/") {
      const field = this.main.querySelector("input.search");
      if (!(field instanceof HTMLInputElement)) return;
      field.focus();
      field.select();
    } else return;
    event.preventDefault();
  }

  /** @param {string} what  "print-begin" or "print-end", to all that shows a part of its rows on the screen */
  tellPrintable(what) {
    for (const part of this.main.querySelectorAll(".printable")) part.dispatchEvent(new Event(what));
  }

  /** @param {boolean} connected */
  tellLive(connected) {
    this.state.hidden = false;
    this.state.textContent = connected ? `● ${word("live")}` : word("lost");
    this.state.classList.toggle("lost", !connected);
  }

  start() {
    let busy = Promise.resolve();
    this.frame();
    this.open();
    window.addEventListener("hashchange", () => this.open());
    document.addEventListener("keydown", (event) => this.press(event));
    this.copy.addEventListener("click", () => this.copyMarkdown());
    window.addEventListener("beforeprint", () => {
      for (const part of this.main.querySelectorAll("details")) part.open = true;
      setTheme("light");
      this.tellPrintable("print-begin");
    });
    window.addEventListener("afterprint", () => {
      recallTheme();
      this.tellPrintable("print-end");
    });
    const renew = () => { busy = busy.then(() => this.renew()).catch(() => this.tellLive(false)); };
    this.source.listen(renew, (connected) => this.tellLive(connected));
    document.documentElement.dataset.ready = "yes";
  }
}

async function start() {
  try {
    const head = await findSource().head();
    recallChoices(head.language);
    new PageView(head).start();
  } catch (error) {
    document.getElementById("page")?.replaceChildren(el("p", { class: "empty" }, `This page cannot show its data: ${error}`));
  }
}

start();
