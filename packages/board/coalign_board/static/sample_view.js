// One sample: its facts, images, turns, and its tokens in colours.
import { fill, formatNumber, h, keepSetting, markCode, readSetting } from "./board.js";
import { NO_GROUP, nameGroup } from "./groups.js";
import { t } from "./i18n.js";
import { colourValue, listLegend, makeScale, MEASURES } from "./token_colours.js";

/** Draw a sample, as the reader `sample` returns it, into `root`. `show(index, branch)` goes to another one of its group. */
export function drawSample(root, run, sample, state, show) {
  const place = sample.members.findIndex(([index, branch]) => index === sample.index && branch === (sample.branch ?? 0));
  const rows = sample.members.filter(([index]) => index === sample.index).length;
  const go = (by) => {
    const member = sample.members[place + by];
    return h("button", { type: "button", disabled: member === undefined, onclick: () => show(...member) }, t(by < 0 ? "rollouts.before" : "rollouts.after"));
  };
  fill(
    root,
    h(
      "div",
      { class: "sample-head" },
      h("h2", {}, t("rollouts.sample_of", { index: sample.index, group: nameGroup(sample.group), step: sample.step })),
      rows > 1 ? h("span", { class: "quiet" }, t("rollouts.row_of", { row: (sample.branch ?? 0) + 1, count: rows })) : null,
      h("span", { class: "quiet" }, t("rollouts.place", { place: place + 1, count: sample.members.length })),
      go(-1),
      go(1),
    ),
    makeFacts(sample),
    makeImages(run, sample),
    sample.messages?.length ? makeTurns(sample.messages) : makeTexts(sample),
    makeTokens(sample, state),
    Object.keys(sample.row ?? {}).length
      ? h("details", {}, h("summary", {}, t("rollouts.row")), h("pre", {}, JSON.stringify(sample.row, null, 1)))
      : null,
  );
}

