"""Formats the metrics of a step as the short texts of its line on the screen. Nothing here prints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

# label, names of the metric (the first one that is reported counts), decimals, whether it gets an arrow
_FIELDS = (
    ("reward", ("reward/mean",), 3, True),
    ("loss", ("loss/value",), 3, False),
    ("acc", ("loss/accuracy",), 3, True),
    ("kl", ("loss/kl_ref", "kl_per_token", "kl"), 4, False),
    ("entropy", ("loss/entropy",), 3, False),
    ("len", ("tokens/response",), 0, False),
    ("eval", ("eval/mean", "eval/loss/value"), 3, True),
    ("eval acc", ("eval/loss/accuracy",), 3, True),
)
_UP, _DOWN = " ▲", " ▼"
ROLLOUTS, ROWS = "waiting for rollouts", "reading data"  # the wait of a loop with and without rollouts
_WAITS = ("rollout", "train", "sync")  # `time/…`: consecutive waits of the loop
# names of the shares `goodput/…` in a sentence
_LOSSES = {
    "sync": "weight sync",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "hooks": "logging and hooks",
    "start": "start-up",
    "restart": "starting processes again",
    "redone": "steps refused or done again",
}
_DROPPED = {
    "by the filter": "tokens_dropped/filter",
    "expired as too old": "tokens_dropped/expired",
    "given up": "tokens_dropped/given_up",
    "cut": "tokens_dropped/cut",
}
_FIELD = re.compile(r"([^-+\d]*)([-+\d.,e]*|nan|inf)(.*)")  # `reward `, `0.412`, ` ▲`
# label -> the method whose seconds it sums over all models
_PHASES = {"gen": ".generate", "score": ".forward_step", "train": ".train_step"}


def format_number(value: float) -> str:
    """Return a number in a few characters: 0.412, 1,234, 2.1e-06, 12. An int is a count and has no decimals."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100 or (value == int(value) and size >= 10):
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if 0 < size < 1e-4:
        return f"{value:.1e}"
    return f"{value:.4f}" if 0 < size < 0.01 else f"{value:.3f}"


def _format_fixed(value: float, decimals: int) -> str:
    """Return a number with so many decimals, unless it is so small that they would hide it, or not finite."""
    if not math.isfinite(value) or 0 < abs(value) < 0.5 * 10**-decimals or abs(value) >= 1e6:
        return format_number(value)
    return f"{value:,.{decimals}f}"


def format_metric(metrics: Mapping[str, float], name: str, decimals: int | None = None) -> str:
    """Return a metric as `0.412`; a mean that leaves out samples without a reward as `0.412 (99 of 500)`."""
    text = format_number(metrics[name]) if decimals is None else _format_fixed(metrics[name], decimals)
    prefix, _, last = name.rpartition("/")
    if last.partition("@")[0] != "mean":
        return text
    samples = "samples" if prefix == "reward" else f"{prefix}/samples" if prefix else ""
    names = (f"{samples}/count", f"{samples}/dropped") if samples else ("scored", "unscored")
    count, missing = (metrics.get(name, 0.0) for name in names)
    return f"{text} ({count:.0f} of {count + missing:.0f})" if missing else text


def list_step_fields(metrics: Mapping[str, float], smoothed: Mapping[str, float]) -> list[str]:
    """Return the texts of a step's line, from left to right. Arrows compare with ``smoothed``."""
    fields = format_fields(metrics, smoothed)
    return list(filter(None, (*fields, format_seconds(metrics), format_goodput(metrics), format_idle(metrics))))


class StepColumns:
    """Aligns the fields of one line with those of the lines before it: each value ends where the widest one did."""

    def __init__(self) -> None:
        self._widths: dict[tuple[str, str], tuple[int, int]] = {}  # field -> widths of its number and of its rest

    def align(self, fields: Sequence[str]) -> list[str]:
        """Return the fields, padded inside and behind: `loss  0.013` below `loss -0.013`."""
        return [self._pad(*match.groups()) for field in fields if (match := _FIELD.fullmatch(field))]

    def _pad(self, label: str, number: str, rest: str) -> str:
        key = label, rest.partition("(")[0].strip(_UP + _DOWN) if not label else ""  # ` tok/s` has no label before it
        widths = self._widths.get(key, (0, 0))
        number_width, rest_width = self._widths[key] = max(len(number), widths[0]), max(len(rest), widths[1])
        return f"{label}{number:>{number_width}}{rest:<{rest_width}}"


def fit(fields: Sequence[str], width: int, separator: int) -> list[str]:
    """Return the first of the fields, those that fit into ``width`` characters with as many separating each two."""
    kept, used = [], 0
    for field in fields:
        used += separator + len(field)
        if used > width:
            break
        kept.append(field)
    return kept


