// Groups of samples: their names, and their rewards as mean and spread.
import { formatNumber, h } from "./board.js";
import { t } from "./i18n.js";

export const NO_GROUP = "none"; // in addresses

/** The name of a group: prompts of evaluations are numbered from -1 down. */
export function nameGroup(group) {
  if (group === null || group === undefined || group === NO_GROUP) return t("rollouts.no_group");
  const number = Number(group);
  return number < 0 ? t("rollouts.evaluation_prompt", { number: -number }) : t("rollouts.group", { group: number });
}

/** A mean with its standard deviation, and the range: "0.500 ± 0.500 (0 … 1)"; one number where all are the same. */
export function formatSpread(mean, std, range = null) {
  if (!std) return formatNumber(mean);
  const reach = range ? ` (${formatNumber(range[0])} … ${formatNumber(range[1])})` : "";
  return `${formatNumber(mean)} ± ${formatNumber(std)}${reach}`;
}

/** The components of a group's reward, {name: [mean, std]}, as a list of terms. */
export function makeComponents(rewards) {
  const entries = Object.entries(rewards ?? {});
  if (!entries.length) return null;
  return h(
    "dl",
    { class: "facts" },
    entries.map(([name, [mean, std]]) =>
      h("div", { title: t("rollouts.part_about", { name }) }, h("dt", {}, name), h("dd", {}, `${formatNumber(mean)} ± ${formatNumber(std)}`)),
    ),
  );
}
