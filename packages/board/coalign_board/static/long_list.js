// A list of any length, of which only the rows in sight are on the page.
import { fill, h } from "./board.js";

const PAGE = 100; // rows that are asked for at once
const MARGIN = 5; // rows above and below those in sight
let count = 0;

/**
 * `readPage(offset, limit)` returns {total, rows}, or a promise of it. `drawRow(row)` returns what a row shows.
 * `choose(row)` is called at a click and at Enter. `isChosen(row)` says which row is marked.
 */
export class LongList {
  constructor({ label, rowHeight, readPage, drawRow, choose, isChosen, empty }) {
    Object.assign(this, { rowHeight, readPage, drawRow, choose, isChosen, empty });
    this.id = `list-${++count}`;
    this.total = 0;
    this.current = 0;
    this.pages = new Map(); // number of the page -> rows, or the promise of them
    this.generation = 0;
    this.sizer = h("div", { class: "long-list-rows", role: "presentation" });
    this.element = h(
      "div",
      {
        class: "long-list",
        role: "listbox",
        tabindex: "0",
        "aria-label": label,
        onscroll: () => this.plan(),
        onkeydown: (event) => this.handleKey(event),
      },
      this.sizer,
    );
    new ResizeObserver(() => this.plan()).observe(this.element);
  }

  /** Ask for all rows in sight anew; `top`: show the first row. */
  async refresh({ top = false } = {}) {
    const generation = ++this.generation;
    if (top) {
      this.element.scrollTop = 0;
      this.current = 0;
    }
    const first = Math.floor(this.element.scrollTop / this.rowHeight / PAGE);
    const found = await this.readPage(first * PAGE, PAGE);
    if (generation !== this.generation) return; // another request came after this one
    this.pages = new Map([[first, found.rows]]);
    this.total = found.total;
    this.current = Math.min(this.current, Math.max(0, this.total - 1));
    this.draw();
  }

  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  draw() {
    const height = this.element.clientHeight || 400;
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - MARGIN);
    const last = Math.min(this.total, Math.ceil((this.element.scrollTop + height) / this.rowHeight) + MARGIN);
    this.sizer.style.height = `${this.total * this.rowHeight}px`;
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.makeRow(place, this.find(place)));
    fill(this.sizer, rows.length ? rows : h("p", { class: "empty", role: "option" }, this.empty ?? ""));
    this.mark();
  }

  makeRow(place, row) {
    return h(
      "div",
      {
        class: "long-list-row",
        role: "option",
        id: `${this.id}-${place}`,
        "aria-posinset": place + 1,
        "aria-setsize": this.total,
        "aria-selected": row && this.isChosen?.(row) ? "true" : "false",
        style: { top: `${place * this.rowHeight}px`, height: `${this.rowHeight}px` },
        onclick: () => this.take(place),
      },
      row ? this.drawRow(row) : "…",
    );
  }

  /** The row at a place, or nothing yet: its page is asked for. */
  find(place) {
    const number = Math.floor(place / PAGE);
    const page = this.pages.get(number);
    if (page === undefined) {
      const generation = this.generation;
      const promise = Promise.resolve(this.readPage(number * PAGE, PAGE)).then(
        (found) => {
          if (generation !== this.generation) return;
          this.pages.set(number, found.rows);
          this.total = found.total;
          this.plan();
        },
        () => generation === this.generation && this.pages.delete(number), // asked for again at the next scroll
      );
      this.pages.set(number, promise);
    }
    return Array.isArray(page) ? page[place % PAGE] : undefined;
  }

  take(place) {
    const row = this.find(place);
    this.current = place;
    this.mark();
    if (row) this.choose?.(row);
    for (const each of this.sizer.children) {
      const own = this.find(Number(each.id?.split("-").at(-1)));
      each.setAttribute("aria-selected", own && this.isChosen?.(own) ? "true" : "false");
    }
  }

  handleKey(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.rowHeight) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.total, End: this.total };
    if (event.key === "Enter" || event.key === " ") this.take(this.current);
    else if (event.key in steps) {
      this.current = Math.max(0, Math.min(this.total - 1, this.current + steps[event.key]));
      const top = this.current * this.rowHeight;
      const height = this.element.clientHeight;
      if (top < this.element.scrollTop) this.element.scrollTop = top;
      else if (top + this.rowHeight > this.element.scrollTop + height)
        this.element.scrollTop = top + this.rowHeight - height;
      this.draw();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  mark() {
    for (const each of this.sizer.children) each.classList?.toggle("current", each.id === `${this.id}-${this.current}`);
    if (this.total) this.element.setAttribute("aria-activedescendant", `${this.id}-${this.current}`);
    else this.element.removeAttribute("aria-activedescendant");
  }
}
