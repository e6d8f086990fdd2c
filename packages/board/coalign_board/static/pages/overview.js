// The curves of a run, in groups, and its newest samples.
import { append, fill, formatNumber, h, markCode } from "../board.js";
import { makeAxisControls, makeChoiceControls } from "../axis.js";
import { ChartGroups } from "../charts.js";
import { CurveStore, groupMetrics } from "../curves.js";
import { nameGroup } from "../groups.js";
import { t } from "../i18n.js";
import { explainNothing } from "../status.js";

export const title = "overview.title";

export async function render(root, run, state) {
  const whole = (run.kept.curves ??= new CurveStore(run));
  let store = readRange(state) ? new CurveStore(run, readRange(state)) : whole;
  const groups = new ChartGroups((names) => load(names), zoom);
  const settings = makeAxisControls(root, state, draw);
  const progress = h("span", { class: "quiet", role: "status" });
  const { search, unzoom } = makeChoiceControls(root, state, arrange, zoom);
  const samples = h("section", { "aria-labelledby": "samples" });
  const hint = h("p", { class: "quiet" }, t("overview.hint"));
  append(root, [
    h("h1", { class: "unseen" }, t(title)),
    h("div", { class: "row" }, settings.element, search, unzoom, progress),
    hint,
  ]);
  append(root, [groups.element, samples]);

  /** Fetch metrics, and again while the server still reads a long file. */
  async function load(names) {
    const current = store;
    await current.fetch(names);
    if (current !== store) return;
    arrange();
    draw();
    if (!current.complete && root.isConnected) await load(groups.listVisible());
  }

  function arrange() {
    groups.filter = search.value.toLowerCase();
    groups.arrange(groupMetrics(store.names));
    hint.textContent = store.names.length ? t("overview.hint") : explainNothing(run.summary, "status.no_step_yet");
    progress.textContent = store.complete ? "" : t("overview.reading", { size: Math.round(store.read / 1e6) });
    unzoom.hidden = store.range === null;
  }

  function draw() {
    groups.draw((chart) => {
      if (!store.series.has(chart.name)) return;
      const curve = { ...store.select(chart.name, settings.along), label: chart.name, number: 0 };
      chart.explain(store.meanings[chart.name]);
      chart.draw([curve], settings.along, settings.weight, store.latest[chart.name]);
    });
  }

  function zoom(from = null, to = null) {
    const range =
      from === null ? null : { from: store.findStep(from, settings.along), to: store.findStep(to, settings.along) };
    state.set({ from: range?.from, to: range?.to });
    store = range ? new CurveStore(run, range) : whole;
    load(groups.listVisible());
  }

  async function showSamples() {
    const { samples: newest } = await run.fetch("samples", { last: 4 });
    if (!newest.length && run.summary.step === null) return fill(samples); // the hint above says so
    const shown = newest.length
      ? h("div", { class: "samples" }, newest.map(makeSample))
      : h("p", { class: "quiet" }, markCode(t("rollouts.no_samples")));
    fill(samples, h("h2", { id: "samples" }, t("overview.newest_samples")), shown);
  }

  await Promise.all([load([]), showSamples()]);
  return async () => {
    await Promise.all([load(groups.listVisible()), showSamples()]);
  };
}

function makeSample({ step, question, response, reward, ...rest }) {
  const [phase, status] = [t(`rollouts.${rest.phase === "eval" ? "eval" : "train"}`), rest.status ? t(`rollouts.status_${rest.status}`) : "–"];
  const facts = { step, phase, status, group: nameGroup(rest.group), reward: formatNumber(reward) };
  return h(
    "article",
    { class: "sample" },
    h("p", { class: "facts" }, t("overview.sample", facts)),
    h("p", { class: "prompt" }, question),
    h("p", { class: "response" }, response),
  );
}

function readRange(state) {
  const [from, to] = [state.number("from"), state.number("to")];
  return from === null || to === null ? null : { from, to };
}
