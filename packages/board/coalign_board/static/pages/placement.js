// Placement and memory: which process of which model is on which device, and what each model needs over the steps.
import { fill, h, markCode } from "../board.js";
import { findStyle, MetricChart } from "../charts.js";
import { CurveStore } from "../curves.js";
import { t } from "../i18n.js";
import { explainNothing } from "../status.js";

export const title = "placement.title";

export async function render(root, run) {
  const store = new CurveStore(run);
  const where = h("div");
  const legend = h("ul", { class: "legend" });
  const chart = new MetricChart(t("placement.memory_axis"), () => {});
  const table = h("table");
  const sizes = h("div", { class: "scroll fit", tabindex: "0", role: "region", "aria-label": t("placement.memory") }, table);
  const nothing = h("p", { class: "empty" }, explainNothing(run.summary, "placement.no_memory"));
  fill(
    root,
    h("h1", { class: "unseen" }, t(title)),
    where,
    h("section", { class: "panel" }, h("h2", {}, t("placement.memory")), h("p", { class: "quiet" }, markCode(t("placement.memory_about"))), legend, chart.element, sizes, nothing),
  );

  async function update() {
    const [found] = await Promise.all([run.fetch("placement"), store.fetchMatching((name) => name.startsWith("memory/"))]);
    drawPlacement(where, found);
    drawMemory();
  }

  function drawMemory() {
    const names = store.names.filter((name) => name.startsWith("memory/"));
    for (const each of [legend, chart.element, sizes]) each.hidden = !names.length;
    nothing.hidden = names.length > 0;
    if (!names.length) return;
    const curves = names.map((name, number) => ({ ...store.select(name, "steps"), label: name.slice(7), number }));
    fill(
      legend,
      curves.map(({ label, number }) => {
        const { colour, border } = findStyle(number);
        return h("li", {}, h("span", { class: "swatch", style: { borderColor: colour, borderStyle: border }, "aria-hidden": "true" }), label);
      }),
    );
    chart.draw(curves, "steps", 0);
    const columns = ["model", "newest", "highest"];
    fill(
      table,
      h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, t(`placement.${name}`))))),
      h(
        "tbody",
        {},
        curves.map(({ label, mean, high }) => {
          const highest = high.reduce((most, value) => Math.max(most, value ?? 0), 0);
          const newest = mean.findLast((value) => value !== null);
          return h("tr", {}, h("th", { scope: "row" }, label), h("td", { class: "number" }, formatMemory(newest)), h("td", { class: "number" }, formatMemory(highest)));
        }),
      ),
    );
  }

  await update();
  return update;
}

/** MiB, from 10,000 on as GiB. */
function formatMemory(size) {
  if (size === undefined || size === null) return "–";
  return size < 10000 ? `${Math.round(size)} MiB` : `${(size / 1024).toFixed(1)} GiB`;
}

function drawPlacement(root, { placement, settings }) {
  if (placement === null) return fill(root, h("p", { class: "empty" }, t("placement.none")));
  const models = Object.entries(placement.models);
  const columns = ["model", "processes", "where", "in_turn_with", "settings"];
  fill(
    root,
    h(
      "section",
      { class: "panel" },
      h("h2", {}, t("placement.models")),
      h("p", { class: "quiet" }, t("placement.since", { step: placement.step })),
      h(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": t("placement.models") },
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, t(`placement.${name}`))))),
          h(
            "tbody",
            {},
            models.map(([name, model]) =>
              h(
                "tr",
                {},
                h("th", { scope: "row" }, name),
                h("td", { class: "number" }, model.processes.length),
                h("td", {}, describeProcesses(placement.nodes, model.processes)),
                h("td", {}, model.in_turn_with.join(", ") || "–"),
                h("td", {}, Object.entries(settings[name] ?? {}).map(([key, value]) => h("div", {}, h("code", {}, `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`)))),
              ),
            ),
          ),
        ),
      ),
    ),
    h("section", { class: "panel" }, h("h2", {}, t("placement.machines")), placement.nodes.map((node, number) => drawNode(node, number, models))),
  );
}

/** One line for each machine: its name, and the devices of each process there. */
function describeProcesses(nodes, processes) {
  const lines = new Map();
  for (const [node, devices] of processes) {
    if (!lines.has(node)) lines.set(node, []);
    lines.get(node).push(devices.join(","));
  }
  return [...lines].map(([node, devices]) => {
    const text = devices.some(Boolean) ? devices.map((each) => `[${each}]`).join(" ") : t("placement.cpu", { count: devices.length });
    return h("div", {}, `${nodes[node]}: ${text}`);
  });
}

/** A machine as boxes, one for each device that the run uses there, and one for its processes on CPU. */
function drawNode(node, number, models) {
  const boxes = new Map();
  for (const [name, { processes }] of models) {
    processes.forEach(([place, devices], rank) => {
      if (place !== number) return;
      for (const device of devices.length ? devices : [""]) {
        if (!boxes.has(device)) boxes.set(device, []);
        boxes.get(device).push(processes.length > 1 ? `${name} ${rank}` : name);
      }
    });
  }
  const order = [...boxes].sort(([a], [b]) => (a === "") - (b === "") || a.length - b.length || (a < b ? -1 : 1));
  return h(
    "div",
    { class: "machine" },
    h("h3", {}, node),
    h(
      "ul",
      { class: "devices" },
      order.map(([device, held]) => h("li", {}, h("b", {}, device === "" ? t("placement.on_cpu") : t("placement.device", { device })), h("ul", {}, held.map((each) => h("li", {}, each))))),
    ),
  );
}
