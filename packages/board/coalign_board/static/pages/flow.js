// Flow: the calls of a step of the run's recipe, drawn from above to below, with the columns that go from one to another.
import { fill, formatDuration, h } from "../board.js";
import { svg } from "../areas.js";
import { CurveStore } from "../curves.js";
import { t } from "../i18n.js";

export const title = "flow.title";
const [HEIGHT, GAP, ROW] = [46, 36, 128]; // of a call, between calls of a layer, from one layer to the next
const MARGIN = 120; // left and right, for lines that pass by
const LETTER = 7.6; // width, about
const LANE = 14; // between lines that pass by a layer
const SHOWN = 2; // columns that are written on an edge

export async function render(root, run) {
  const store = new CurveStore(run);
  const flow = await run.fetch("flow");
  const calls = flow.calls.filter((call) => call.makes.length || Object.keys(call.reads).length); // `join` only merges
  const picture = h("div", { class: "scroll flow", tabindex: "0", role: "region", "aria-label": t(title) });
  const about = h("div", { class: "flow-about", role: "status" }, t("flow.hint"));
  fill(
    root,
    h("h1", { class: "unseen" }, t(title)),
    h(
      "section",
      { class: "panel" },
      h("h2", {}, t("flow.of", { algorithm: flow.algorithm, count: calls.length })),
      picture,
      about,
      h("details", {}, h("summary", {}, t("flow.as_table")), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("flow.as_table") }, drawTable(calls))),
    ),
  );

  async function update() {
    await store.fetch([]);
    fill(picture, drawFlow(calls, store.latest, (call) => fill(about, describeCall(call, calls))));
  }

  await update();
  picture.scrollLeft = (picture.scrollWidth - picture.clientWidth) / 2; // calls begin in the middle
  return update;
}

/** Where each call is drawn: {call, x, y, width} by label. Calls of a layer are beside each other, in their order. */
function placeCalls(calls) {
  const layers = [];
  for (const call of calls) (layers[call.layer] ??= []).push(call);
  const measure = (call) => Math.max(110, call.label.length * LETTER + 24);
  const widths = layers.map((layer) => layer.reduce((sum, call) => sum + measure(call) + GAP, -GAP));
  const whole = Math.max(...widths) + 2 * MARGIN;
  const places = new Map();
  layers.forEach((layer, row) => {
    let x = (whole - widths[row]) / 2;
    for (const call of layer) {
      places.set(call.label, { call, x, y: 16 + row * ROW, width: measure(call) });
      x += measure(call) + GAP;
    }
  });
  return { places, width: whole, height: 16 + layers.length * ROW - (ROW - HEIGHT) + 16 };
}

function drawFlow(calls, latest, show) {
  const { places, width, height } = placeCalls(calls);
  const edges = calls.flatMap((call) => Object.entries(call.reads).filter(([source]) => places.has(source)).map(([source, columns]) => ({ source, target: call.label, columns })));
  routeEdges(edges, places, width);
  const lines = [];
  const texts = [];
  for (const edge of edges) {
    const { line, text } = drawEdge(edge, places, edges);
    lines.push(line);
    texts.push(text);
  }
  const pick = (label) => {
    for (const line of [...lines, ...texts]) line.classList.toggle("chosen", line.dataset.source === label || line.dataset.target === label);
    for (const box of boxes) box.classList.toggle("chosen", box.dataset.label === label);
    show(places.get(label).call);
  };
  const boxes = [...places.values()].map(({ call, x, y, width }) => {
    const seconds = latest[`time/${call.model ? `${call.model}.${call.method}` : call.method}`];
    return svg(
      "g",
      {
        class: call.model ? "call call-model" : "call",
        "data-label": call.label,
        tabindex: "0",
        role: "button",
        "aria-label": t("flow.call", { name: call.label, makes: call.makes.join(", ") || t("flow.metrics") }),
        onclick: () => pick(call.label),
        onfocus: () => pick(call.label),
        onmouseenter: () => pick(call.label),
      },
      svg("rect", { x, y, width, height: HEIGHT, rx: call.model ? 6 : 22 }),
      svg("text", { x: x + width / 2, y: y + 19, "text-anchor": "middle" }, call.label),
      svg("text", { x: x + width / 2, y: y + 36, "text-anchor": "middle", class: "call-about" }, seconds === undefined || seconds === null ? (call.model ? "" : t("flow.function")) : formatDuration(seconds)),
    );
  });
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": t("flow.title") }, lines, boxes, texts);
}

