// How a run is doing, as a chip.
import { h } from "./board.js";
import { t } from "./i18n.js";

const SIGNS = { running: "▶", stalled: "⏸", ended: "✓", failed: "✕" };

/** A chip with the status; its sign and word say it, not its colour alone. */
export function makeStatus(summary) {
  return h("span", { class: `status ${summary.status}` }, `${SIGNS[summary.status]} ${t(`status.${summary.status}`)}`);
}

/** What is known of why a run stalled or ended; empty if there is nothing to say. */
export function describeCause(summary) {
  return summary.why ?? (summary.status === "failed" ? t("status.killed") : "");
}

/** Whether a run can be asked for something. */
export function isGoing(summary) {
  return summary.status === "running" || summary.status === "stalled";
}

/** The page on which a run opens: a failed one on its cause. */
export function findFirstPage(summary) {
  return summary.status === "failed" ? "cause" : "overview";
}

/** Why there is nothing to show: the run has no step, or else the text of `key`. */
export function explainNothing(summary, key) {
  if (summary.step !== null) return t(key);
  return t(isGoing(summary) ? "status.no_step_yet" : "status.no_step");
}
