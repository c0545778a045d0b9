/** Verdicts: a word of the data has a state, and each state a sign, so that nobody needs its colour. */

/** @type {Record<string, string[]>} */
const STATES = {
  right: ["right", "pass", "passed", "ok", "same", "equal", "good", "success", "yes"],
  wrong: ["wrong", "error", "crash", "timeout", "fail", "failed", "failure", "nan", "inf", "overflow", "different", "diverged",
    "mismatch", "missing", "bad"],
  weak: ["known weakness", "weak", "warning", "warn", "suspicious", "known"],
  running: ["running", "waiting"],
};
/** @type {Record<string, string>} */
export const SIGNS = { right: "✓", wrong: "✗", weak: "≈", unknown: "?", running: "…" };

/** @type {Map<string, string>} */
const KNOWN = new Map(Object.entries(STATES).flatMap(([state, words]) => words.map((one) => [one, state])));

/**
 * right, wrong, weak, running or unknown.
 * @param {string} verdict
 */
export function stateOf(verdict) {
  return KNOWN.get(verdict.toLowerCase()) ?? "unknown";
}
