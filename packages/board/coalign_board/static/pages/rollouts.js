// Rollouts: steps, the groups of a step, samples, and one sample with its tokens. The address names all that is chosen.
import { bindKey, fill, formatNumber, h, markCode, RequestError } from "../board.js";
import { formatSpread, makeComponents, nameGroup, NO_GROUP } from "../groups.js";
import { t } from "../i18n.js";
import { LongList } from "../long_list.js";
import { drawSample } from "../sample_view.js";
import { explainNothing } from "../status.js";

export const title = "rollouts.title";
const FILTERS = ["step", "phase", "group", "search", "sort", "order"]; // parameters of the list of samples
const SEARCH_PAUSE = 250; // milliseconds without a key until a search begins

export async function render(root, run, state) {
  let groups = [];
  const detail = h("section", { class: "panel sample", "aria-label": t("rollouts.sample") });
  const counted = h("p", { class: "quiet", role: "status" });
  const components = h("div");
  const crumbs = h("nav", { class: "crumbs", "aria-label": t("rollouts.chosen") });

  const stepList = new LongList({
    label: t("rollouts.steps"),
    rowHeight: 48,
    readPage: async (offset, limit) => {
      const found = await run.fetch("sample_steps", { offset, limit });
      return { total: found.total, rows: found.steps };
    },
    drawRow: drawStep,
    choose: ({ step, phase }) => attempt(() => choose({ step, phase, group: null })),
    isChosen: ({ step, phase }) => step === state.number("step") && phase === (state.get("phase") ?? "train"),
    empty: markCode(explainNothing(run.summary, "rollouts.no_samples")),
  });
  const groupList = new LongList({
    label: t("rollouts.groups"),
    rowHeight: 84,
    readPage: (offset, limit) => ({ total: groups.length, rows: groups.slice(offset, offset + limit) }),
    drawRow: drawGroup,
    choose: ({ group }) => attempt(() => choose({ group: group ?? NO_GROUP })),
    isChosen: ({ group }) => String(group ?? NO_GROUP) === state.get("group"),
    empty: t("rollouts.choose_step"),
  });
  const sampleList = new LongList({
    label: t("rollouts.samples"),
    rowHeight: 68,
    readPage: async (offset, limit) => {
      const found = await run.fetch("sample_page", { ...readFilters(state), offset, limit });
      counted.textContent = t("rollouts.count", { count: found.total });
      return { total: found.total, rows: found.samples };
    },
    drawRow: (row) => drawSampleRow(row, state.get("search", "")),
    choose: (row) => attempt(() => open(nameSample(row))),
    isChosen: (row) => nameSample(row) === state.get("sample"),
    empty: t("rollouts.no_match"),
  });

  /** Do what a click asks for; what the server refuses is said where the sample would be. */
  async function attempt(act) {
    try {
      await act();
    } catch (problem) {
      if (!(problem instanceof RequestError)) throw problem;
      fill(detail, h("p", { class: "problem", role: "alert" }, problem.message));
    }
  }

  async function choose(changes) {
    state.set(changes);
    drawCrumbs();
    stepList.draw();
    if ("step" in changes) await readGroups();
    drawComponents();
    await sampleList.refresh({ top: true });
  }

  /** Put the samples with the lowest or the highest reward first, and show the first of them. */
  async function showExtreme(direction) {
    sort.value = "reward";
    order.value = direction;
    await choose({ sort: "reward", order: direction });
    const first = sampleList.find(0);
    if (first) await open(nameSample(first));
  }

  function drawComponents() {
    groupList.draw();
    fill(components, makeComponents(groups.find(({ group }) => String(group ?? NO_GROUP) === state.get("group"))?.rewards));
  }

  async function readGroups() {
    const step = state.get("step");
    groups = step === null ? [] : (await run.fetch("sample_groups", { step, phase: state.get("phase", "train") })).groups;
    await groupList.refresh();
    drawComponents();
  }

  async function open(name) {
    state.set({ sample: name });
    sampleList.draw();
    if (name === null) return fill(detail, h("p", { class: "empty" }, t("rollouts.choose_sample")));
    const [step, phase, group, index, branch = 0] = name.split(".");
    const sample = await run.fetch("sample", { step, phase, group, index, branch });
    if (name !== state.get("sample")) return; // another one was chosen meanwhile
    drawSample(detail, run, sample, state, (index, branch) => attempt(() => open(nameSample({ step, phase, group, index, branch }))));
  }

  function drawCrumbs() {
    const [step, group] = [state.get("step"), state.get("group")];
    const crumb = (text, changes, here) =>
      h("button", { type: "button", class: "link", "aria-current": here ? "true" : null, onclick: () => attempt(() => choose(changes)) }, text);
    fill(
      crumbs,
      crumb(t("rollouts.all_steps"), { step: null, phase: null, group: null }, step === null),
      step === null ? null : [" › ", crumb(t("rollouts.step", { step, phase: t(`rollouts.${state.get("phase", "train")}`) }), { group: null }, group === null)],
      group === null ? null : [" › ", h("span", { "aria-current": "true" }, nameGroup(group))],
    );
  }

  let pause;
  const search = h("input", {
    type: "search",
    value: state.get("search", ""),
    placeholder: t("rollouts.search"),
    "aria-label": t("rollouts.search"),
    oninput: () => {
      clearTimeout(pause);
      pause = setTimeout(() => attempt(() => choose({ search: search.value || null })), SEARCH_PAUSE);
    },
  });
  const sort = makeSelect("sort", ["file", "reward", "length"]);
  const order = makeSelect("order", ["up", "down"]);

  function makeSelect(name, choices) {
    const select = h(
      "select",
      { "aria-label": t(`rollouts.${name}`), onchange: () => attempt(() => choose({ [name]: select.value })) },
      choices.map((each) => h("option", { value: each, selected: each === state.get(name, choices[0]) }, t(`rollouts.${name}_${each}`))),
    );
    return select;
  }

  const extreme = (name, direction) =>
    h("button", { type: "button", onclick: () => attempt(() => showExtreme(direction)) }, t(`rollouts.${name}`));

  fill(
    root,
    h("h1", { class: "unseen" }, t(title)),
    h("div", { class: "row" }, search, sort, order, extreme("lowest", "up"), extreme("highest", "down"), crumbs),
    h(
      "div",
      { class: "rollouts" },
      h("div", { class: "rollouts-where" }, h("h2", {}, t("rollouts.steps")), stepList.element, h("h2", {}, t("rollouts.groups")), groupList.element),
      h("div", { class: "rollouts-list" }, h("h2", {}, t("rollouts.samples")), components, counted, sampleList.element),
      detail,
    ),
  );
  bindKey(root, "/", "rollouts.key_search", () => search.focus());
  drawCrumbs();
  await Promise.all([stepList.refresh(), attempt(readGroups), sampleList.refresh()]);
  await attempt(() => open(state.get("sample")));
  return () => Promise.all([stepList.refresh(), attempt(readGroups), sampleList.refresh()]);
}

