// What pages with curves share: along what they are drawn, how smooth, which of them, and which of their steps.
import { bindKey, h, keepSetting, readSetting } from "./board.js";
import { t } from "./i18n.js";

const AXES = ["steps", "tokens", "seconds"];
const WEIGHTS = [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99];

/** Return `element`, `along` and `weight`. `draw` is called when one of them changes. */
export function makeAxisControls(root, state, draw) {
  const kept = state.get("x", readSetting("axis", "steps"));
  const along = h(
    "select",
    { onchange: change },
    AXES.map((name) => h("option", { value: name, selected: name === kept }, t(`overview.x_${name}`))),
  );
  const weight = h("input", {
    type: "range",
    min: 0,
    max: WEIGHTS.length - 1,
    step: 1,
    value: WEIGHTS.indexOf(state.number("smoothing", Number(readSetting("smoothing", "0")))),
    oninput: change,
  });
  const shown = h("output", {});
  const settings = {
    element: [h("label", {}, t("overview.x"), along), h("label", {}, t("overview.smoothing"), weight, shown)],
    along: along.value,
    weight: 0,
  };

  function read() {
    settings.along = along.value;
    settings.weight = WEIGHTS[Number(weight.value)] ?? 0;
    shown.textContent = settings.weight;
  }

  function change() {
    read();
    keepSetting("axis", settings.along);
    keepSetting("smoothing", String(settings.weight));
    state.set({ x: settings.along, smoothing: settings.weight });
    draw();
  }

  function move(by) {
    weight.value = Number(weight.value) + by;
    change();
  }

  bindKey(root, "x", "overview.x_next", () => {
    along.value = AXES[(AXES.indexOf(along.value) + 1) % AXES.length];
    change();
  });
  bindKey(root, "s", "overview.smoother", () => move(1));
  bindKey(root, "S", "overview.less_smooth", () => move(-1));
  read();
  return settings;
}

/** Return the field `search` for names of metrics, and the button `unzoom`, which shows all steps again. */
export function makeChoiceControls(root, state, arrange, zoom) {
  const search = h("input", {
    type: "search",
    "aria-label": t("overview.search"),
    placeholder: t("overview.search"),
    value: state.get("search", ""),
    oninput: () => (state.set({ search: search.value || null }), arrange()),
  });
  const unzoom = h("button", { type: "button", onclick: () => zoom() }, t("overview.all_steps"));
  bindKey(root, "/", "overview.search", () => search.focus());
  bindKey(root, "z", "overview.unzoom", () => zoom());
  return { search, unzoom };
}
