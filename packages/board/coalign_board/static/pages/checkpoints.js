// Checkpoints: which there are and where, which one is best, and from which one the same command would go on.
import { fill, formatNumber, h, markCode, RequestError } from "../board.js";
import { formatTime, t } from "../i18n.js";

export const title = "checkpoints.title";
const COLUMNS = ["step", "marks", "state", "size", "parts", "written"];

export async function render(root, run) {
  const answers = new Map(); // what looks at all contents have found, by step
  const about = h("p", { role: "status" });
  const facts = h("dl", { class: "facts" });
  const table = h("table");
  const nothing = h("p", { class: "empty" }, t("checkpoints.none"));
  let found;
  fill(
    root,
    h("h1", { class: "unseen" }, t(title)),
    h("section", { class: "panel" }, about, facts, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t(title) }, table), nothing),
  );

  async function verify(step) {
    answers.set(step, t("checkpoints.reading"));
    draw();
    try {
      const { problem } = await run.fetch("verification", { step });
      answers.set(step, problem ? `✕ ${problem}` : `✓ ${t("checkpoints.contents_whole")}`);
    } catch (problem) {
      if (!(problem instanceof RequestError)) throw problem;
      answers.set(step, `✕ ${problem.message}`);
    }
    draw();
  }

  function draw() {
    fill(about, markCode(describeResume(found)));
    fill(facts, listFacts(found).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    nothing.hidden = found.checkpoints.length > 0;
    table.hidden = !found.checkpoints.length;
    fill(
      table,
      h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, t(`checkpoints.${name}`))))),
      h("tbody", {}, found.checkpoints.map((each) => drawRow(each, answers.get(each.step), () => verify(each.step)))),
    );
  }

  async function update() {
    found = await run.fetch("checkpoints");
    draw();
  }

  await update();
  return update;
}

/** From which checkpoint the same command would go on, in a sentence. */
function describeResume({ checkpoints, resume, copies_to: copies }) {
  if (resume === "never") return t("checkpoints.resume_never");
  if (resume !== "auto") return t("checkpoints.resume_named", { name: resume });
  const chosen = checkpoints.find((each) => each.resume);
  const text = chosen ? t(`checkpoints.resume_${chosen.place}`, { step: chosen.step }) : t(checkpoints.length ? "checkpoints.resume_damaged" : "checkpoints.resume_none");
  return copies ? `${text} ${t("checkpoints.resume_copies")}` : text;
}

function listFacts({ best, keep, copies_to: copies, copied, writing }) {
  return [
    best ? [t("checkpoints.best"), t("checkpoints.best_value", { metric: best.metric ?? "–", value: formatNumber(best.value), step: best.step, mode: t(`checkpoints.mode_${best.mode}`) })] : null,
    keep ? [t("checkpoints.kept"), t("checkpoints.newest", { count: keep })] : null,
    copies ? [t("checkpoints.copies"), t("checkpoints.copied", { place: copies, steps: copied.join(", ") || "–", count: copied.length })] : null,
    writing.length ? [t("checkpoints.writing"), writing.join(", ")] : null,
  ].filter(Boolean);
}

function drawRow(checkpoint, answer, verify) {
  const { step, place, path, problem, sizes, time } = checkpoint;
  const marks = ["resume", "best", "linked"].filter((name) => checkpoint[name]);
  const parts = Object.entries(sizes).sort(([, a], [, b]) => b - a);
  const whole = parts.reduce((sum, [, size]) => sum + size, 0);
  return h(
    "tr",
    {},
    h("th", { scope: "row", title: path }, step, " ", h("span", { class: "quiet" }, t(`checkpoints.place_${place}`))),
    h("td", {}, marks.map((name) => h("div", { class: "mark-word" }, markCode(`${{ resume: "▶", best: "★", linked: "↗" }[name]} ${t(`checkpoints.is_${name}`)}`)))),
    h(
      "td",
      {},
      h("div", {}, problem ? `✕ ${problem}` : `✓ ${t("checkpoints.sizes_whole")}`),
      answer ? h("div", {}, answer) : null,
      place === "disk" && !problem ? h("button", { type: "button", disabled: answer === t("checkpoints.reading"), onclick: verify, "aria-label": t("checkpoints.verify_step", { step }) }, t("checkpoints.verify")) : null,
    ),
    h("td", { class: "number" }, formatBytes(whole)),
    h("td", {}, parts.map(([name, size]) => h("div", { class: "part" }, h("span", { class: "part-bar", style: { width: `${(100 * size) / (whole || 1)}%` }, "aria-hidden": "true" }), h("code", {}, name), " ", h("span", { class: "number" }, formatBytes(size))))),
    h("td", {}, formatTime(time)),
  );
}

function formatBytes(size) {
  const power = size < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(size) / 10));
  return `${(size / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
