"""The metrics of a step as the few short texts that stand in its line. Nothing here prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

# label, names of the metric (the first one there is), whether it gets an arrow
_FIELDS = (
    ("reward", ("reward/mean",), True),
    ("loss", ("loss/value",), False),
    ("kl", ("loss/kl_ref", "kl_per_token", "kl"), False),
    ("entropy", ("loss/entropy",), False),
    ("len", ("tokens/response",), False),
    ("eval", ("eval/mean", "eval/loss/value"), True),
)
# label -> the calls whose seconds it sums
_PHASES = {"gen": ".generate", "score": ".forward_step", "train": ".train_step"}


def number(value: float) -> str:
    """A number in a few characters: 0.412, 1,234, 2.1e-06, 12; an int is a count and has no decimals."""
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


def step_fields(metrics: Mapping[str, float], usual: Mapping[str, float]) -> list[str]:
    """`reward 0.412 ▲`, `loss -0.013`, …: those that this step has; arrows compare with ``usual``."""
    fields = []
    for label, names, arrow in _FIELDS:
        name = next((name for name in names if name in metrics), None)
        if name is None:
            continue
        value = metrics[name]
        change = value - usual.get(name, value)
        fields.append(f"{label} {number(value)}" + (_arrow(change) if arrow else ""))
    if metrics.get("samples/dropped"):
        fields.append(f"dropped {metrics['samples/dropped']:.0f}")
    rate = metrics.get("throughput/generated", metrics.get("throughput/trained"))
    if rate is not None:
        fields.append(f"{rate:,.0f} tok/s")
    return fields


def step_seconds(metrics: Mapping[str, float]) -> str:
    """`5.6s (gen 2.1 score 0.4 train 2.9 sync 0.0)`: seconds of the step and of its phases, which may overlap."""
    total = metrics.get("time/step", metrics.get("time/eval"))
    if total is None:
        return ""
    phases = phase_seconds(metrics) if "time/step" in metrics else {}
    split = " ".join(f"{label} {seconds:.1f}" for label, seconds in phases.items())
    return f"{total:.1f}s" + (f" ({split})" if split else "")


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase that the step had: generate, score, train, weight sync, evaluation."""
    seconds = {
        label: sum(value for name, value in metrics.items() if name.startswith("time/") and name.endswith(call))
        for label, call in _PHASES.items()
        if any(name.startswith("time/") and name.endswith(call) for name in metrics)
    }
    return seconds | {label: metrics[f"time/{label}"] for label in ("sync", "eval") if f"time/{label}" in metrics}


def step_idle(metrics: Mapping[str, float]) -> str:
    """`idle policy 36% trainer 52%`: the share of the step in which the models that generate or learn did not."""
    shares = [f"{name} {share:.0%}" for name, share in _idle(metrics).items()]
    return f"idle {' '.join(shares)}" if shares else ""


class RunTotals:
    """What all steps of a run took together."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._phases: Counter[str] = Counter()
        self._idle: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float]) -> None:
        """The metrics of a step; those of an evaluation alone do not count."""
        seconds = metrics.get("time/step")
        if seconds is None:
            return
        self._seconds += seconds
        self._phases.update(phase_seconds(metrics))
        self._idle.update({name: share * seconds for name, share in _idle(metrics).items()})
        rates = {what: metrics.get(f"throughput/{what}") for what in ("generated", "trained")}
        self._tokens.update({what: rate * seconds for what, rate in rates.items() if rate})

    def rows(self) -> dict[str, str]:
        """`shares of time`, `idle` and `tokens/s`, each in words; without steps, none."""
        if not self._seconds:
            return {}
        of_time = lambda seconds: f"{seconds / self._seconds:.0%}"  # noqa: E731
        rows = {
            "shares of time": " ".join(f"{name} {of_time(seconds)}" for name, seconds in self._phases.items()),
            "idle": " ".join(f"{name} {of_time(seconds)}" for name, seconds in self._idle.items()),
            "tokens/s": " ".join(f"{what} {number(n / self._seconds)}" for what, n in self._tokens.items()),
        }
        return {name: text for name, text in rows.items() if text}


def _idle(metrics: Mapping[str, float]) -> dict[str, float]:
    names = [name.removeprefix("idle/") for name in metrics if name.startswith("idle/")]
    calls = (_PHASES["gen"], _PHASES["train"])
    return {name: metrics[f"idle/{name}"] for name in names if any(f"time/{name}{call}" in metrics for call in calls)}


def _arrow(change: float) -> str:
    if not change or not math.isfinite(change):
        return ""
    return " ▲" if change > 0 else " ▼"
