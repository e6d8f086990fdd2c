// Curves of several runs, runs that differ in the seed alone as one, and the settings that are different.
import { append, fill, h, makeAddress, request, Run } from "../board.js";
import { makeAxisControls, makeChoiceControls } from "../axis.js";
import { ChartGroups, makeLegend } from "../charts.js";
import { CurveStore, groupMetrics, joinCurves } from "../curves.js";
import { makeDifferences } from "../differences.js";
import { t } from "../i18n.js";

export const title = "compare.title";

export async function render(root, _run, state) {
  const ids = readRuns(state.get("runs", "[]"));
  append(root, [h("h1", {}, t(title))]);
  if (!ids.length) {
    append(root, [h("p", { class: "empty" }, t("compare.empty"))]);
    return;
  }
  const { settings: different, alike } = await request("/api/compare", { runs: JSON.stringify(ids) });
  const runs = ids.map((id) => new Run(id));
  let stores = makeStores();
  const groups = new ChartGroups((names) => load(names), zoom);
  const settings = makeAxisControls(root, state, draw);
  const hasSeeds = new Set(alike).size < ids.length;
  const seeds = h(
    "select",
    { onchange: () => (state.set({ seeds: seeds.value }), drawLegend(), draw()) },
    ["one", "apart"].map((name) =>
      h("option", { value: name, selected: name === state.get("seeds", "one") }, t(`compare.${name}`)),
    ),
  );
  const { search, unzoom } = makeChoiceControls(root, state, arrange, zoom);
  const progress = h("span", { class: "quiet", role: "status" });
  const legend = h("div");
  const seedsLabel = hasSeeds ? h("label", {}, t("compare.seeds"), seeds) : null;
  append(root, [
    h("div", { class: "row" }, settings.element, seedsLabel, search, unzoom, progress),
    legend,
    groups.element,
    makeDifferences(ids, different),
  ]);

  function makeStores() {
    const range =
      state.number("from") === null ? null : { from: state.number("from"), to: state.number("to", Infinity) };
    return runs.map((run) => new CurveStore(run, range));
  }

  /** The curves to draw: [[label, numbers of runs], …]. */
  function listCurves() {
    if (!hasSeeds || seeds.value === "apart") return ids.map((id, i) => [id, [i]]);
    return [...new Set(alike)].map((kind) => {
      const members = ids.map((_, i) => i).filter((i) => alike[i] === kind);
      const name = ids[members[0]];
      return [members.length > 1 ? t("compare.curve", { count: members.length, run: name }) : name, members];
    });
  }

  async function load(names) {
    const current = stores;
    await Promise.all(current.map((store) => store.fetch(names)));
    if (current !== stores) return;
    arrange();
    draw();
    if (current.some((store) => !store.complete) && root.isConnected) await load(groups.listVisible());
  }

  function arrange() {
    groups.filter = search.value.toLowerCase();
    groups.arrange(groupMetrics([...new Set(stores.flatMap((store) => store.names))].sort()));
    const read = stores.filter((store) => !store.complete).reduce((bytes, store) => bytes + store.read, 0);
    progress.textContent = read ? t("overview.reading", { size: Math.round(read / 1e6) }) : "";
    unzoom.hidden = stores[0].range === null;
  }

  function draw() {
    const listed = listCurves();
    groups.draw((chart) => {
      const curves = listed.map(([label, members], number) => {
        const parts = members.map((i) => stores[i].select(chart.name, settings.along)).filter((part) => part.x.length);
        return { ...(parts.length === 1 ? parts[0] : joinCurves(parts)), label, number };
      });
      chart.explain(stores.find((store) => store.meanings[chart.name])?.meanings[chart.name]);
      chart.draw(curves, settings.along, settings.weight);
    });
  }

  function drawLegend() {
    const entries = listCurves().map(([label, members], number) => {
      return { label, number, link: makeAddress(["run", ids[members[0]], "overview"]) };
    });
    fill(legend, makeLegend(entries));
  }

  function zoom(from = null, to = null) {
    const find = (place, join) =>
      join(...stores.filter((s) => s.points.steps.length).map((s) => s.findStep(place, settings.along)));
    state.set(from === null ? { from: null, to: null } : { from: find(from, Math.min), to: find(to, Math.max) });
    stores = makeStores();
    load(groups.listVisible());
  }

  drawLegend();
  await load([]);
  return () => load(groups.listVisible());
}

function readRuns(text) {
  try {
    const runs = JSON.parse(text);
    return Array.isArray(runs) ? runs.filter((run) => typeof run === "string").slice(0, 12) : [];
  } catch {
    return [];
  }
}