function readFilters(state) {
  return Object.fromEntries(FILTERS.map((name) => [name, state.get(name)]).filter(([, value]) => value));
}

/** The name of a sample in the address. Unlike its place in the file it stays when the run goes back some steps. */
function nameSample({ step, phase, group, index, branch }) {
  return [step, phase, group ?? NO_GROUP, index, ...(branch ? [branch] : [])].join(".");
}

function drawStep({ step, phase, groups, samples, flat, tokens_recorded: recorded, ...rewards }) {
  return [
    h("div", { class: "one-line" }, h("b", {}, t("rollouts.step", { step, phase: t(`rollouts.${phase}`) })), " ", drawReward(rewards)),
    h(
      "div",
      { class: "quiet one-line" },
      t("rollouts.group_count", { count: groups }),
      flat ? h("span", { class: "flat" }, ` ▬ ${t("rollouts.flat_count", { count: flat })}`) : null,
      ` · ${t("rollouts.count", { count: samples })}`,
      recorded ? null : ` · ${t("rollouts.without_tokens")}`,
    ),
  ];
}

function drawGroup({ group, samples, flat, tokens, question, rewards, ...spread }) {
  const parts = Object.entries(rewards).map(([name, [mean, std]]) => `${name} ${formatNumber(mean)} ± ${formatNumber(std)}`);
  return [
    h(
      "div",
      { class: "one-line" },
      h("b", {}, nameGroup(group)),
      " ",
      drawReward(spread),
      flat ? h("span", { class: "flat", title: t("rollouts.flat_about") }, ` ▬ ${t("rollouts.flat")}`) : null,
    ),
    h("div", { class: "quiet" }, t("rollouts.group_counts", { samples, tokens: formatNumber(tokens) })),
    h("div", { class: "one-line", title: parts.join("\n") }, parts.join(" · ")),
    h("div", { class: "one-line" }, question),
  ];
}

function drawReward({ reward, reward_std: std, reward_range: range }) {
  if (reward === null) return h("span", { class: "quiet" }, t("rollouts.no_reward"));
  return h("span", { class: "number" }, formatSpread(reward, std, range));
}

function drawSampleRow(row, search) {
  const { step, phase, group, branch, reward, status, tokens, turns, images } = row;
  const index = branch ? `${row.index}.${branch}` : row.index;
  return [
    h(
      "div",
      { class: "one-line" },
      h("b", {}, t("rollouts.sample_short", { step, group: nameGroup(group), index })),
      phase === "eval" && group === null ? ` ${t("rollouts.eval")}` : null,
      " ",
      h("span", { class: "number" }, reward === null ? t("rollouts.no_reward") : formatNumber(reward)),
      h(
        "span",
        { class: "quiet" },
        ` · ${t("rollouts.tokens", { count: tokens })}`,
        status === "ok" ? null : ` · ${t(`rollouts.status_${status}`)}`,
        turns > 1 ? ` · ${t("rollouts.turns", { count: turns })}` : null,
        images ? ` · ${t("rollouts.images", { count: images })}` : null,
      ),
    ),
    h("div", { class: "one-line quiet" }, row.question),
    h("div", { class: "one-line" }, search && row.found ? markText(row.found, search) : row.response),
  ];
}

/** A text with the places marked that a search has found. */
function markText(text, search) {
  const found = [];
  let start = 0;
  for (let at = text.toLowerCase().indexOf(search.toLowerCase()); at >= 0; ) {
    found.push(text.slice(start, at), h("mark", {}, text.slice(at, at + search.length)));
    start = at + search.length;
    at = text.toLowerCase().indexOf(search.toLowerCase(), start);
  }
  return [...found, text.slice(start)];
}
