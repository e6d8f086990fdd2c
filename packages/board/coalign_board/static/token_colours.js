// How the values of tokens become colours: blue and orange, which also the colour-blind tell apart. Signs and
// underlines say the same as the colours.
import { formatNumber } from "./board.js";

const STRONGEST = 0.6; // opacity; the text stays readable on it, in both themes

/**
 * What can be shown of tokens, in the order of the choice. `kind`: `signed` values have a middle (`middle`; below it
 * orange, above it blue), `depth` values begin at `middle` and only go one way, `version` and `mask` are themselves.
 */
export const MEASURES = {
  advantage: { kind: "signed", middle: 0 },
  logprob: { kind: "depth", middle: 0 },
  trainer_logprob: { kind: "depth", middle: 0 },
  reference_logprob: { kind: "depth", middle: 0 },
  kl: { kind: "depth", middle: 0 },
  ratio: { kind: "signed", middle: 1, scale: Math.log },
  weight_version: { kind: "version" },
  loss_mask: { kind: "mask" },
};

/** The scale of the values of one sample. `reach`: the distance from the middle that has the strongest colour. */
export function makeScale(name, values) {
  const measure = MEASURES[name];
  const present = values.filter((value) => value !== null && value !== undefined && isValid(name, value));
  if (measure.kind === "version") {
    const versions = [...new Set(present)].sort((a, b) => a - b);
    return { name, ...measure, versions };
  }
  if (measure.kind === "mask") return { name, ...measure };
  const distances = present.map((value) => Math.abs(measureDistance(measure, value))).sort((a, b) => a - b);
  // One value far out must not make all others pale.
  const reach = distances[Math.floor(0.98 * (distances.length - 1))] || distances.at(-1) || 1;
  return { name, ...measure, reach };
}

function isValid(name, value) {
  return name !== "weight_version" || value >= 0;
}

function measureDistance(measure, value) {
  const apply = measure.scale ?? ((x) => x);
  return apply(Math.max(value, measure.scale ? 1e-9 : -Infinity)) - apply(measure.middle);
}

/** {background, sign} of a value: a colour, and `up`, `down` or ``, which become a solid or a dotted underline. */
export function colourValue(scale, value) {
  if (value === null || value === undefined || !isValid(scale.name, value)) return { background: "", sign: "" };
  if (scale.kind === "mask") return value ? { background: paint("blue", 0.5), sign: "up" } : { background: "", sign: "" };
  if (scale.kind === "version") {
    const place = scale.versions.indexOf(value);
    const share = scale.versions.length > 1 ? place / (scale.versions.length - 1) : 1;
    return { background: share < 0.5 ? paint("orange", 1 - share * 1.4) : paint("blue", share), sign: place % 2 ? "up" : "" };
  }
  const distance = measureDistance(scale, value);
  const strength = Math.min(1, Math.abs(distance) / scale.reach);
  if (strength < 0.02) return { background: "", sign: "" };
  if (scale.kind === "depth") return { background: paint("orange", strength), sign: strength > 0.5 ? "down" : "" };
  return distance > 0 ? { background: paint("blue", strength), sign: "up" } : { background: paint("orange", strength), sign: "down" };
}

function paint(hue, strength) {
  return `rgb(var(--${hue}-rgb) / ${(STRONGEST * strength).toFixed(3)})`;
}

/** The entries of the legend: [value as text, background, sign]. */
export function listLegend(scale, t) {
  const show = (value, text = formatNumber(value)) => ({ text, ...colourValue(scale, value) });
  if (scale.kind === "mask") return [show(0, t("rollouts.mask_off")), show(1, t("rollouts.mask_on"))];
  if (scale.kind === "version") return scale.versions.map((version) => show(version, String(version)));
  if (scale.kind === "depth") {
    const sign = scale.name === "kl" ? 1 : -1;
    return [0, 0.5, 1].map((share) => show(sign * share * scale.reach));
  }
  const undo = scale.scale ? (distance) => scale.middle * Math.exp(distance) : (distance) => scale.middle + distance;
  return [-1, -0.5, 0, 0.5, 1].map((share) => show(undo(share * scale.reach)));
}
