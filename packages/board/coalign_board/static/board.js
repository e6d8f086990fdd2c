// What all pages share: elements, settings that are kept, requests, the address, keys. Pages import this module.

/** Make an element: h("a", {href: "#/", onclick: f}, "text", child, …). Children: arrays, too, or null. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style")
      Object.assign(element.style, value); // through CSSOM: the policy forbids style attributes
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Return the parts of a text of the page; what stands between backquotes is code. */
export function markCode(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

// ---- settings that are kept in the browser --------------------

export function readSetting(name, fallback) {
  try {
    return localStorage.getItem(`coalign.${name}`) ?? fallback;
  } catch {
    return fallback;
  }
}

export function keepSetting(name, value) {
  try {
    localStorage.setItem(`coalign.${name}`, value);
  } catch {
    // a browser without storage forgets it with the page
  }
}

// ---- requests --------------------

/** An answer that is an error: its status and the server's sentence. Status 0: there was no answer. */
export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, params = {}, options = {}) {
  const query = new URLSearchParams(params).toString();
  let response;
  try {
    response = await fetch(query ? `${path}?${query}` : path, { cache: "no-store", ...options });
  } catch (problem) {
    throw new RequestError(0, String(problem.message ?? problem));
  }
  if (response.ok) return response.json();
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error ?? text;
  } catch {
    // the guard answers in plain text
  }
  throw new RequestError(response.status, message);
}

/** A run, as pages get it: `run.id`, `run.summary` (the newest), `run.fetch(path, params)`, `run.url(path, params)`. */
export class Run {
  constructor(id) {
    this.id = id;
    this.summary = null;
    this.kept = {}; // by pages, until the browser leaves the board
  }

  url(path, params = {}) {
    const query = new URLSearchParams(params).toString();
    const id = this.id.split("/").map(encodeURIComponent).join("/");
    return `/api/runs/${id}/${path}${query ? `?${query}` : ""}`;
  }

  fetch(path, params = {}) {
    return request(this.url(path, params));
  }
}

// ---- the address --------------------

/** The part of the address that says what a page shows: `state.get("step")`, `state.set({step: 12, group: null})`. */
export class PageState {
  constructor(query) {
    this.params = new URLSearchParams(query);
  }

  get(name, fallback = null) {
    return this.params.get(name) ?? fallback;
  }

  /** A number, or the fallback if there is none. */
  number(name, fallback = null) {
    const text = this.params.get(name);
    const value = text === null || text === "" ? NaN : Number(text);
    return Number.isFinite(value) ? value : fallback;
  }

  /** Change the address without showing the page anew. null removes a parameter. */
  set(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined) this.params.delete(name);
      else this.params.set(name, value);
    }
    const { path } = readAddress();
    history.replaceState(null, "", makeAddress(path, this.params));
  }
}

export function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").map(decode), query };
}

/** A link: makeAddress(["run", id, "overview"], {step: 3}). */
export function makeAddress(path, params = {}) {
  const query = new URLSearchParams(params).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// ---- keys --------------------

const bindings = [];

/** Call `act` at a key while `root` is on the page. `label` is a key of i18n, for the list that `?` shows. */
export function bindKey(root, key, label, act) {
  bindings.push({ root, key, label, act });
}

/** The keys that work now. */
export function listKeys() {
  for (let i = bindings.length - 1; i >= 0; i--) if (!bindings[i].root.isConnected) bindings.splice(i, 1);
  return bindings;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (field && event.key === "Escape") field.blur();
  if (field && !(field.type === "checkbox" || field.type === "radio")) return;
  if (document.querySelector("dialog[open]") && event.key !== "?") return;
  // The newest binding wins: a page's over the shell's.
  const found = listKeys().findLast((each) => each.key === event.key);
  if (found) {
    event.preventDefault();
    found.act(event);
  }
});

// ---- numbers and times --------------------

/** A number in a few characters, as the terminal shows it: 0.412, 1,234, 2.1e-06. */
export function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size >= 100 || (Number.isInteger(value) && size >= 10)) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size > 0 && size < 1e-4) return value.toExponential(1);
  return size > 0 && size < 0.01 ? value.toFixed(4) : Number.isInteger(value) ? String(value) : value.toFixed(3);
}

/** What a call took: 340 µs, 12 ms, 3.42 s; from a minute on as formatSeconds. */
export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 60) return formatSeconds(seconds);
  const [size, unit] = seconds >= 1 ? [seconds, "s"] : seconds >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "µs"];
  return seconds === 0 ? "0 s" : `${Number(size.toPrecision(3))} ${unit}`;
}

/** Seconds as 3 s, 4:05 or 1:02:03. */
export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 10 ? seconds.toFixed(1) : whole} s`;
  const pad = (n) => String(n).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}
