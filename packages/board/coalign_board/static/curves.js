// The curves of a run as the server sends them, kept and extended; and what is drawn of them.

const MOST_NAMES = 100; // of one request

/**
 * Curves of one run. The server joins steps to buckets where there are too many, and says so by `width`: then a series
 * has `low` and `high` beside `mean`. What was sent is not sent again, unless buckets became wider or the file is new.
 */
export class CurveStore {
  /** `range`: {from, to} in steps, for a part of the curves that is read step by step. */
  constructor(run, range = null) {
    this.run = run;
    this.range = range;
    this.complete = false;
    this.names = [];
    this.latest = {};
    this.meanings = {}; // {name: {en, zh}}, null for a metric of the run's own
    this.newest = -1;
    this.read = 0;
    this.clear();
  }

  clear() {
    this.key = null;
    this.points = { buckets: [], steps: [], tokens: [], seconds: [] };
    this.series = new Map();
  }

  /** Fetch what is new of these metrics. */
  async fetch(names) {
    const fresh = names.filter((name) => !this.series.has(name));
    const known = this.range ? [] : names.filter((name) => this.series.has(name));
    const wanted = this.range ? names : fresh;
    for (let i = 0; i < wanted.length; i += MOST_NAMES) await this.request(wanted.slice(i, i + MOST_NAMES), null);
    if (known.length || !names.length) await this.request(known.slice(0, MOST_NAMES), this.findStart(known));
    const lost = names.filter((name) => !this.series.has(name)); // the buckets became wider in the meantime
    if (lost.length && !this.range) await this.request(lost.slice(0, MOST_NAMES), null);
  }

  /** Fetch what is new of all metrics whose names `matches(name)`, also while the server still reads a long file. */
  async fetchMatching(matches) {
    do {
      await this.fetch([]);
      await this.fetch(this.names.filter(matches));
    } while (!this.complete);
  }

  findStart(names) {
    if (this.key === null || !names.length) return null;
    return `${this.key}:${Math.min(...names.map((name) => this.series.get(name).until))}`;
  }

  async request(names, since) {
    const params = { names: JSON.stringify(names) };
    if (since !== null) params.since = since;
    if (this.range) Object.assign(params, { from: this.range.from, to: this.range.to });
    this.add(await this.run.fetch("metrics", params), names);
  }

  add(answer, names) {
    this.complete = answer.complete;
    this.names = answer.all;
    this.latest = answer.latest;
    Object.assign(this.meanings, answer.meanings);
    this.newest = answer.newest;
    this.read = answer.read;
    const key = `${answer.generation}:${answer.width}`;
    if (this.range || key !== this.key) {
      const before = this.range && key === this.key ? this.series : new Map();
      this.clear();
      this.series = before;
      this.key = key;
    }
    if (!answer.buckets.length) {
      for (const name of names) if (!this.series.has(name)) this.series.set(name, { mean: [], holes: [], until: 0 });
      return;
    }
    const { buckets } = this.points;
    const found = buckets.findIndex((bucket) => bucket >= answer.buckets[0]);
    const place = found < 0 ? buckets.length : found;
    const until = answer.buckets.at(-1);
    for (const kind of ["buckets", "steps", "tokens", "seconds"]) {
      this.points[kind] = this.points[kind].slice(0, place).concat(answer[kind]);
    }
    const first = answer.steps[0];
    for (const name of names) {
      const old = this.series.get(name);
      const more = answer.series[name] ?? { mean: answer.buckets.map(() => null), holes: [] };
      const series = { until, holes: [...(old?.holes ?? []).filter((step) => step < first), ...more.holes] };
      for (const kind of ["mean", "low", "high"]) {
        if (more[kind]) series[kind] = pad((old?.[kind] ?? []).slice(0, place), place).concat(more[kind]);
      }
      this.series.set(name, series);
    }
  }

  /** The points of a metric along `steps`, `tokens` or `seconds`: {x, mean, low, high, holes}. */
  select(name, along) {
    const { mean = [], low, high, holes = [] } = this.series.get(name) ?? {};
    const x = this.points[along];
    const bounds = { low: low ?? mean, high: high ?? mean };
    const places = x.map((_, i) => i).filter((i) => i === 0 || x[i] > x[i - 1]); // tokens stand still in evaluations
    const pick = (values) => places.map((i) => values[i] ?? null);
    return { x: pick(x), mean: pick(mean), low: pick(bounds.low), high: pick(bounds.high), holes };
  }

  /** The step nearest to a place on the axis. */
  findStep(value, along) {
    const x = this.points[along];
    const place = x.findIndex((each) => each >= value);
    return this.points.steps[place < 0 ? x.length - 1 : place] ?? 0;
  }
}

const pad = (values, length) => values.concat(Array(Math.max(0, length - values.length)).fill(null));

/** An exponential average that begins without bias. `weight` is that of the past, 0 to 1; gaps stay gaps. */
export function smooth(values, weight) {
  if (!weight) return values;
  let [average, mass] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    average = weight * average + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return average / mass;
  });
}

/** One curve of several: where at least one has values, their mean, with the least and the greatest of all. */
export function joinCurves(curves) {
  const x = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const all = curves.map((curve) => ["mean", "low", "high"].map((kind) => interpolate(curve.x, curve[kind], x)));
  const pick = (kind, join) =>
    x.map((_, i) => {
      const values = all.map((each) => each[kind][i]).filter((value) => value !== null);
      return values.length ? join(values) : null;
    });
  return {
    x,
    mean: pick(0, (values) => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: pick(1, (values) => Math.min(...values)),
    high: pick(2, (values) => Math.max(...values)),
    holes: [],
  };
}

/** Values at the places `at`, on straight lines between the points; null before the first and after the last. */
export function interpolate(x, values, at) {
  const points = x.map((each, i) => [each, values[i]]).filter(([, value]) => value !== null);
  let next = 0;
  return at.map((place) => {
    while (next < points.length && points[next][0] < place) next++;
    if (next === points.length) return null;
    const [right, after] = points[next];
    if (right === place) return after;
    if (next === 0) return null;
    const [left, before] = points[next - 1];
    return before + ((after - before) * (place - left)) / (right - left);
  });
}

// What most people look at first, in this order.
const IMPORTANT = [
  "reward/mean",
  "eval/mean",
  "loss/value",
  "eval/loss/value",
  "loss/accuracy",
  "loss/kl_ref",
  "loss/entropy",
  "loss/grad_norm",
  "loss/mismatch",
  "tokens/response",
  "goodput/trained",
  "time/step",
];
const GROUPS = ["reward", "eval", "loss", "tokens", "samples", "throughput", "goodput", "time", "idle", "memory"];

/** Groups of metrics by the part of their names before the slash: [[group, names], …], the important ones first. */
export function groupMetrics(names) {
  const groups = new Map([["important", IMPORTANT.filter((name) => names.includes(name))]]);
  for (const group of GROUPS) groups.set(group, []);
  for (const name of names) {
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(name);
  }
  return [...groups].filter(([, members]) => members.length);
}
