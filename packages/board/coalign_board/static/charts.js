// Charts: a curve or several, each with its band, drawn by uPlot in the colours of the theme.
import { fill, formatNumber, formatSeconds, h } from "./board.js";
import { getLanguage, t } from "./i18n.js";
import { makeExplained } from "./explained.js";
import { smooth } from "./curves.js";

const STYLES = ["solid", "dashed", "dotted"];
const DASHES = [[], [7, 4], [2, 3]];
const COLOURS = 8;
const OPEN_GROUPS = ["important", "reward", "eval", "loss"]; // until others are opened

/** The colour and the dash of the curve with this number: the first twelve can be told apart. */
export function findStyle(number) {
  const style = getComputedStyle(document.documentElement);
  return {
    colour: style.getPropertyValue(`--line-${number % COLOURS}`).trim(),
    dash: DASHES[number % DASHES.length],
    border: STYLES[number % STYLES.length],
  };
}

/** A number on the axis: 12, 3.4k, 1.2M; seconds as 1:02:03. */
function formatPlace(value, along) {
  if (along === "seconds") return formatSeconds(value);
  for (const [size, unit] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${unit}`;
  }
  return String(Number(value.toPrecision(4)));
}

/** A chart of one metric. `zoom(from, to)` is called with places on the axis; without any to see everything. */
export class MetricChart {
  constructor(name, zoom) {
    this.name = name;
    this.zoom = zoom;
    this.holes = h("span", { class: "holes" });
    this.value = h("output", {});
    this.box = h("div", { class: "plot", role: "img", "aria-label": name, ondblclick: () => zoom() });
    this.title = h("h3", {}, h("span", { class: "name" }, name), this.holes, this.value);
    this.element = h("section", { class: "chart", "aria-label": name }, this.title, this.box);
    this.isExplained = false;
    this.plot = null;
    this.shape = "";
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.box);
  }

  resize() {
    const width = this.box.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.box.clientHeight });
  }

  /** Let the name say what the metric means, {en, zh}, where it is pointed at or reached by Tab. */
  explain(meaning) {
    if (!meaning || this.isExplained) return;
    this.isExplained = true;
    this.title.firstChild.replaceWith(makeExplained(this.name, meaning[getLanguage()]));
  }

  /** Draw curves: [{label, x, mean, low, high, number, holes}], along `steps`, `tokens` or `seconds`. */
  draw(curves, along, weight, newest) {
    const tables = curves.map(({ x, mean, low, high }) => [
      x,
      low,
      high,
      mean,
      smooth(mean, hasFew(mean) ? 0 : weight),
    ]);
    const data = tables.length > 1 ? uPlot.join(tables) : (tables[0] ?? [[]]);
    this.along = along;
    this.curves = curves;
    this.newest = newest;
    const holes = curves.reduce((count, curve) => count + (curve.holes?.length ?? 0), 0);
    this.holes.textContent = holes ? t("overview.holes", { count: holes }) : "";
    this.holes.title = holes
      ? curves
          .flatMap((curve) => curve.holes)
          .slice(0, 20)
          .join(", ")
      : "";
    this.box.setAttribute(
      "aria-label",
      `${this.name}: ${newest === undefined ? "" : t("overview.newest", { value: formatNumber(newest) })}`,
    );
    this.showValue(null);
    const shape = JSON.stringify([along, weight > 0, curves.map((curve) => [curve.label, curve.number])]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.shape = shape;
    this.plot = new uPlot(this.makeOptions(curves, weight), data, this.box);
  }

  makeOptions(curves, weight) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    const series = [{}];
    const bands = [];
    for (const { number, label } of curves) {
      const { colour: stroke, dash } = findStyle(number);
      const first = series.length;
      const bound = { stroke: `${stroke}00`, width: 0, points: { show: false }, spanGaps: true };
      series.push({ ...bound }, { ...bound });
      bands.push({ series: [first + 1, first], fill: `${stroke}30` });
      series.push({ stroke: `${stroke}55`, width: 1, show: weight > 0, points: { show: false }, spanGaps: true });
      series.push({
        label,
        stroke,
        width: 1.8,
        dash,
        points: { size: 4, show: (plot, place) => hasFew(plot.data[place]) },
        spanGaps: true,
      });
    }
    return {
      width: this.box.clientWidth || 400,
      height: this.box.clientHeight || 190,
      legend: { show: false },
      scales: { x: { time: false } },
      axes: [
        { ...axis, size: 28, values: (_, places) => places.map((place) => formatPlace(place, this.along)) },
        { ...axis, size: 56, values: (_, values) => values.map(formatTick) },
      ],
      series,
      bands,
      cursor: {
        y: false,
        sync: { key: "board", scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
      },
      hooks: {
        setCursor: [(plot) => this.showValue(plot.cursor.idx ?? null)],
        setSelect: [
          (plot) => {
            const { left, width } = plot.select;
            if (width < 5) return;
            const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
            plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            this.zoom(from, to);
          },
        ],
      },
    };
  }

  /** Say the values under the cursor, or the newest one. */
  showValue(place) {
    if (place === null || !this.plot) {
      this.value.textContent = this.newest === undefined ? "" : formatNumber(this.newest);
      return;
    }
    const data = this.plot.data;
    const values = this.curves.map((_, i) => data[4 * i + 4][place] ?? null);
    const [low, high] = [data[1][place], data[2][place]];
    const range =
      this.curves.length === 1 && low !== high && low !== null ? ` (${formatNumber(low)} … ${formatNumber(high)})` : "";
    const where = formatPlace(data[0][place], this.along);
    this.value.textContent = `${where}: ${values.map(formatNumber).join(" · ")}${range}`;
  }

  destroy() {
    this.sizes.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

/** A metric of few steps, such as evaluations, is not smoothed, and its points are shown. */
function hasFew(values) {
  return values.reduce((count, value) => count + (value !== null && value !== undefined), 0) < 30;
}

function formatTick(value) {
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** A legend: [{label, number, link}]. */
export function makeLegend(entries) {
  return h(
    "ul",
    { class: "legend" },
    entries.map(({ label, number, link }) => {
      const { colour, border } = findStyle(number);
      const swatch = h("span", {
        class: "swatch",
        "aria-hidden": "true",
        style: { borderTopColor: colour, borderTopStyle: border },
      });
      return h("li", {}, swatch, link ? h("a", { href: link }, label) : h("span", {}, label));
    }),
  );
}

/** Groups of charts of which only those in sight are fetched and drawn. */
export class ChartGroups {
  /** `show(names)` is called with metrics that came into sight. `zoom`: see MetricChart. */
  constructor(show, zoom) {
    this.show = show;
    this.zoom = zoom;
    this.element = h("div", {});
    this.charts = [];
    this.names = "";
    this.filter = "";
    this.sight = new IntersectionObserver((entries) => this.notice(entries), { rootMargin: "200px" });
  }

  notice(entries) {
    const entered = [];
    for (const { target, isIntersecting } of entries) {
      const chart = this.charts.find((each) => each.element === target);
      if (!chart) continue;
      chart.inSight = isIntersecting;
      if (isIntersecting) entered.push(chart.name);
    }
    if (entered.length) this.show([...new Set(entered)]);
  }

  /** Make the charts of these groups, [[group, names], …], unless they are there. Open groups stay open. */
  arrange(groups) {
    const names = JSON.stringify([groups, this.filter]);
    if (names === this.names) return;
    const open = new Map([...this.element.querySelectorAll("details")].map((each) => [each.dataset.group, each.open]));
    this.names = names;
    for (const chart of this.charts) chart.destroy();
    this.sight.disconnect();
    this.charts = [];
    const matches = (name) => name.toLowerCase().includes(this.filter);
    fill(
      this.element,
      groups.map(([group, members]) => {
        const shown = members.filter(matches);
        if (!shown.length) return null;
        const charts = shown.map((name) => new MetricChart(name, this.zoom));
        this.charts.push(...charts);
        const title =
          group === "important" ? t("overview.important") : group === "other" ? t("overview.group_other") : group;
        return h(
          "details",
          { class: "group", "data-group": group, open: open.get(group) ?? OPEN_GROUPS.includes(group) },
          h("summary", {}, `${title} (${shown.length})`),
          h(
            "div",
            { class: "charts" },
            charts.map((chart) => chart.element),
          ),
        );
      }),
    );
    for (const chart of this.charts) this.sight.observe(chart.element);
  }

  /** Draw the charts in sight by `draw(chart)`. */
  draw(draw) {
    for (const chart of this.charts) if (chart.inSight && chart.element.offsetParent) draw(chart);
  }

  /** The names of the metrics in sight. */
  listVisible() {
    return [...new Set(this.charts.filter((chart) => chart.inSight).map((chart) => chart.name))];
  }

  destroy() {
    this.sight.disconnect();
    for (const chart of this.charts) chart.destroy();
  }
}
