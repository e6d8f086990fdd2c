// The shell: header, navigation, polling, keys. A page is a module in pages/ that exports `title` and `render`.
import {
  append,
  bindKey,
  fill,
  h,
  keepSetting,
  listKeys,
  makeAddress,
  PageState,
  readAddress,
  request,
  RequestError,
  Run,
} from "./board.js";
import { makeControls } from "./controls.js";
import { formatAge, getLanguage, LANGUAGES, setLanguage, t } from "./i18n.js";
import { describeCause, findFirstPage, makeStatus } from "./status.js";

// Pages of a run, in the order of their tabs: pages/NAME.js with the text `NAME.title`. The server says which have content.
const RUN_PAGES = ["cause", "overview", "rollouts", "timeline", "placement", "checkpoints", "goodput", "flow", "log", "configuration"];
const POLL_MILLISECONDS = 2000;

const app = document.getElementById("app");
const main = h("main", { id: "main", tabindex: "-1" });
const header = h("header", { class: "bar" });
const problem = h("p", { class: "problem", role: "alert", hidden: true });
const announcer = h("p", { class: "unseen", "aria-live": "polite" });
const skip = h("a", { class: "skip", href: "#main", onclick: goToContent });
append(app, [skip, header, problem, main, announcer]);

let shown = { ticket: 0, run: null, update: null, growth: null, showRun: null };
let busy = false;
const runs = new Map(); // those that were looked at, with what their pages keep

// ---- what the address shows --------------------

async function show() {
  const { path, query } = readAddress();
  const ticket = shown.ticket + 1;
  const [kind, id, page] = path;
  const run = kind === "run" && id ? (runs.get(id) ?? new Run(id)) : null;
  if (run) runs.set(id, run);
  shown = { ticket, run, update: null, growth: null, showRun: null };
  let name = run ? page : kind === "compare" ? "compare" : "runs";
  const state = new PageState(query);
  try {
    const summary = run && !run.summary ? run.fetch("state").then((answer) => (run.summary = answer)) : null;
    if (run && !RUN_PAGES.includes(name)) {
      await summary;
      name = findFirstPage(run.summary);
    }
    const root = h("div", { class: `page page-${name}` });
    const [module] = await Promise.all([import(`./pages/${name}.js`), summary]);
    if (ticket !== shown.ticket) return;
    const title = t(module.title);
    document.title = `${run ? `${run.id} · ` : ""}${title} · Coalign`;
    fill(header, makeHeader(run, name));
    if (run) {
      const head = h("div");
      shown.showRun = makeRunHead(head, run, name);
      shown.growth = run.summary.growth;
      fill(main, head, root);
      scrollToTab(head.querySelector(".tabs"));
    } else fill(main, root);
    bindPageKeys(root, run, name);
    const update = await module.render(root, run, state);
    if (ticket !== shown.ticket) return;
    shown.update = update ?? null;
    announcer.textContent = title;
    main.dataset.shown = location.hash; // all of it, for whoever waits for that
    showProblem(null);
  } catch (error) {
    if (ticket !== shown.ticket) return;
    fill(header, makeHeader(run, name));
    fill(main, h("p", { class: "empty" }, describe(error)), h("p", {}, h("a", { href: "#/" }, t("shell.all_runs"))));
    if (!(error instanceof RequestError)) throw error;
  }
}

async function poll() {
  if (busy || document.visibilityState !== "visible") return;
  busy = true;
  const { ticket, run } = shown;
  try {
    if (run) {
      const summary = await run.fetch("state");
      if (ticket !== shown.ticket) return;
      run.summary = summary;
      shown.showRun?.();
      if (summary.growth !== shown.growth && shown.update) {
        shown.growth = summary.growth;
        await shown.update();
      }
    } else if (shown.update) await shown.update();
    showProblem(null);
  } catch (error) {
    if (ticket !== shown.ticket) return;
    if (!(error instanceof RequestError)) throw error;
    showProblem(error);
  } finally {
    busy = false;
  }
}

function describe(error) {
  if (!(error instanceof RequestError)) return String(error);
  return error.status === 0 ? t("shell.no_answer") : error.message;
}

function showProblem(error) {
  problem.hidden = error === null;
  problem.textContent = error === null ? "" : describe(error);
}

// ---- header --------------------

