// A name that says what it means where it is pointed at, or reached by Tab.
import { h, markCode } from "./board.js";

let count = 0;

/** A name with its meaning below it while it is pointed at or has the focus; Escape hides it. */
export function makeExplained(name, meaning) {
  const id = `meaning-${++count}`;
  const text = h("span", { class: "meaning", role: "tooltip", id, hidden: true }, markCode(meaning));
  const show = () => (text.hidden = false);
  const hide = () => (text.hidden = true);
  const button = h(
    "button",
    {
      type: "button",
      class: "name link",
      "aria-describedby": id,
      onclick: show,
      onfocus: show,
      onblur: hide,
      onkeydown: (event) => event.key === "Escape" && hide(),
    },
    name,
  );
  return h("span", { class: "explained", onpointerenter: show, onpointerleave: hide }, button, text);
}
