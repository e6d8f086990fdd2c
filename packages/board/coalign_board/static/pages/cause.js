// Why a run failed, as `coalign diagnose` says: the cause, the person's line, what to do.
import { fill, h, makeAddress, markCode, RequestError } from "../board.js";
import { t } from "../i18n.js";
import { describeCause } from "../status.js";

export const title = "cause.title";

export async function render(root, run) {
  const answer = h("div", { "aria-live": "polite" });
  const log = h("a", { href: makeAddress(["run", run.id, "log"], { level: "errors" }) }, t("cause.log"));
  fill(root, h("h1", {}, t(title)), answer, h("p", {}, log));

  async function update() {
    if (run.summary.status !== "failed") return fill(answer, h("p", { class: "empty" }, t("cause.not_failed")));
    if (!answer.hasChildNodes()) fill(answer, h("p", { class: "empty", role: "status" }, t("cause.reading")));
    try {
      fill(answer, drawVerdict(await run.fetch("cause"), run.summary));
    } catch (problem) {
      if (!(problem instanceof RequestError)) throw problem;
      fill(answer, h("p", { class: "cause" }, describeCause(run.summary)), h("p", { class: "problem" }, problem.message));
    }
  }

  update(); // which takes a second: the page is shown meanwhile
  return update;
}

function drawVerdict(verdict, summary) {
  if (verdict.cause === null) return [h("p", { class: "cause" }, describeCause(summary)), h("p", { class: "quiet" }, t("cause.none"))];
  const advice = verdict.advice || t("cause.own_message");
  return [
    h("p", { class: "cause" }, verdict.title),
    h("h2", {}, t("cause.where")),
    h("dl", { class: "evidence" }, verdict.evidence.map(({ place, text }) => [h("dt", {}, h("code", {}, place)), h("dd", {}, text)])),
    h("h2", {}, t("cause.advice")),
    h("p", {}, markCode(advice)),
    verdict.settings ? h("p", {}, t("cause.settings"), " ", h("code", {}, verdict.settings)) : null,
    h("p", { class: "quiet" }, `${t(`cause.sure_${verdict.sure}`)} (${verdict.reasons.join("; ")})`),
    drawOthers(verdict.others),
  ];
}

function drawOthers(others) {
  if (!others.length) return null;
  const list = h("ul", {}, others.map(({ title: name, place }) => h("li", {}, name, " ", h("code", {}, place))));
  return h("details", {}, h("summary", {}, t("cause.others", { count: others.length })), list);
}
