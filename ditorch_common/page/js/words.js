/**
 * The words of the page itself, in each language, and texts of a run that come in several.
 * @typedef {import("./types.js").Text} Text
 */

export const LANGUAGES = /** @type {const} */ ([["en", "English"], ["zh", "中文"]]);

let language = "en";

/** @type {Record<string, [string, string]>} */
const WORDS = {
  copy: ["copy", "复制"],
  copied: ["copied", "已复制"],
  failed: ["could not copy", "复制失败"],
  markdown: ["Copy as Markdown", "复制为 Markdown"],
  theme: ["theme", "主题"],
  auto: ["as the system", "跟随系统"],
  light: ["light", "浅色"],
  dark: ["dark", "深色"],
  language: ["language", "语言"],
  keys: ["keys", "快捷键"],
  close: ["close", "关闭"],
  search: ["Search", "搜索"],
  all: ["all", "全部"],
  any: ["any", "非空"],
  none: ["none", "空"],
  not_right: ["not right", "有问题的"],
  clear: ["clear filters", "清除筛选"],
  rows: ["{0} of {1} rows", "{1} 行中的 {0} 行"],
  no_rows: ["No row passes the filters.", "没有符合筛选条件的行。"],
  empty_table: ["This table has no rows.", "此表没有数据。"],
  no_table: ["The table “{0}” is not in this page.", "此页面中没有表格“{0}”。"],
  loading: ["loading …", "加载中……"],
  empty: ["Nothing here yet.", "暂无内容。"],
  unknown_kind: ["This page does not know how to show “{0}”; a newer version may.", "此页面无法显示“{0}”；新版本也许可以。"],
  failed_block: ["This part could not be shown: {0}", "此部分无法显示：{0}"],
  right: ["right", "正确"],
  wrong: ["wrong", "错误"],
  unknown: ["not known", "未知"],
  running: ["running", "运行中"],
  details: ["details", "详情"],
  names: ["{0} of {1} names", "{1} 个名称中的 {0} 个"],
  count: ["count", "数量"],
  bound: ["bound", "界限"],
  shape: ["shape", "形状"],
  wrong_cells: ["{0} of {1} tiles have wrong elements", "{1} 个分块中有 {0} 个含错误元素"],
  numbers: ["as numbers", "以数字显示"],
  whole: ["whole", "全部"],
  in: ["zoom in", "放大"],
  out: ["zoom out", "缩小"],
  open_all: ["open all", "全部展开"],
  close_all: ["close all", "全部折叠"],
  found: ["{0} found", "找到 {0} 处"],
  next: ["next", "下一个"],
  left: ["left", "左"],
  right_side: ["right", "右"],
  distance: ["distance in bounds", "距离（界限的倍数）"],
  only_left: ["only left", "仅左侧"],
  only_right: ["only right", "仅右侧"],
  name: ["name", "名称"],
  share: ["right", "正确率"],
  by_name: ["sort by name", "按名称排序"],
  by_failures: ["most failures first", "失败最多的在前"],
  by_share: ["lowest share first", "正确率最低的在前"],
  failures: ["Failures and surprises ({0})", "失败与意外（{0}）"],
  strange: ["not as expected", "与预期不符"],
  live: ["live", "实时"],
  lost: ["The server does not answer; this is the last that it said.", "服务器没有响应；以下是最后收到的内容。"],
  no_view: ["There is no view “{0}” in this page.", "此页面中没有视图“{0}”。"],
  first_rows: ["the first {0} of {1} rows", "{1} 行中的前 {0} 行"],
  not_printed: ["Printed: the first {0} of {1} rows; {2} were left out. Filters choose which, and the page on screen has all.", "已打印 {1} 行中的前 {0} 行，省略 {2} 行。可用筛选选择要打印的行；屏幕页面包含全部行。"],
  shortened: ["the first {0} of {1}", "{1} 项中的前 {0} 项"],
  range_hint: ["{0} (2..8, >3)", "{0}（2..8, >3）"],
  yes: ["yes", "是"],
  no: ["no", "否"],
  key_views: ["previous, next view", "上一个、下一个视图"],
  key_search: ["search", "搜索"],
  key_rows: ["go through rows and nodes", "在行和节点间移动"],
  key_open: ["open the row, the node", "打开行或节点"],
  key_tree: ["close, open a node", "折叠、展开节点"],
  key_close: ["close", "关闭"],
  key_help: ["this list", "本列表"],
};

/** Verdicts are words of the data; these are known in Chinese, too. @type {Record<string, string>} */
const VERDICTS = { right: "正确", wrong: "错误", "known weakness": "已知弱点", "not comparable": "无法比较", pass: "通过", error: "报错",
  crash: "崩溃", timeout: "超时", running: "运行中", warning: "警告", ok: "正常", overflow: "溢出" };

/**
 * A verdict as it is shown.
 * @param {string} verdict
 */
export function verdictWord(verdict) {
  return (language === "zh" && Object.hasOwn(VERDICTS, verdict) && VERDICTS[verdict]) || verdict;
}

/** @param {string} chosen */
export function setLanguage(chosen) {
  language = LANGUAGES.some(([code]) => code === chosen) ? chosen : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : language;
}

export function currentLanguage() {
  return language;
}

/**
 * A word of the page.
 * @param {string} key
 * @param {...(string | number)} values
 */
export function word(key, ...values) {
  const found = WORDS[key];
  const text = found ? found[language === "zh" ? 1 : 0] : key;
  return text.replace(/\{(\d)\}/g, (_, place) => String(values[Number(place)]));
}

/**
 * How wide a text is in characters: those of Chinese are two.
 * @param {string} text
 */
export function widthOfText(text) {
  return text.length + (text.match(/[\u2e80-\uffef]/g) ?? []).length;
}

/**
 * A text of a run, in the language of the page where it has one for it.
 * @param {Text | null | undefined | number} text
 */
export function say(text) {
  if (text === null || text === undefined) return "";
  if (typeof text === "object") return String(text[language] ?? text.en ?? Object.values(text)[0] ?? "");
  return String(text);
}
