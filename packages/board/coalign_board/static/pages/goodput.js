// Goodput: where the wall time of the run went, and which tokens were generated and never trained on.
import { fill, formatSeconds, h } from "../board.js";
import { StackedAreas } from "../areas.js";
import { CurveStore } from "../curves.js";
import { t } from "../i18n.js";

export const title = "goodput.title";
// From the bottom of the picture to its top; other causes follow. docs/metrics.md says what each is.
const CAUSES = ["trained", "rollout", "sync", "checkpoint", "evaluation", "hooks", "start", "restart", "redone"];
const DROPPED = ["filter", "expired", "given_up", "cut"];
const HUES = 9; // areas in style.css

export async function render(root, run) {
  const store = new CurveStore(run);
  const time = makePanel("goodput.time", "goodput/", CAUSES, 1);
  const dropped = makePanel("goodput.dropped", "tokens_dropped/", DROPPED, null);
  fill(root, h("h1", { class: "unseen" }, t(title)), time.element, dropped.element);

  async function update() {
    await store.fetchMatching((name) => name.startsWith("goodput/") || name.startsWith("tokens_dropped/") || name === "time/run");
    time.draw(store);
    dropped.draw(store);
  }

  await update();
  return update;
}

/** A picture of the metrics with a prefix, and their numbers at the newest step or at that which is pointed at. */
function makePanel(key, prefix, order, top) {
  let bands = [];
  let steps = [];
  let seconds = [];
  const when = h("p", { class: "quiet", role: "status" });
  const table = h("table", { class: "shares" });
  const areas = new StackedAreas(t(key), say);
  const nothing = h("p", { class: "empty" }, t(`${key}_none`));
  const element = h("section", { class: "panel" }, h("h2", {}, t(key)), h("p", { class: "quiet" }, t(`${key}_about`)), areas.element, when, table, nothing);

  function say(place) {
    const at = place ?? steps.length - 1;
    if (at < 0) return;
    when.textContent = t("goodput.until", { step: steps[at], time: formatSeconds(seconds[at]) });
    fill(
      table,
      h("thead", {}, h("tr", {}, ["cause", "share", "meaning"].map((name) => h("th", { scope: "col" }, t(`goodput.col_${name}`))))),
      h(
        "tbody",
        {},
        [...bands].reverse().map(({ name, label, values, colour }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, h("span", { class: `area-key area-${colour}`, "aria-hidden": "true" }), label),
            h("td", { class: "number" }, formatShare(values[at])),
            h("td", {}, t(`goodput.about_${name}`)),
          ),
        ),
      ),
    );
  }

  function draw(store) {
    const found = store.names.filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length));
    const names = [...order.filter((name) => found.includes(name)), ...found.filter((name) => !order.includes(name))];
    // Steps that an evaluation alone has written have no shares.
    const places = store.points.steps.map((_, place) => place).filter((place) => names.some((name) => store.series.get(prefix + name).mean[place] != null));
    const pick = (values) => places.map((place) => values[place] ?? 0);
    steps = places.map((place) => store.points.steps[place]);
    seconds = places.map((place) => store.points.seconds[place]);
    bands = names.map((name, number) => ({ name, label: t(`goodput.${name}`), values: pick(store.series.get(prefix + name).mean), colour: number % HUES }));
    const highest = Math.max(...steps.map((_, place) => bands.reduce((sum, band) => sum + band.values[place], 0)), 0);
    nothing.hidden = highest > 0;
    for (const each of [areas.element, when, table]) each.hidden = highest === 0;
    if (highest > 0) areas.draw(steps, bands, top ?? highest);
    say(null);
  }

  return { element, draw };
}

function formatShare(share) {
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
}
