/** What a reader has chosen for every page: the theme and the language. */
import { el } from "./dom.js";
import { LANGUAGES, currentLanguage, setLanguage, word } from "./words.js";

const THEMES = ["auto", "light", "dark"];

/**
 * Pages from disk may have no memory.
 * @param {string} name
 * @param {string} [value]
 * @returns {string}
 */
function choice(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(`page-${name}`, value);
    return localStorage.getItem(`page-${name}`) ?? "";
  } catch {
    return value ?? "";
  }
}

/** @param {string} theme  light, dark, or what the system has */
export function setTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  document.dispatchEvent(new Event("themechange"));
}

/** The theme that the reader has chosen. */
export function recallTheme() {
  setTheme(choice("theme"));
}

/** @param {string} language  of the page, where the reader has chosen none */
export function recallChoices(language) {
  recallTheme();
  setLanguage(choice("language") || language);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
}

/** @param {() => void} changed */
export function choiceMenus(changed) {
  const now = choice("theme") || "auto";
  const theme = el("select", { "aria-label": word("theme"), title: word("theme"), id: "theme", change: () => { choice("theme", theme.value); setTheme(theme.value); } },
    ...THEMES.map((one) => el("option", { value: one, selected: one === now }, `◐ ${word(one)}`)));
  const language = el("select", { "aria-label": word("language"), title: word("language"), id: "language", change: () => {
    setLanguage(choice("language", language.value));
    setLanguage(language.value);
    changed();
  } }, ...LANGUAGES.map(([code, name]) => el("option", { value: code, selected: code === currentLanguage(), lang: code }, name)));
  return [theme, language];
}
