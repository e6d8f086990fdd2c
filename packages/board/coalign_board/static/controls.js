// The buttons that ask a run to save, to stop, or to compute with other numbers of processes.
import { fill, h, request, RequestError } from "./board.js";
import { t } from "./i18n.js";
import { isGoing } from "./status.js";

const POLL_MILLISECONDS = 700;

/** Return the buttons of a run as `element`, and `draw`, which enables them only while it is going. */
export function makeControls(run) {
  const said = h("span", { class: "said", role: "status" });
  const models = h("input", { type: "text", placeholder: "policy=4", "aria-label": t("control.models"), size: 16 });
  const buttons = [
    h("button", { type: "button", onclick: () => ask({ do: "save" }) }, t("control.save")),
    h(
      "button",
      { type: "button", onclick: () => confirm(t("control.sure")) && ask({ do: "stop" }) },
      t("control.stop"),
    ),
    h("button", { type: "submit" }, t("control.scale")),
  ];
  const element = h(
    "form",
    { class: "controls", onsubmit: (event) => (event.preventDefault(), scale()) },
    buttons[0],
    buttons[1],
    models,
    buttons[2],
    said,
  );
  let waiting = false;

  async function scale() {
    const wanted = models.value
      .split(/[\s,]+/)
      .filter(Boolean)
      .map((each) => each.split("="));
    if (!wanted.length || wanted.some(([name, count]) => !name || !/^[1-9]\d*$/.test(count ?? ""))) {
      fill(said, t("control.scale_format"));
      return;
    }
    await ask({ do: "scale", models: Object.fromEntries(wanted.map(([name, count]) => [name, Number(count)])) });
  }

  async function ask(what) {
    waiting = true;
    draw();
    fill(said, t("control.waiting"));
    try {
      const body = JSON.stringify(what);
      const { id } = await request(run.url("control"), {}, { method: "POST", body });
      fill(said, await waitForAnswer(id));
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      fill(said, error.message);
    } finally {
      waiting = false;
      draw();
    }
  }

  /** Wait until the run has answered, which it does between two steps, or has ended. */
  async function waitForAnswer(id) {
    while (element.isConnected) {
      const going = isGoing(run.summary);
      const { results } = await run.fetch("answer", { id });
      if (results) return results.map((each) => `${each.done ? "✓" : "✕"} ${each.text}`).join("; ");
      if (!going) return t("control.ended");
      await new Promise((done) => setTimeout(done, POLL_MILLISECONDS));
    }
    return "";
  }

  function draw() {
    element.hidden = !isGoing(run.summary) && !said.textContent;
    for (const each of [...buttons, models]) each.disabled = waiting || !isGoing(run.summary);
  }

  return { element, draw };
}