/**
 * A line from below one call to above another; lines of one call leave it and enter it side by side. Where there are
 * layers between the two, it passes beside their calls.
 */
function drawEdge({ source, target, columns, detour }, places, edges) {
  const [from, to] = [places.get(source), places.get(target)];
  const middle = (edge, label) => edge.detour ?? places.get(label).x + places.get(label).width / 2;
  const spread = (box, others, place) => box.x + (box.width * (place + 1)) / (others.length + 1);
  const leaving = edges.filter((each) => each.source === source).sort((a, b) => middle(a, a.target) - middle(b, b.target));
  const entering = edges.filter((each) => each.target === target).sort((a, b) => middle(a, a.source) - middle(b, b.source));
  const entry = entering.findIndex((each) => each.source === source);
  const [x1, y1] = [spread(from, leaving, leaving.findIndex((each) => each.target === target)), from.y + HEIGHT];
  const [x2, y2] = [spread(to, entering, entry), to.y];
  const curve = (xa, ya, xb, yb) => `C${xa},${(ya + yb) / 2} ${xb},${(ya + yb) / 2} ${xb},${yb}`;
  const path =
    detour === undefined
      ? `M${x1},${y1} ${curve(x1, y1, x2, y2)}`
      : `M${x1},${y1} ${curve(x1, y1, detour, y1 + ROW - HEIGHT)} L${detour},${y2 - ROW + HEIGHT} ${curve(detour, y2 - ROW + HEIGHT, x2, y2)}`;
  const text = columns.length > SHOWN ? `${columns.slice(0, SHOWN).join(", ")} +${columns.length - SHOWN}` : columns.join(", ");
  const label = `${source} → ${target}: ${columns.join(", ")}`;
  // Above the call that reads, in turn at four heights: there lines that were together are apart.
  return {
    line: svg("path", { class: "edge", d: path, "data-source": source, "data-target": target }, svg("title", {}, label)),
    text: svg("text", { class: "edge-text", x: x2, y: y2 - 8 - 13 * (entry % 4), "text-anchor": "middle", "data-source": source, "data-target": target }, svg("title", {}, label), text),
  };
}

/** Give each edge that passes by layers the place beside their calls where it does so, to the side that is nearer. */
function routeEdges(edges, places, width) {
  const taken = { left: 0, right: 0 };
  for (const edge of edges) {
    const [from, to] = [places.get(edge.source), places.get(edge.target)];
    const passed = [...places.values()].filter(({ call }) => call.layer > from.call.layer && call.layer < to.call.layer);
    if (!passed.length) continue;
    const [left, right] = [Math.min(...passed.map((box) => box.x)), Math.max(...passed.map((box) => box.x + box.width))];
    const centre = (from.x + from.width / 2 + to.x + to.width / 2) / 2;
    const side = centre - left < right - centre || (centre - left === right - centre && taken.left <= taken.right) ? "left" : "right";
    const gap = LANE * ++taken[side];
    edge.detour = side === "left" ? Math.max(4, left - gap) : Math.min(width - 4, right + gap);
  }
}

/** All of one call in words. */
function describeCall(call, calls) {
  const readers = calls.filter((each) => call.label in each.reads);
  return [
    h("h3", {}, call.label),
    h(
      "dl",
      {},
      Object.entries(call.reads).map(([source, columns]) => [h("dt", {}, t("flow.reads", { source })), h("dd", {}, h("code", {}, columns.join(", ")))]),
      h("dt", {}, t("flow.makes")),
      h("dd", {}, h("code", {}, call.makes.join(", ") || t("flow.metrics"))),
      readers.length ? [h("dt", {}, t("flow.read_by")), h("dd", {}, readers.map((each) => each.label).join(", "))] : null,
    ),
  ];
}

function drawTable(calls) {
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ["col_call", "col_reads", "col_makes"].map((name) => h("th", { scope: "col" }, t(`flow.${name}`))))),
    h(
      "tbody",
      {},
      calls.map((call) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, call.label),
          h("td", {}, Object.entries(call.reads).map(([source, columns]) => h("div", {}, `${source}: `, h("code", {}, columns.join(", "))))),
          h("td", {}, h("code", {}, call.makes.join(", ") || t("flow.metrics"))),
        ),
      ),
    ),
  );
}
