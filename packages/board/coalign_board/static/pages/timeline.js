// Timeline: what each process computed in a step that was traced; idle shares, weight versions and faults of all steps.
import { bindKey, fill, formatDuration, formatNumber, h, markCode, RequestError } from "../board.js";
import { CurveStore } from "../curves.js";
import { t } from "../i18n.js";

export const title = "timeline.title";
const RESTARTS = "faults/restarts"; // the metric
const HUES = 6; // colours of bars in style.css; more names take them again, and differ by their text

export async function render(root, run, state) {
  const lanes = h("div", { class: "lanes", role: "group", "aria-label": t("timeline.lanes") });
  const about = h("p", { class: "bar-about", role: "status" }, t("timeline.keys"));
  const faults = h("div");
  const chosen = h("select", { "aria-label": t("timeline.traced_step"), onchange: () => choose(Number(chosen.value)) });
  const view = h(
    "select",
    { "aria-label": t("timeline.view"), onchange: () => (state.set({ view: view.value }), drawTrace()) },
    ["processes", "devices"].map((name) => h("option", { value: name, selected: name === state.get("view") }, t(`timeline.${name}`))),
  );
  const tools = h("div", { class: "row" }, chosen, view);
  const store = new CurveStore(run);
  let traces = [];
  let trace = null;

  function choose(step) {
    state.set({ step });
    return showTrace(step);
  }

  async function showTrace(step) {
    chosen.value = String(step);
    try {
      trace = await run.fetch("trace", { step });
    } catch (problem) {
      if (!(problem instanceof RequestError)) throw problem;
      trace = null;
      return fill(lanes, h("p", { class: "problem" }, problem.message));
    }
    drawTrace();
  }

  function drawTrace() {
    if (trace === null) return fill(lanes, h("p", { class: "empty" }, markCode(t("timeline.no_trace"))));
    view.disabled = !trace.devices.length;
    const byDevice = view.value === "devices" && trace.devices.length;
    const names = [...new Set(trace.lanes.flatMap((lane) => lane.bars.map((bar) => bar[2])))];
    const rows = byDevice ? trace.devices.map((device) => mergeLanes(trace, device)) : trace.lanes.map((lane) => ({ ...lane, name: nameLane(lane) }));
    fill(lanes, drawAxis(trace.seconds), rows.map((row) => drawLane(row, trace.seconds, names, (text) => (about.textContent = text))));
  }

  function move(by) {
    const place = traces.indexOf(Number(chosen.value)) + by;
    if (traces[place] !== undefined) choose(traces[place]);
  }

  async function read() {
    const [found, steps] = await Promise.all([run.fetch("timeline"), run.fetch("sample_steps", { limit: 200 }), store.fetchMatching(isShown)]);
    traces = found.traces;
    tools.hidden = about.hidden = !traces.length;
    fill(chosen, traces.map((step) => h("option", { value: step }, t("timeline.step", { step }))));
    if (trace !== null) chosen.value = String(trace.step);
    drawFaults(faults, found.events, steps.steps, store);
  }

  fill(
    root,
    h("h1", { class: "unseen" }, t(title)),
    tools,
    h("section", { class: "panel" }, h("h2", {}, t("timeline.one_step")), lanes, about),
    faults,
  );
  bindKey(root, ",", "timeline.key_before", () => move(-1));
  bindKey(root, ".", "timeline.key_after", () => move(1));
  await read();
  const step = state.number("step", traces.at(-1) ?? null);
  if (step === null) drawTrace();
  else await showTrace(step);
  return read;
}

const isShown = (name) => name.startsWith("idle/") || name === RESTARTS;

// ---- one step --------------------------------------------------------------------------------------------------------

function nameLane({ model, process }) {
  if (model === "loop") return t("timeline.loop");
  return process ? `${model} · ${process}` : model;
}

/** The lane of a device: the bars of all processes on it, each with its model in front. */
function mergeLanes(trace, { node, device, lanes, idle }) {
  const of = lanes.map((number) => trace.lanes[number]);
  const bars = of.flatMap((lane) => lane.bars.map((bar) => [bar[0], bar[1], bar[2], `${nameLane(lane)}: ${bar[3]}`, bar[4], bar[5]]));
  return { name: t("timeline.device", { node, device }), bars: bars.sort((a, b) => a[0] - b[0]), waits: [], idle };
}

function drawAxis(seconds) {
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) =>
    h("span", { style: { left: `${share * 100}%` } }, formatDuration(share * seconds)),
  );
  return h("div", { class: "lane lane-axis", "aria-hidden": "true" }, h("span", { class: "lane-name" }), h("div", { class: "lane-marks" }, marks), h("span", { class: "lane-idle" }, t("timeline.idle")));
}

