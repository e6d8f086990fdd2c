// All runs: how each is doing, and which to compare.
import { append, bindKey, fill, formatNumber, formatSeconds, h, makeAddress, markCode, request } from "../board.js";
import { formatAge, t } from "../i18n.js";
import { makeDifferences } from "../differences.js";
import { describeCause, findFirstPage, makeStatus } from "../status.js";

export const title = "runs.title";

const MOST_COMPARED = 12; // as the server takes, and as colours and dashes can be told apart
// What an evaluation measures, the best of it first; they are not to be compared with each other.
const EVALUATIONS = [
  { name: "eval/mean", what: "reward", better: -1 },
  { name: "eval/loss/accuracy", what: "accuracy", better: -1 },
  { name: "eval/loss/value", what: "loss", better: 1 },
];

export async function render(root, _run, state) {
  let answer = await request("/api/runs");
  const chosen = new Set();
  let order = state.get("order", "age");
  const search = h("input", {
    type: "search",
    "aria-label": t("runs.search_label"),
    placeholder: t("runs.search_label"),
    value: state.get("search", ""),
    oninput: () => {
      state.set({ search: search.value || null });
      draw();
    },
  });
  const compare = h("a", { class: "button", hidden: true });
  const hint = h("span", { class: "quiet" });
  const table = h("div", { class: "scroll" });
  const differences = h("div", { "aria-live": "polite" });
  append(root, [h("h1", {}, t("runs.title")), h("div", { class: "row" }, search, compare, hint), table, differences]);

  const columns = [
    {
      key: "name",
      cell: (run) => h("a", { href: makeAddress(["run", run.id, findFirstPage(run)]) }, run.id),
      value: (run) => run.id,
    },
    {
      key: "status",
      cell: (run) => [makeStatus(run), h("div", { class: "why" }, describeCause(run))],
      value: (run) => run.status,
    },
    { key: "algorithm", cell: (run) => run.algorithm, value: (run) => run.algorithm },
    {
      key: "step",
      cell: (run) => `${run.step ?? "–"} / ${run.last ?? "–"}`,
      value: (run) => -(run.step ?? -1),
      number: true,
    },
    {
      key: "reward",
      cell: (run) => formatNumber(run.numbers["reward/mean"]),
      value: (run) => -(run.numbers["reward/mean"] ?? -Infinity),
      number: true,
    },
    { key: "eval", cell: drawEvaluation, value: rankEvaluation, number: true },
    {
      key: "loss",
      cell: (run) => formatNumber(run.numbers["loss/value"]),
      value: (run) => run.numbers["loss/value"] ?? Infinity,
      number: true,
    },
    { key: "time", cell: (run) => formatSeconds(run.seconds), value: (run) => -(run.seconds ?? 0), number: true },
    {
      key: "age",
      cell: (run) => (run.updated ? formatAge(run.now - run.updated) : "–"),
      value: (run) => -(run.updated ?? 0),
      number: true,
    },
  ];

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = answer.runs.filter((run) => {
      const text = `${run.id} ${run.algorithm} ${run.status} ${t(`status.${run.status}`)}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const { value } = columns.find((column) => column.key === order) ?? columns.at(-1);
    runs.sort((a, b) => compareValues(value(a), value(b)));
    const focused = document.activeElement?.dataset?.run;
    const kind = document.activeElement?.dataset?.kind;
    if (!answer.runs.length) fill(table, h("p", { class: "empty" }, markCode(t("runs.empty", { root: answer.root }))));
    else if (!runs.length) fill(table, h("p", { class: "empty" }, t("runs.no_match")));
    else fill(table, h("table", { class: "runs" }, makeHead(), h("tbody", {}, runs.map(makeRow))));
    if (focused)
      findRow(focused)
        ?.querySelector(kind === "mark" ? "input" : "a")
        ?.focus();
    drawComparison();
  }

  function makeHead() {
    const cells = columns.map(({ key, number }) =>
      h(
        "th",
        { scope: "col", class: number ? "number" : null, "aria-sort": key === order ? "ascending" : null },
        h("button", { type: "button", onclick: () => ((order = key), state.set({ order }), draw()) }, t(`runs.${key}`)),
      ),
    );
    return h("thead", {}, h("tr", {}, h("td", { class: "mark" }), cells));
  }

  function makeRow(run) {
    const mark = h("input", {
      type: "checkbox",
      checked: chosen.has(run.id),
      "aria-label": t("runs.choose", { run: run.id }),
      "data-run": run.id,
      "data-kind": "mark",
      onchange: () => toggle(run.id),
    });
    const cells = columns.map(({ key, cell, number }) => {
      const content = cell(run);
      if (key === "name") content.dataset.run = run.id;
      return h(
        "td",
        { class: number ? "number" : null, "data-label": number || key === "age" ? t(`runs.${key}`) : null },
        content,
      );
    });
    return h("tr", { "data-run": run.id }, h("td", { class: "mark" }, mark), cells);
  }

  function toggle(id) {
    if (!chosen.delete(id)) chosen.add(id);
    drawComparison();
    showDifferences();
  }

  /** Show in what the chosen runs differ, below the table. */
  async function showDifferences() {
    const ids = [...chosen];
    if (ids.length < 2 || ids.length > MOST_COMPARED) return fill(differences);
    const { settings } = await request("/api/compare", { runs: JSON.stringify(ids) });
    if (ids.length === chosen.size && ids.every((id) => chosen.has(id)))
      fill(differences, makeDifferences(ids, settings));
  }

  function drawComparison() {
    const count = chosen.size;
    compare.hidden = count < 2 || count > MOST_COMPARED;
    compare.href = makeAddress(["compare"], { runs: JSON.stringify([...chosen]) });
    compare.textContent = t("runs.compare", { count });
    const many = count > MOST_COMPARED ? t("runs.too_many", { most: MOST_COMPARED }) : "";
    hint.textContent = count < 2 && answer.runs.length > 1 ? t("runs.compare_hint") : many;
  }

  const findRow = (id) => [...table.querySelectorAll("tbody tr")].find((row) => row.dataset.run === id);

  function move(by) {
    const rows = [...table.querySelectorAll("tbody tr")];
    const at = rows.findIndex((row) => row.contains(document.activeElement));
    const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by))];
    next?.querySelector("a")?.focus();
  }

  const focusedRun = () => document.activeElement?.closest?.("tr[data-run]")?.dataset.run;
  bindKey(root, "j", "runs.down", () => move(1));
  bindKey(root, "k", "runs.up", () => move(-1));
  bindKey(
    root,
    "o",
    "runs.open",
    () => focusedRun() && (location.hash = findRow(focusedRun()).querySelector("a").getAttribute("href")),
  );
  bindKey(root, "x", "runs.mark", () => {
    const id = focusedRun();
    if (!id) return;
    toggle(id);
    draw();
  });
  bindKey(root, "c", "runs.open_comparison", () => chosen.size > 1 && (location.hash = compare.getAttribute("href")));
  bindKey(root, "/", "runs.search", () => search.focus());

  draw();
  return async () => {
    answer = await request("/api/runs");
    draw();
  };
}

function findEvaluation(run) {
  return EVALUATIONS.find(({ name }) => run.numbers[name] !== undefined);
}

/** The newest evaluation, with the word for what it measures. */
function drawEvaluation(run) {
  const found = findEvaluation(run);
  if (!found) return "–";
  const word = h("span", { class: "quiet", title: found.name }, t(`runs.eval_${found.what}`));
  return [formatNumber(run.numbers[found.name]), " ", word];
}

/** By what is measured, and then the best first. */
function rankEvaluation(run) {
  const found = findEvaluation(run);
  return found ? [EVALUATIONS.indexOf(found), found.better * (run.numbers[found.name] ?? 0)] : [EVALUATIONS.length, 0];
}

/** Compare texts, numbers, or lists of numbers. */
function compareValues(a, b) {
  if (Array.isArray(a)) return compareValues(a[0], b[0]) || compareValues(a[1], b[1]);
  return a < b ? -1 : a > b ? 1 : 0;
}