function makeFacts(sample) {
  const facts = [
    [t("rollouts.reward"), formatNumber(sample.reward)],
    ...Object.entries(sample.rewards ?? {}).map(([name, value]) => [name, formatNumber(value)]),
    [t("rollouts.status"), t(`rollouts.status_${sample.status}`)],
    [t("rollouts.length"), t("rollouts.tokens", { count: sample.generated })],
    [
      t("rollouts.weight_version"),
      (sample.versions ?? []).map(([version, count]) => t("rollouts.written_by", { version, count })).join(", ") || "–",
    ],
  ];
  return h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function makeImages(run, sample) {
  if (!sample.images?.length) return null;
  const { step, phase, index, branch = 0 } = sample;
  const group = sample.group ?? NO_GROUP;
  return h(
    "div",
    { class: "thumbnails" },
    sample.images.map((path, image) => {
      const address = run.url("image", { step, phase, group, index, branch, image });
      const name = path.split("/").at(-1);
      const picture = h("img", { src: address, alt: t("rollouts.image", { name }), loading: "lazy" });
      picture.addEventListener("error", () => picture.replaceWith(h("span", { class: "quiet" }, t("rollouts.no_image", { name }))));
      return h("a", { href: address, target: "_blank", rel: "noopener" }, picture);
    }),
  );
}

function makeTexts(sample) {
  return h(
    "div",
    { class: "turns" },
    makeTurn("prompt", t("rollouts.prompt"), sample.prompt),
    makeTurn("assistant", t("rollouts.response"), sample.response),
  );
}

function makeTurns(messages) {
  let number = 0;
  return h(
    "div",
    { class: "turns" },
    messages.map((message) => {
      const name = message.role === "assistant" ? t("rollouts.turn", { number: ++number }) : [message.role, message.name].filter(Boolean).join(" · ");
      const content = typeof message.content === "string" ? message.content : message.content ? JSON.stringify(message.content, null, 1) : "";
      return makeTurn(message.role, name, content, message.reasoning_content, message.tool_calls);
    }),
  );
}

function makeTurn(role, name, text, reasoning = null, calls = null) {
  return h(
    "section",
    { class: `turn turn-${role}` },
    h("h3", {}, name),
    reasoning ? h("details", {}, h("summary", {}, t("rollouts.reasoning")), h("div", { class: "text" }, reasoning)) : null,
    text ? h("div", { class: "text" }, text) : null,
    (calls ?? []).map((call) => {
      const made = call.function ?? call;
      const given = typeof made.arguments === "string" ? made.arguments : JSON.stringify(made.arguments);
      return h("div", { class: "tool-call" }, h("span", { "aria-hidden": "true" }, "⚙ "), h("b", {}, made.name), h("code", {}, given));
    }),
  );
}

// ---- tokens ----------------------------------------------------------------------------------------------------------

function makeTokens(sample, state) {
  const tokens = sample.tokens;
  if (!tokens) return h("p", { class: "quiet" }, markCode(t("rollouts.no_tokens", { step: sample.step })));
  const choices = Object.keys(MEASURES).filter((name) => tokens.measures[name]);
  const asked = state.get("colour") ?? readSetting("token_colour", choices[0]);
  let chosen = choices.includes(asked) ? asked : choices[0];
  let current = Math.min(tokens.prompt_length, tokens.ids.length - 1);
  const spans = tokens.texts.map((text, place) =>
    h("span", { class: place < tokens.prompt_length ? "token prompt" : "token", "data-place": place }, showText(text)),
  );
  const legend = h("div", { class: "legend" });
  const values = h("dl", { class: "facts token-values" });
  const spoken = h("p", { class: "unseen", "aria-live": "polite" });
  const tip = h("div", { class: "tip", hidden: true });
  const text = h(
    "div",
    {
      class: "tokens",
      tabindex: "0",
      role: "application",
      "aria-label": t("rollouts.tokens_label"),
      onmouseover: (event) => point(event),
      onmouseleave: () => (tip.hidden = true),
      onclick: (event) => event.target.dataset.place && move(Number(event.target.dataset.place)),
      onkeydown: (event) => handleKey(event),
    },
    spans,
  );

  function draw() {
    const scale = makeScale(chosen, tokens.measures[chosen]);
    spans.forEach((span, place) => {
      const { background, sign } = colourValue(scale, tokens.measures[chosen][place]);
      span.style.backgroundColor = background;
      span.classList.toggle("up", sign === "up");
      span.classList.toggle("down", sign === "down");
    });
    fill(
      legend,
      h("span", {}, t(`rollouts.about_${chosen}`)),
      listLegend(scale, t).map(({ text, background, sign }) => h("span", { class: `token ${sign}`, style: { backgroundColor: background } }, text)),
    );
  }

  function describe(place) {
    return choices.map((name) => [t(`rollouts.${name}`), formatValue(name, tokens.measures[name][place])]);
  }

  function move(place, speak = true) {
    spans[current]?.classList.remove("current");
    current = Math.max(0, Math.min(spans.length - 1, place));
    spans[current]?.classList.add("current");
    const about = [
      [t("rollouts.token"), `${current + 1} / ${spans.length} · ${JSON.stringify(tokens.texts[current])} · ${tokens.ids[current]}`],
      ...describe(current),
    ];
    fill(values, about.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    if (speak) spoken.textContent = `${tokens.texts[current]}: ${t(`rollouts.${chosen}`)} ${formatValue(chosen, tokens.measures[chosen][current])}`;
  }

  function point(event) {
    const place = event.target.dataset?.place;
    tip.hidden = place === undefined;
    if (place === undefined) return;
    fill(tip, h("b", {}, JSON.stringify(tokens.texts[place])), describe(Number(place)).map(([name, value]) => h("div", {}, `${name}: ${value}`)));
    const box = event.target.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - 260))}px`;
    tip.style.top = box.bottom + 180 > innerHeight ? `${box.top - tip.offsetHeight - 6}px` : `${box.bottom + 6}px`;
  }

  function handleKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -spans.length, End: spans.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    move(current + steps[event.key]);
    spans[current]?.scrollIntoView({ block: "nearest" });
  }

  const select = h(
    "select",
    {
      onchange: () => {
        chosen = select.value;
        keepSetting("token_colour", chosen);
        state.set({ colour: chosen });
        draw();
        move(current);
      },
    },
    choices.map((name) => h("option", { value: name, selected: name === chosen }, t(`rollouts.${name}`))),
  );
  if (choices.length) draw();
  move(current, false);
  return h(
    "section",
    { class: "token-view" },
    h("h3", {}, t("rollouts.tokens_title")),
    choices.length ? h("label", {}, t("rollouts.colour_by"), " ", select) : null,
    choices.length ? legend : null,
    h("p", { class: "quiet" }, t("rollouts.token_keys")),
    text,
    values,
    spoken,
    tip,
  );
}

function formatValue(name, value) {
  if (value === null || value === undefined) return "–";
  if (name === "loss_mask") return t(value ? "rollouts.mask_on" : "rollouts.mask_off");
  if (name === "weight_version") return value < 0 ? t("rollouts.not_generated") : String(value);
  return formatNumber(value);
}

/** The text of a token, with signs for what cannot be seen. */
function showText(text) {
  if (text === "") return "∅";
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}
