"""The page that `coalign plan` prints: the configured layout, the best ones that were found, and why others lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coalign.config.yaml_reader import emit_inline
from coalign_plan.gpus import ClusterSpec
from coalign_plan.layouts.adapter import PlannedRun
from coalign_plan.layouts.devices import DeviceLoad
from coalign_plan.layouts.search import LayoutSearch, Objective, PlannedLayout
from coalign_plan.memory import USABLE
from coalign_plan.prediction import StepPrediction

if TYPE_CHECKING:
    from coalign_plan.report.run_plan import ConfiguredLayout

WIDTH, BAR = 100, 30
GIB = 2**30
MAX_REASONS = 8  # why layouts were rejected
THE_RUN = "the run"  # refuses a layout, in place of a model
NAMES = {0: "synchronous", 1: "one step ahead"}


@dataclass(frozen=True)
class ProposedLayout:
    """A layout of the search that the run accepts, and the settings that lead to it.

    ``is_staler``: it needs a larger `runtime.max_staleness` than the configuration has.
    """

    layout: PlannedLayout
    lines: Mapping[str, Any]
    is_staler: bool = False


@dataclass(frozen=True)
class PlanPage:
    """Writes the parts of the page. ``price``: dollars of a GPU-hour, in place of the usual ones."""

    cluster: ClusterSpec
    price: float | None
    run: PlannedRun

    @property
    def dollars(self) -> float:
        return self.cluster.gpu.dollars_per_hour if self.price is None else self.price

    def show_configured(self, configured: ConfiguredLayout) -> str:
        """Write what the configured layout takes: seconds, memory, idleness, cost."""
        lines = [self._title(), ""]
        if configured.prediction is None and configured.problem:
            return "\n".join([*lines, *_fold(f"as configured: cannot be predicted: {configured.problem}"), ""])
        staleness = self.run.config.runtime.max_staleness
        prediction = configured.prediction
        if prediction is None:
            lines += ["as configured: the policy takes turns with its trainer, and max_staleness is not 0", ""]
        else:
            named = f" ({describe_staleness(staleness)})" if self.run.generates else ""
            lines += [_ruled(f"as configured{named}: {prediction.seconds:,.1f} s a step"), *self._timeline(prediction)]
            lines += ["", *self._figures(prediction)]
        lines += ["", *self._memory(configured.loads)]
        return "\n".join([*lines, *self._modes(configured), ""])

    def show_search(
        self,
        search: LayoutSearch,
        proposed: Sequence[ProposedLayout],
        configured: ConfiguredLayout,
        objective: Objective,
    ) -> str:
        """Write the best layouts with the lines to set, and why others were left out."""
        unit = "seconds a step" if objective == "seconds" else "GPU-hours a step"
        within_limit = [one for one in proposed if not one.is_staler]
        lines = [_ruled(f"best layouts by {unit}, of {search.predicted:,} predicted")]
        if not search.is_complete:
            lines.append("the search ended early; smaller divisions of the devices were not tried")
        if not within_limit:
            lines += ["none was found that fits", ""]
        for number, one in enumerate(within_limit, 1):
            lines += self._candidate(str(number), one, configured)
        staler = [one for one in proposed if one.is_staler]
        if staler:
            lines += ["", "with older samples (another algorithm: weights may be that many versions ahead)"]
            for one in staler:
                lines += self._candidate("+", one, configured)
        lines += ["", _ruled("why the others lose"), *self._losers(search, within_limit)]
        return "\n".join([*lines, ""])

    def list_facts(self, configured: ConfiguredLayout, proposed: Sequence[ProposedLayout]) -> dict[str, Any]:
        """Return the figures of the page as plain values: seconds of a step, bytes, GPU-hours, settings."""
        prediction = configured.prediction
        return {
            "cluster": str(self.cluster),
            "configured": None if prediction is None else self._list_figures(prediction),
            "problem": configured.problem,
            "memory": [
                {"slot": load.slot, "devices": load.count, "peak": load.peak, "turn": load.turn}
                for load in configured.loads
            ],
            "layouts": [
                {
                    "settings": dict(one.lines),
                    "max_staleness": one.layout.staleness,
                    "peak": round(one.layout.peak),
                    **self._list_figures(one.layout.prediction),
                }
                for one in proposed
            ],
        }

    def _list_figures(self, prediction: StepPrediction) -> dict[str, Any]:
        hours = prediction.seconds * self._count_devices(prediction) / 3600
        return {
            "seconds": prediction.seconds,
            "phases": prediction.phase_seconds(),
            "tokens_per_second": prediction.tokens_per_second,
            "mfu": prediction.mfu,
            "trainer_mfu": prediction.trainer_mfu,
            "idle": prediction.idle,
            "gpu_hours": hours,
            "dollars": hours * self.dollars,
        }

    # ---- the configured layout -------------------------------------------------------------------------------------

    def _title(self) -> str:
        run, runtime = self.run, self.run.config.runtime
        names: dict[str, list[str]] = {}
        for name, model in run.models.items():
            names.setdefault(f"{model.size.name} ({model.size.parameters / 1e9:,.1f}B)", []).append(name)
        models = "; ".join(f"{', '.join(owners)}: {size}" for size, owners in names.items())
        rows = (
            f"{runtime.tokens_per_step:,} tokens"
            if runtime.tokens_per_step
            else f"{runtime.prompts_per_step:,} prompts × {runtime.samples_per_prompt}"
            if run.generates
            else f"{runtime.prompts_per_step:,} rows"
        )
        told = (
            f"a step: {rows}; responses {run.lengths.mean:,.0f} tokens on average, {run.lengths.maximum:,.0f} at most"
        )
        if not run.generates:
            told = told.replace("responses", "of")
        lines = [f"{run.config.algorithm} on {self.cluster}", *_fold(models), told]
        if run.assumes:
            hint = "; --lengths says better" if any("average" in text for text in run.assumes) else ""
            lines += _fold("assumed: " + "; ".join(run.assumes) + hint)
        return "\n".join(lines)

    def _timeline(self, prediction: StepPrediction) -> list[str]:
        """Return a line for each phase, with a bar where it lies in the step."""
        lines = [f"  {'phase':<10}{'model':<24}{'GPUs':>6}{'seconds':>10}   0 {'step ':·>{BAR - 3}}"]
        for phase in prediction.phases:
            if phase.seconds < 0.0005 * prediction.seconds:
                continue
            start = min(BAR - 1, int(BAR * phase.start / prediction.seconds))
            stop = max(start + 1, min(BAR, round(BAR * phase.end / prediction.seconds)))
            bar = " " * start + "█" * (stop - start)
            devices = f"{phase.devices:,}" if phase.devices else ""
            lines.append(
                f"  {phase.name:<10}{phase.model[:23]:<24}{devices:>6}{phase.seconds:>10,.1f}   {bar}".rstrip()
            )
        return lines

    def _figures(self, prediction: StepPrediction) -> list[str]:
        devices = self._count_devices(prediction)
        per_gpu = prediction.tokens_per_second / devices
        hours = prediction.seconds * devices / 3600
        steps = self.run.config.runtime.steps
        lines = [
            f"  tokens/s      {prediction.tokens_per_second:,.0f} ({per_gpu:,.0f} a GPU)",
            f"  MFU           {prediction.mfu:.1%} of the whole step, {prediction.trainer_mfu:.1%} while training",
            f"  idle          {_describe_idle(prediction)}",
        ]
        if any(prediction.bubble.values()):
            lines.append("  bubbles       " + ", ".join(f"{n} {share:.0%}" for n, share in prediction.bubble.items()))
        if prediction.rollouts and prediction.rollouts.staleness:
            lines.append(f"  staleness     {prediction.rollouts.staleness:.1f} weight versions on average")
        cost = (
            f"  cost          {hours:,.2f} GPU-hours a step, ${hours * self.dollars:,.2f} at ${self.dollars:g} an hour"
        )
        if steps:
            total_hours = hours * steps
            days = prediction.seconds * steps / 86400
            cost += f"; {steps:,} steps: {days:,.1f} days, ${total_hours * self.dollars:,.0f}"
        return [*lines, cost]

    def _count_devices(self, prediction: StepPrediction) -> int:
        groups: dict[str, int] = {}
        for phase in prediction.phases:
            groups[phase.group] = max(groups.get(phase.group, 0), phase.devices)
        return max(1, sum(groups.values()))

    def _memory(self, loads: Sequence[DeviceLoad]) -> list[str]:
        """Return a table in GiB: for each device with other models, what they hold."""
        columns = ("weights", "gradients", "optimizer", "activations", "buffers", "KV cache")
        usable = USABLE * self.cluster.memory_bytes
        head = (
            f"  {'memory, GiB of a device':<26}" + "".join(f"{c:>{len(c) + 2}}" for c in columns) + f"{'its turn':>10}"
        )
        lines = [head]
        shown = set()
        for load in loads:
            if tuple(sorted(load.models)) in shown:
                continue  # another stage of the same models, which takes less
            shown.add(tuple(sorted(load.models)))
            for name, e in load.models.items():
                sizes = (e.weights, e.gradients, e.optimizer, e.activations, e.buffers, e.cache)
                cells = "".join(f"{size / GIB:>{len(c) + 2}.1f}" for c, size in zip(columns, sizes, strict=True))
                stage = f" (stage {load.stages[name]})" if load.stages[name] else ""
                lines.append(f"  {name + stage:<26}{cells}{e.total / GIB:>10.1f}")
            fits = "fits" if load.peak <= usable else "DOES NOT FIT"
            alike = f", {load.count:,} such devices" if load.count > 1 else ""
            lines.append(
                f"  → at most {load.peak / GIB:.1f} of {self.cluster.gpu.memory_gib:g} GiB, when {load.turn} computes"
                f"{alike}: {fits}"
            )
        return lines

    def _modes(self, configured: ConfiguredLayout) -> list[str]:
        if not self.run.generates:
            return []
        shown = [
            f"{describe_staleness(staleness)} {prediction.seconds:,.1f} s"
            for staleness, prediction in sorted(configured.predictions.items())
        ]
        if len(shown) == 1:
            shown.append("one step ahead and asynchronous: not while policy and trainer share devices")
        return ["", *_fold("the same layout: " + " · ".join(shown))]

    # ---- what was found --------------------------------------------------------------------------------------------

    def _candidate(self, mark: str, one: ProposedLayout, configured: ConfiguredLayout) -> list[str]:
        layout, prediction = one.layout, one.layout.prediction
        change = ""
        if configured.prediction:
            change = f" ({prediction.seconds / configured.prediction.seconds - 1:+.0%})"
        named = f", {describe_staleness(layout.staleness)}" if self.run.generates else ""
        figures = [
            f"MFU {prediction.mfu:.1%}",
            f"idle {_describe_idle(prediction)}",
            f"{layout.peak / GIB:.0f} of {self.cluster.gpu.memory_gib:g} GiB",
            f"${layout.gpu_hours * self.dollars:,.2f} a step",
        ]
        lines = _fold(
            f"{prediction.seconds:,.1f} s{change}  {layout.division.describe()}{named}", f"{mark:>2}  ", "    "
        )
        lines += _fold(" · ".join(figures), "    ", "    ")
        return ["", *lines, *(f"      {line}" for line in format_settings(one.lines))]

    def _losers(self, search: LayoutSearch, proposed: Sequence[ProposedLayout]) -> list[str]:
        lines = []
        memory = self.cluster.gpu.memory_gib
        for (model, reason), count in search.rejected.counts.most_common():
            if reason == "memory":
                needed, free, settings = search.rejected.smallest[model]
                lines.append(
                    f"{model}: {count:,} layouts do not fit; the nearest, {_describe_cut(settings)}, needs "
                    f"{needed / GIB:,.0f} GiB of the {free / GIB:,.0f} that it has of {memory:g}"
                )
        chosen = {one.layout.division for one in proposed}
        best = proposed[0].layout.prediction.seconds if proposed else 0.0
        seen: set[int] = set()
        for layout in search.layouts:
            groups = len(layout.division.groups)
            if layout.division in chosen or layout.staleness or groups in seen:
                continue
            seen.add(groups)
            lines.append(
                f"{layout.division.describe()}: {layout.prediction.seconds:,.1f} s{self._bottleneck(layout, best)}"
            )
        if self.cluster.nodes > 1:
            gpus = self.cluster.gpus_per_node
            lines.append(
                f"tensor_parallel above {gpus}, and engines on more than {gpus} GPUs: would cross nodes, so refused"
            )
        refusals = [(model, reason) for (model, reason) in search.rejected.counts if reason != "memory"]
        for model, reason in sorted(refusals, key=lambda refusal: refusal[0] != THE_RUN)[:MAX_REASONS]:
            lines.append(reason if reason.startswith("models.") or model == THE_RUN else f"{model}: {reason}")
        return [folded for line in lines for folded in _fold(line, "- ", "  ")] or ["- there are no others"]

    def _bottleneck(self, layout: PlannedLayout, best: float) -> str:
        prediction = layout.prediction
        idle = {group: share for group, share in prediction.idle.items() if share > 0.3}
        slower = f" ({prediction.seconds / best - 1:+.0%})" if best else ""
        if len(prediction.idle) < 2 or not idle:
            seconds = prediction.phase_seconds()
            longest = max(seconds, key=lambda name: seconds[name])
            return f"{slower}; {longest} takes {seconds[longest] / prediction.seconds:.0%} of it"
        busiest = min(prediction.idle, key=lambda group: prediction.idle[group])
        waiting = ", ".join(f"{group} idle {share:.0%}" for group, share in idle.items() if group != busiest)
        return f"{slower}; {busiest} is the bottleneck: {waiting or 'all wait for each other'}"


def describe_staleness(staleness: int) -> str:
    """Return the word for a value of `runtime.max_staleness`."""
    return NAMES.get(staleness, f"asynchronous, {staleness} versions")


def _describe_idle(prediction: StepPrediction) -> str:
    if len(prediction.idle) == 1:
        return f"{next(iter(prediction.idle.values())):.0%}"
    return ", ".join(f"{group} {share:.0%}" for group, share in prediction.idle.items())


def format_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as lines of YAML: a line for each key of `runtime`, and one for each model."""
    if not settings:
        return ["nothing to change"]
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        inner = nested
        *path, last = key.split(".")
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    lines = []
    for section, values in nested.items():
        lines.append(f"{section}:")
        for key, value in values.items():
            lines.append(f"  {key}: {emit_inline(value)}")
    return lines


def _describe_cut(settings: Mapping[str, Any]) -> str:
    """Return a layout in the short words of the field: `TP 8 × PP 2, full recomputation`."""
    short = {"tensor_parallel": "TP", "pipeline_parallel": "PP", "context_parallel": "CP", "expert_parallel": "EP"}
    cuts = [f"{word} {settings[key]}" for key, word in short.items() if settings.get(key, 1) > 1]
    text = f"{' × '.join(cuts) or 'uncut'} on {settings['num_gpu']:,} GPUs"
    if recomputation := settings.get("activation_checkpointing"):
        text += f", {recomputation} recomputation"
    return text


def _ruled(title: str) -> str:
    return f"── {title} " + "─" * max(0, WIDTH - len(title) - 4)


def _fold(text: str, first: str = "", rest: str = "  ") -> list[str]:
    """Break a text into lines of the page's width."""
    import textwrap

    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)
