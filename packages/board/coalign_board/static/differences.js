// The settings that are different between runs.
import { h } from "./board.js";
import { t } from "./i18n.js";

/** A table: a row for each setting, a column for each run. */
export function makeDifferences(runs, settings) {
  if (!settings.length) return h("p", { class: "quiet" }, t("differences.none"));
  const cell = (value) => h("td", { class: value === null ? "quiet" : null }, value ?? t("differences.missing"));
  const table = h(
    "table",
    { class: "differences" },
    h("caption", {}, t("differences.title")),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, t("differences.setting")),
        runs.map((run) => h("th", { scope: "col" }, run)),
      ),
    ),
    h(
      "tbody",
      {},
      settings.map(([key, values]) => h("tr", {}, h("th", { scope: "row" }, key), values.map(cell))),
    ),
  );
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("differences.title") }, table);
}
