// config.yaml of a run, of its newest start and of earlier ones, and how it differs from another run's.
import { append, fill, h, request } from "../board.js";
import { t } from "../i18n.js";
import { makeDifferences } from "../differences.js";

export const title = "configuration.title";

export async function render(root, run, state) {
  const [first, { runs }] = await Promise.all([
    run.fetch("configuration", only(state.get("file"))),
    request("/api/runs"),
  ]);
  const text = h("pre", { class: "text", tabindex: 0, role: "region", "aria-label": t("configuration.text") });
  const differences = h("div", { "aria-live": "polite" });
  const files = h(
    "select",
    { "aria-label": t("configuration.file"), onchange: () => (state.set({ file: files.value }), load()) },
    first.files.map((name) => h("option", { selected: name === state.get("file", "config.yaml") }, name)),
  );
  const other = h(
    "select",
    { "aria-label": t("configuration.other"), onchange: () => (state.set({ other: other.value || null }), compare()) },
    h("option", { value: "" }, t("configuration.none")),
    runs
      .filter((each) => each.id !== run.id)
      .map((each) => h("option", { selected: each.id === state.get("other") }, each.id)),
  );

  async function load() {
    text.textContent = (await run.fetch("configuration", only(files.value))).text;
  }

  async function compare() {
    if (!other.value) return fill(differences);
    const ids = [run.id, other.value];
    const { settings } = await request("/api/compare", { runs: JSON.stringify(ids) });
    fill(differences, makeDifferences(ids, settings));
  }

  text.textContent = first.text;
  const written = first.written?.length ? makeWritten(first.written) : null;
  append(root, [
    h("h1", {}, t("configuration.title")),
    h(
      "div",
      { class: "row" },
      h("label", {}, t("configuration.file"), files),
      h("label", {}, t("configuration.other"), other),
    ),
    differences,
    written,
    h("h2", {}, t("configuration.all")),
    text,
  ]);
  await compare();
}

/** The settings that a person wrote, as opposed to defaults. */
function makeWritten(settings) {
  const columns = ["setting", "value", "place"];
  return [
    h("h2", {}, t("configuration.written")),
    h(
      "div",
      { class: "scroll fit", tabindex: 0, role: "region", "aria-label": t("configuration.written") },
      h(
        "table",
        { class: "written" },
        h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, t(`configuration.${name}`))))),
        h("tbody", {}, settings.map(([key, value, place]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, value ?? "–"), h("td", { class: "quiet" }, place)))),
      ),
    ),
  ];
}

const only = (file) => (file ? { file } : {});