function makeHeader(run, name) {
  skip.textContent = t("shell.skip");
  const language = getLanguage();
  const other = Object.keys(LANGUAGES).find((each) => each !== language);
  return [
    h(
      "a",
      { class: "brand", href: "#/" },
      h("img", { src: "/static/icon.svg", alt: "", width: 20, height: 20 }),
      "Coalign",
    ),
    h(
      "nav",
      { "aria-label": t("shell.navigation") },
      h("a", { href: "#/", "aria-current": name === "runs" ? "page" : null }, t("runs.title")),
      name === "compare" ? h("a", { href: location.hash, "aria-current": "page" }, t("compare.title")) : null,
      run ? h("span", { class: "crumb", title: run.id }, run.id) : null,
    ),
    h(
      "div",
      { class: "tools" },
      h("button", { type: "button", lang: other, onclick: changeLanguage }, LANGUAGES[other]),
      h(
        "button",
        { type: "button", onclick: changeTheme, title: t("shell.theme_hint") },
        t(`shell.theme_${getTheme()}`),
      ),
      h("button", { type: "button", onclick: showHelp, "aria-label": t("shell.help") }, "?"),
    ),
  ];
}

/** Bring the open page's tab into view: on a small screen the tabs are wider than the page. */
function scrollToTab(tabs) {
  const open = tabs.querySelector("[aria-current]");
  tabs.scrollLeft = open.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - open.offsetWidth) / 2;
}

/** The pages of a run that have content, and the one that is open. */
function listPages(run, name) {
  return RUN_PAGES.filter((page) => page === name || run.summary.pages.includes(page));
}

/** Draw what stands above all pages of a run, and return the function that draws it anew. */
function makeRunHead(head, run, name) {
  const status = h("div", { class: "run-status" });
  const line = h("p", { class: "step-line", role: "group", "aria-label": t("shell.step_line") });
  const tabs = h("nav", { class: "tabs", "aria-label": t("shell.pages") });
  let drawn = "";
  const drawTabs = () => {
    const pages = listPages(run, name);
    if (String(pages) === drawn) return; // the focus may be there
    drawn = String(pages);
    const link = (page) => h("a", { href: makeAddress(["run", run.id, page]), "aria-current": page === name ? "page" : null }, t(`${page}.title`));
    fill(tabs, pages.map(link));
  };
  const controls = run.summary.can_control ? makeControls(run) : null;
  const draw = () => {
    const summary = run.summary;
    fill(
      status,
      makeStatus(summary),
      h("span", {}, t("shell.step", { step: summary.step ?? "–", last: summary.last ?? "–" })),
      h("span", { class: "quiet" }, summary.algorithm),
      h(
        "span",
        { class: "quiet" },
        summary.updated ? t("shell.updated", { age: formatAge(summary.now - summary.updated) }) : "",
      ),
      h("span", { class: "why" }, describeCause(summary)),
    );
    line.textContent = summary.line;
    line.hidden = !summary.line;
    controls?.draw();
    drawTabs();
  };
  draw();
  append(head, [status, controls?.element, line, tabs]);
  return draw;
}

// ---- theme, language, help --------------------

function getTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function changeTheme() {
  const next = { auto: "dark", dark: "light", light: "auto" }[getTheme()];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  window.applyTheme(); // of theme.js
  keepSetting("theme", next);
  show(); // charts take their colours when they are drawn
}

function changeLanguage() {
  const names = Object.keys(LANGUAGES);
  setLanguage(names[(names.indexOf(getLanguage()) + 1) % names.length]);
  document.documentElement.lang = getLanguage() === "zh" ? "zh-CN" : "en";
  show();
}

function showHelp() {
  const open = document.querySelector("dialog[open]");
  if (open) return open.close();
  const dialog = h(
    "dialog",
    { "aria-labelledby": "help-title", onclose: () => dialog.remove() },
    h("h2", { id: "help-title" }, t("help.title")),
    h(
      "dl",
      { class: "keys" },
      listKeys().map(({ key, label }) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, t(label))]),
    ),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, t("help.close"))),
  );
  app.append(dialog);
  dialog.showModal();
}

function goToContent(event) {
  event.preventDefault();
  main.focus();
}

function bindPageKeys(root, run, name) {
  if (!run) return;
  const go = (by) => {
    const pages = listPages(run, name);
    location.hash = makeAddress(["run", run.id, pages.at((pages.indexOf(name) + by) % pages.length)]);
  };
  bindKey(root, "]", "help.next_page", () => go(1));
  bindKey(root, "[", "help.previous_page", () => go(-1));
}

bindKey(app, "?", "help.help", showHelp);
bindKey(app, "r", "help.runs", () => (location.hash = "#/"));
bindKey(app, "d", "help.theme", changeTheme);
bindKey(app, "l", "help.language", changeLanguage);

document.documentElement.lang = getLanguage() === "zh" ? "zh-CN" : "en";
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => getTheme() === "auto" && show());
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", poll);
setInterval(poll, POLL_MILLISECONDS);
show();