def smooth_metrics(smoothed: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Add the metrics of a step to the moving averages with which the next one is compared."""
    for name, value in metrics.items():
        smoothed[name] = 0.8 * smoothed.get(name, value) + 0.2 * value


def format_fields(metrics: Mapping[str, float], smoothed: Mapping[str, float]) -> list[str]:
    """Return `reward 0.412 ▲`, `loss -0.013`, …: those that this step has. Arrows compare with ``smoothed``."""
    fields = []
    for label, names, decimals, has_arrow in _FIELDS:
        name = next((name for name in names if name in metrics), None)
        if name is None:
            continue
        value = metrics[name]
        change = value - smoothed.get(name, value)
        arrow = (_UP if change > 0 else _DOWN) if has_arrow and change and math.isfinite(change) else ""
        fields.append(f"{label} {format_metric(metrics, name, decimals)}{arrow}")
    if metrics.get("loss/skipped_updates"):
        fields.append(f"skipped {metrics['loss/skipped_updates']:.0f}")
    if metrics.get("samples/dropped"):
        fields.append(f"dropped {metrics['samples/dropped']:.0f}")
    rate = metrics.get("throughput/generated", metrics.get("throughput/trained"))
    if rate is not None:
        fields.append(f"{rate:,.0f} tok/s")
    return fields


def format_seconds(metrics: Mapping[str, float]) -> str:
    """Return `5.6s (gen 2.1 score 0.4 train 2.9 sync 0.0)`: seconds of the step and of its phases, which may overlap.

    The seconds of an evaluation stand alone. Empty if neither was timed.
    """
    total = metrics.get("time/step", metrics.get("time/eval"))
    if total is None:
        return ""
    phases = _sum_phase_seconds(metrics) if "time/step" in metrics else {}
    split = " ".join(f"{label} {seconds:.1f}" for label, seconds in phases.items())
    return f"{total:.1f}s" + (f" ({split})" if split else "")


def _sum_phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase that the step had: generate, score, train, weight sync, evaluation."""
    seconds: dict[str, float] = {}
    for label, method in _PHASES.items():
        calls = [value for name, value in metrics.items() if name.startswith("time/") and name.endswith(method)]
        if calls:
            seconds[label] = sum(calls)
    return seconds | {label: metrics[f"time/{label}"] for label in ("sync", "eval") if f"time/{label}" in metrics}


def split_step_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each wait of the loop in a step, and `other`; they add up to those of the step.

    `rollout` is the wait for a batch: with overlapping steps, only the time that the trainer waited.
    """
    seconds = {label: metrics[f"time/{label}"] for label in _WAITS if f"time/{label}" in metrics}
    return seconds | {"other": max(0.0, metrics["time/step"] - sum(seconds.values()))} if seconds else {}


def format_idle(metrics: Mapping[str, float]) -> str:
    """Return `idle policy 36% trainer 52%`: idle shares of the step, of models that generate or train."""
    shares = [f"{name} {share:.0%}" for name, share in _select_idle(metrics).items()]
    return f"idle {' '.join(shares)}" if shares else ""


def format_goodput(metrics: Mapping[str, float]) -> str:
    """Return `goodput 61%`: the share of the run's time so far that went into tokens trained on."""
    return f"goodput {metrics['goodput/trained']:.0%}" if "goodput/trained" in metrics else ""


def describe_goodput(metrics: Mapping[str, float], waiting: str = ROLLOUTS) -> list[str]:
    """Describe in a few sentences the use of a run's time and of its generated tokens; none without these metrics.

    ``waiting`` says what the loop waited for before it trained.
    """
    if "goodput/trained" not in metrics:
        return []
    prefix = "goodput/"
    shares = {name.removeprefix(prefix): share for name, share in metrics.items() if name.startswith(prefix)}
    percents = _round_shares(shares)
    rest = {name: percent for name, percent in percents.items() if name != "trained" and percent}
    causes = {"rollout": waiting, **_LOSSES}
    lost = ", ".join(f"{causes[name]} {percent}%" for name, percent in sorted(rest.items(), key=lambda pair: -pair[1]))
    wall_time = timedelta(seconds=round(metrics["time/run"]))
    lines = [f"goodput: {percents['trained']}% of {wall_time} went into tokens that were trained on"]
    if lost:
        lines.append(f"the rest of the time: {lost}")
    dropped = {
        label: metrics[name] for label, name in _DROPPED.items() if metrics.get(name, 0.0) >= 0.0005
    }  # 0.0 % says nothing
    if dropped:
        causes = ", ".join(f"{label} {share:.1%}" for label, share in dropped.items())
        lines.append(f"of the generated tokens {sum(dropped.values()):.1%} were dropped: {causes}")
    return lines


class RunTotals:
    """Sums up the time and the tokens of all steps of a run."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._phases: Counter[str] = Counter()
        self._idle: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; those of an evaluation alone do not count."""
        seconds = metrics.get("time/step")
        if seconds is None:
            return
        self._seconds += seconds
        self._phases.update({label: n for label, n in _sum_phase_seconds(metrics).items() if label in _PHASES})
        self._idle.update({name: share * seconds for name, share in _select_idle(metrics).items()})
        rates = {what: metrics.get(f"throughput/{what}") for what in ("generated", "trained")}
        self._tokens.update({what: rate * seconds for what, rate in rates.items() if rate})

    def rows(self) -> dict[str, str]:
        """Return `calls`, `idle` and `tokens/s` as text; empty without steps. Shares of calls may overlap."""
        if not self._seconds:
            return {}
        share = lambda seconds: f"{seconds / self._seconds:.0%}"  # noqa: E731
        rows = {
            "calls, which may overlap": " ".join(f"{name} {share(seconds)}" for name, seconds in self._phases.items()),
            "idle": " ".join(f"{name} {share(seconds)}" for name, seconds in self._idle.items()),
            "tokens/s": " ".join(f"{what} {format_number(n / self._seconds)}" for what, n in self._tokens.items()),
        }
        return {name: text for name, text in rows.items() if text}


def _round_shares(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return whole percentages that add up to 100: the largest remainders are rounded up."""
    total = sum(seconds.values()) or 1.0
    exact = {name: 100 * amount / total for name, amount in seconds.items()}
    shares = {name: int(amount) for name, amount in exact.items()}
    for name in sorted(exact, key=lambda name: shares[name] - exact[name])[: 100 - sum(shares.values())]:
        shares[name] += 1
    return shares


def _select_idle(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the idle shares of the models that generate or train."""
    names = [name.removeprefix("idle/") for name in metrics if name.startswith("idle/")]
    calls = (_PHASES["gen"], _PHASES["train"])
    return {name: metrics[f"idle/{name}"] for name in names if any(f"time/{name}{call}" in metrics for call in calls)}
