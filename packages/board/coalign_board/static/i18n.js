// The texts of the page in the language that was chosen.
import { keepSetting, readSetting } from "./board.js";
import en from "./i18n/en.js";
import zh from "./i18n/zh.js";

const TEXTS = { en, zh };
export const LANGUAGES = { en: "English", zh: "中文" };

const wanted = readSetting("language", (navigator.language ?? "en").startsWith("zh") ? "zh" : "en");
let language = TEXTS[wanted] ? wanted : "en";

export function getLanguage() {
  return language;
}

export function setLanguage(name) {
  language = name;
  keepSetting("language", name);
}

/** The text of a key; `{name}` in it is replaced by `values.name`, and `{name|step|steps}` by the word for that many. */
export function t(key, values = {}) {
  const text = TEXTS[language][key] ?? en[key] ?? key;
  return text
    .replace(/\{(\w+)\|([^|}]*)\|([^}]*)\}/g, (_, name, one, several) => (String(values[name]) === "1" ? one : several))
    .replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

const UNITS = [
  ["day", 86400],
  ["hour", 3600],
  ["minute", 60],
  ["second", 1],
];

/** How long ago: "3 minutes ago". */
export function formatAge(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const [unit, size] = UNITS.find(([, each]) => seconds >= each) ?? UNITS.at(-1);
  return new Intl.RelativeTimeFormat(language, { numeric: "always", style: "short" }).format(
    -Math.max(0, Math.round(seconds / size)),
    unit,
  );
}

/** A time of the clock, in the reader's zone. */
export function formatTime(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString(language === "zh" ? "zh-CN" : "en-GB") : "–";
}