function drawLane({ name, bars, waits, idle }, seconds, names, say) {
  const share = (value) => `${(100 * value) / (seconds || 1)}%`;
  const boxes = bars.map((bar) =>
    h("div", { class: `lane-bar hue-${names.indexOf(bar[2]) % HUES}`, style: { left: share(bar[0]), width: share(bar[1]) }, title: describeBar(bar), onclick: () => pick(bars.indexOf(bar)) }, bar[2]),
  );
  const lines = waits.map(([start, length, what]) =>
    h("div", { class: "lane-wait", style: { left: share(start), width: share(length) }, title: `${what}: ${formatDuration(length)}` }),
  );
  let current = -1;
  const pick = (place) => {
    boxes[current]?.classList.remove("current");
    current = Math.max(0, Math.min(bars.length - 1, place));
    boxes[current]?.classList.add("current");
    if (bars[current]) say(`${name}: ${describeBar(bars[current])}`);
  };
  const track = h(
    "div",
    {
      class: "lane-track",
      tabindex: "0",
      role: "img",
      "aria-label": t("timeline.lane", { name, count: bars.length, idle: idle === null ? "–" : formatShare(idle) }),
      onkeydown: (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1, Home: -bars.length, End: bars.length }[event.key];
        if (by === undefined) return;
        event.preventDefault();
        pick(current + by);
      },
    },
    lines,
    boxes,
  );
  return h("div", { class: "lane" }, h("span", { class: "lane-name", title: name }, name), track, h("span", { class: "lane-idle number" }, idle === null ? "" : formatShare(idle)));
}

function describeBar([start, length, , call, memory, calls]) {
  return t(calls > 1 ? "timeline.bars" : "timeline.bar", {
    call,
    calls,
    start: formatDuration(start),
    length: formatDuration(length),
    memory: memory ? t("timeline.memory", { memory: formatNumber(memory) }) : "",
  });
}

function formatShare(share) {
  return `${Math.round(100 * share)} %`;
}

// ---- all steps -------------------------------------------------------------------------------------------------------

function drawFaults(root, events, steps, store) {
  const models = store.names.filter((name) => name.startsWith("idle/"));
  const { x, high } = store.select(RESTARTS, "steps");
  const troubled = x.filter((_, place) => high[place] > 0);
  const written = steps.filter(({ phase, versions }) => phase === "train" && versions);
  fill(
    root,
    models.length
      ? h(
          "section",
          { class: "panel" },
          h("h2", {}, t("timeline.idle_title")),
          h("p", { class: "quiet" }, t("timeline.idle_about")),
          models.map((name) => drawStrip(name.slice(5), store.select(name, "steps"))),
        )
      : null,
    written.length
      ? h(
          "section",
          { class: "panel" },
          h("h2", {}, t("timeline.versions_title")),
          h("p", { class: "quiet" }, t("timeline.versions_about")),
          drawVersions(written),
        )
      : null,
    h(
      "section",
      { class: "panel" },
      h("h2", {}, t("timeline.faults_title")),
      troubled.length ? h("p", {}, t("timeline.restarts", { steps: troubled.join(", "), count: troubled.length })) : null,
      events.length
        ? h(
            "table",
            {},
            h("thead", {}, h("tr", {}, ["time", "kind", "text"].map((name) => h("th", { scope: "col" }, t(`timeline.event_${name}`))))),
            h("tbody", {}, events.slice(-200).reverse().map(({ time, kind, text }) => h("tr", {}, h("td", { class: "number" }, time), h("td", {}, t(`timeline.kind_${kind}`)), h("td", {}, text)))),
          )
        : troubled.length ? null : h("p", { class: "empty" }, t("timeline.no_faults")),
    ),
  );
}

/** A row of cells, one for each step or bucket of steps: the higher, the more of the time a model was idle. */
function drawStrip(name, { x: steps, mean: values }) {
  const known = values.filter((value) => value !== null);
  const mean = known.reduce((sum, value) => sum + value, 0) / (known.length || 1);
  const cells = values.map((value, place) =>
    h("div", { class: "strip-cell", title: value === null ? "" : t("timeline.idle_at", { step: steps[place], idle: formatShare(value) }) }, h("div", { style: { height: `${100 * (value ?? 0)}%` } })),
  );
  return h(
    "div",
    { class: "lane" },
    h("span", { class: "lane-name" }, name),
    h("div", { class: "strip", role: "img", "aria-label": t("timeline.idle_mean", { name, idle: formatShare(mean) }) }, cells),
    h("span", { class: "lane-idle number" }, formatShare(mean)),
  );
}

/** Which weight versions wrote the samples of a step; one step is on version step - 1 if nothing is stale. */
function drawVersions(steps) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": t("timeline.versions_title") },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["step", "versions", "behind"].map((name) => h("th", { scope: "col", class: "number" }, t(`timeline.col_${name}`))))),
      h(
        "tbody",
        {},
        steps.map(({ step, versions: [low, high] }) =>
          h("tr", {}, h("td", { class: "number" }, step), h("td", { class: "number" }, low === high ? low : `${low} – ${high}`), h("td", { class: "number" }, Math.max(0, step - 1 - low))),
        ),
      ),
    ),
  );
}
