// The log of a run, and the reports of its watchdog.
import { append, bindKey, fill, h } from "../board.js";
import { t } from "../i18n.js";

export const title = "log.title";

const MOST_ENTRIES = 5000; // that are kept on the page
const LEVEL = /^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) /;
const CHOICES = { all: [], warnings: ["WARNING", "ERROR", "CRITICAL"], errors: ["ERROR", "CRITICAL"] };

export async function render(root, run, state) {
  let [piece, stalls] = await Promise.all([run.fetch("log"), run.fetch("stalls")]);
  let start = piece.start;
  let end = piece.end;
  let entries = split(piece.text);

  const lines = h("pre", {
    class: "text log",
    tabindex: 0,
    role: "log",
    "aria-label": t("log.title"),
    "aria-live": "off",
  });
  const level = h(
    "select",
    { "aria-label": t("log.level"), onchange: () => (state.set({ level: level.value }), draw(true)) },
    Object.keys(CHOICES).map((name) =>
      h("option", { value: name, selected: name === state.get("level", "all") }, t(`log.${name}`)),
    ),
  );
  const search = h("input", {
    type: "search",
    "aria-label": t("log.search"),
    placeholder: t("log.search"),
    value: state.get("search", ""),
    oninput: () => (state.set({ search: search.value || null }), draw(true)),
  });
  const earlier = h("button", { type: "button", onclick: loadEarlier }, t("log.earlier"));
  const count = h("span", { class: "quiet", role: "status" });
  const reports = h("section", { "aria-labelledby": "stalls" });

  async function loadEarlier() {
    const piece = await run.fetch("log", { before: start });
    if (piece.start >= start) return;
    entries = [...split(piece.text), ...entries];
    start = piece.start;
    const height = lines.scrollHeight;
    draw(false);
    lines.scrollTop += lines.scrollHeight - height; // what was read stays where it was
  }

  function draw(toEnd) {
    const atEnd = toEnd || lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
    const word = search.value.toLowerCase();
    const levels = CHOICES[level.value];
    const shown = entries.filter(
      (entry) => (!levels.length || levels.includes(entry.level)) && (!word || entry.text.toLowerCase().includes(word)),
    );
    fill(
      lines,
      shown.map((entry) => h("span", { class: `entry ${entry.level.toLowerCase()}` }, `${entry.text}\n`)),
    );
    count.textContent = t("log.count", { shown: shown.length, all: entries.length });
    earlier.hidden = start === 0;
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  }

  function drawStalls() {
    fill(
      reports,
      h("h2", { id: "stalls" }, t("log.stalls")),
      stalls.stalls.length ? stalls.stalls.map(makeStall) : h("p", { class: "quiet" }, t("log.no_stalls")),
    );
  }

  function makeStall({ time, report, files }) {
    const stacks = h("pre", {
      class: "text",
      tabindex: 0,
      hidden: true,
      role: "region",
      "aria-label": t("log.stacks"),
    });
    const show = async (file) => {
      stacks.textContent = (await run.fetch("stalls", { time, file })).text;
      stacks.hidden = false;
    };
    return h(
      "details",
      { open: stalls.stalls[0].time === time },
      h("summary", {}, `${time}: ${report.split("\n")[0] || t("log.unfinished")}`),
      h("pre", { class: "text" }, report),
      h(
        "p",
        { class: "row" },
        files.map((file) => h("button", { type: "button", onclick: () => show(file) }, file)),
      ),
      stacks,
    );
  }

  append(root, [
    h("h1", {}, t("log.title")),
    h("div", { class: "row" }, level, search, earlier, count),
    lines,
    reports,
  ]);
  bindKey(root, "/", "log.search", () => search.focus());
  bindKey(root, "e", "log.earlier", loadEarlier);
  draw(true);
  drawStalls();
  lines.scrollTop = lines.scrollHeight;

  return async () => {
    const known = stalls.stalls.length;
    stalls = await run.fetch("stalls");
    if (stalls.stalls.length !== known) drawStalls();
    let more = await run.fetch("log", { from: end });
    if (more.size < end) entries = []; // the log is another one
    let grown = more.size < end;
    if (grown) start = more.start;
    while (more.text) {
      addEntries(more.text);
      end = more.end;
      grown = true;
      if (end >= more.size) break;
      more = await run.fetch("log", { from: end });
    }
    if (!grown) return;
    if (entries.length > MOST_ENTRIES) {
      const dropped = entries.splice(0, entries.length - MOST_ENTRIES);
      start += dropped.reduce((bytes, entry) => bytes + new TextEncoder().encode(entry.text).length + 1, 0);
    }
    draw(false);
  };

  function addEntries(text) {
    const more = split(text);
    // Lines of a traceback that go on belong to the entry before.
    if (entries.length && more.length && !more[0].begins) entries.at(-1).text += `\n${more.shift().text}`;
    entries.push(...more);
  }
}

/** Entries of a log: a line with a time and a level, and the lines after it that have none. */
function split(text) {
  const entries = [];
  for (const line of text.split("\n").slice(0, -1)) {
    const level = LEVEL.exec(line)?.[1];
    if (level || !entries.length) entries.push({ level: level ?? "INFO", text: line, begins: Boolean(level) });
    else entries.at(-1).text += `\n${line}`;
  }
  return entries;
}
