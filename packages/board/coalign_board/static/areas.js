// Shares on top of each other over the steps, as an SVG that is as wide as there is room.
import { fill, h } from "./board.js";

const WIDTH = 1000; // of the drawing, which is stretched
const THINNEST = 0.06; // share from which on a band has its name written into it

/** Make an SVG element, as h makes one of HTML. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/**
 * A stack of bands. `point(place)` is called with the place of a step under the pointer, or that the arrow keys have
 * reached, and with null when there is none.
 */
export class StackedAreas {
  constructor(label, point) {
    this.point = point;
    this.current = null;
    this.picture = svg("svg", { preserveAspectRatio: "none", "aria-hidden": "true" });
    this.names = h("div", { class: "area-names", "aria-hidden": "true" });
    this.cursor = h("div", { class: "area-cursor", hidden: true });
    this.steps = [];
    this.element = h(
      "div",
      {
        class: "areas",
        tabindex: "0",
        role: "img",
        "aria-label": label,
        onpointermove: (event) => this.move(this.findPlace(event.offsetX / this.element.clientWidth)),
        onpointerleave: () => this.move(null),
        onblur: () => this.move(null),
        onkeydown: (event) => this.handleKey(event),
      },
      this.picture,
      this.names,
      this.cursor,
    );
  }

  /** Draw bands, the first at the bottom: [{label, values, colour (a number)}], with values in shares of `top`. */
  draw(steps, bands, top = 1) {
    this.steps = steps;
    const first = steps[0] ?? 0;
    const reach = Math.max(1e-9, (steps.at(-1) ?? 0) - first);
    const x = (place) => (steps.length > 1 ? (WIDTH * (steps[place] - first)) / reach : place * WIDTH);
    // One step alone is drawn as a band of the whole width.
    const places = steps.length === 1 ? [0, 0] : steps.map((_, place) => place);
    const left = (place, number) => (steps.length === 1 ? number * WIDTH : x(place));
    let floor = steps.map(() => 0);
    const shapes = [];
    const names = [];
    for (const { label, values, colour } of bands) {
      const roof = floor.map((low, place) => low + (values[place] ?? 0) / top);
      const up = places.map((place, number) => `${left(place, number).toFixed(1)},${(1 - roof[place]).toFixed(5)}`);
      const down = places.map((place, number) => `${left(place, number).toFixed(1)},${(1 - floor[place]).toFixed(5)}`).reverse();
      shapes.push(svg("polygon", { points: [...up, ...down].join(" "), class: `area area-${colour}` }));
      const [low, high] = [floor.at(-1) ?? 0, roof.at(-1) ?? 0];
      if (high - low >= THINNEST) names.push(h("span", { style: { top: `${100 * (1 - (low + high) / 2)}%` } }, label));
      floor = roof;
    }
    this.picture.setAttribute("viewBox", `0 0 ${WIDTH} 1`);
    fill(this.picture, shapes);
    fill(this.names, names);
    this.move(this.current);
  }

  findPlace(share) {
    const [first, last] = [this.steps[0], this.steps.at(-1)];
    const step = first + share * (last - first);
    let best = 0;
    this.steps.forEach((each, place) => Math.abs(each - step) < Math.abs(this.steps[best] - step) && (best = place));
    return this.steps.length ? best : null;
  }

  handleKey(event) {
    const last = this.steps.length - 1;
    const current = this.current ?? last;
    const place = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: last }[event.key];
    if (place === undefined || last < 0) return;
    event.preventDefault();
    this.move(Math.max(0, Math.min(last, place)));
  }

  move(place) {
    this.current = place !== null && place < this.steps.length ? place : null;
    this.cursor.hidden = this.current === null;
    if (this.current !== null) {
      const [first, last] = [this.steps[0], this.steps.at(-1)];
      this.cursor.style.left = `${(100 * (this.steps[place] - first)) / Math.max(1e-9, last - first)}%`;
    }
    this.point(this.current);
  }
}
