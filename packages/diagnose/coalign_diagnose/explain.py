"""`coalign explain`: say what became of a run's groups of samples. run_history.py reads the journal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from coalign.engine.hooks.run_folder import JOURNAL
from coalign.engine.rollouts.journal import read_lines
from coalign.types import Status
from coalign_diagnose.run_history import GroupLife, RunHistory, format_time, list_runs

_NEAREST = 4  # groups or steps that are named where the wanted one does not exist
_LINES_NAMED = 8


def explain(run: Path, group: int | None = None, step: int | None = None, as_json: bool = False) -> str:
    """Return what a run's journal says of the run, of a ``group``, or of a ``step``: text, or JSON.

    Raises FileNotFoundError without a folder or a journal, and ValueError for a journal that cannot be read, or has no
    such group or step.
    """
    if group is not None and step is not None:
        raise ValueError("give --group or --step, not both")
    history = _read_history(run)
    if group is not None:
        content, text = _explain_group(run, history, group)
    elif step is not None:
        content, text = _explain_step(run, history, step)
    else:
        content = _summarise(history)
        text = _format_summary(run, content)
    if as_json:
        return json.dumps(content | {"damaged_lines": history.damaged}, ensure_ascii=False)
    return "\n".join([*_describe_damage(history), *text])


def _read_history(run: Path) -> RunHistory:
    path = run / JOURNAL
    if not run.is_dir():
        raise FileNotFoundError(f"there is no run folder {run}")
    if not path.is_file():
        raise FileNotFoundError(f"{run} has no {JOURNAL}: it is no run with rollouts, or `runtime.journal` is off")
    history = RunHistory(read_lines(path))
    if not history.groups and not history.steps and history.damaged:
        raise ValueError(f"{path}: {_count(len(history.damaged), 'line')}, and none can be read")
    return history


def _describe_damage(history: RunHistory) -> list[str]:
    if not (damaged := history.damaged):
        return []
    named = ", ".join(map(str, damaged[:_LINES_NAMED])) + (", …" if len(damaged) > _LINES_NAMED else "")
    return [f"{_count(len(damaged), 'damaged line')} left out, with what they said: {named}"]


def _summarise(history: RunHistory) -> dict[str, Any]:
    lives = history.groups.values()
    ages = [age for life in lives if life.state == "trained" for age in life.ages]
    tokens = sum(count for count, _ in ages)
    seconds = {
        life.group: life.trained_at - life.drawn_at
        for life in lives
        if life.state == "trained" and life.trained_at is not None and life.drawn_at is not None
    }
    slowest = max(seconds, key=lambda group: seconds[group], default=None)
    return {
        "steps": max((step.step for step in history.steps.values() if step.trained_at is not None), default=0),
        "ended": history.ended,
        "drawn": len(lives),
        "trained": sum(life.state == "trained" for life in lives),
        "waiting": sum(life.state == "waiting" for life in lives),
        "dropped": dict(Counter(life.dropped for life in lives if life.dropped)),
        "seconds_median": median(seconds.values()) if seconds else None,
        "seconds_longest": seconds[slowest] if slowest is not None else None,
        "longest_group": slowest,
        "staleness_mean": sum(count * age for count, age in ages) / tokens if tokens else None,
        "staleness_max": max((age for _, age in ages), default=None),
        "restarts": history.restarts,
        "processes_restarted": history.processes,
        "steps_discarded": len(history.former_steps),
        "groups_drawn_again": len({life.group for life in history.former_groups}),
    }


def _format_summary(run: Path, summary: dict[str, Any]) -> list[str]:
    dropped = summary["dropped"]
    causes = ", ".join(f"{cause} {count}" for cause, count in sorted(dropped.items()))
    rows = {
        "run": f"{run}: {summary['ended'] or _count(summary['steps'], 'step') + ', and the loop has not ended'}",
        "groups": f"{summary['drawn']} drawn = {summary['trained']} trained + {sum(dropped.values())} dropped "
        f"+ {summary['waiting']} waiting",
        "dropped": causes or "none",
    }
    if summary["seconds_median"] is not None:
        rows["drawn to trained"] = (
            f"median {format_time(summary['seconds_median'])}, longest {format_time(summary['seconds_longest'])} "
            f"(group {summary['longest_group']})"
        )
    if summary["staleness_mean"] is not None:
        rows["staleness"] = f"mean {summary['staleness_mean']:.2f}, greatest {summary['staleness_max']} weight versions"
    rows["restarts"] = f"{_count(summary['processes_restarted'], 'process', 'processes')} lost and started again"
    lines = [f"{name:<18}{text}" for name, text in rows.items()]
    lines += [f"{'':<18}{why}" for why in summary["restarts"]]
    if summary["steps_discarded"] or summary["groups_drawn_again"]:
        steps, groups = _count(summary["steps_discarded"], "step"), _count(summary["groups_drawn_again"], "group")
        lines.append(f"{'discarded':<18}{steps}, and what became of {groups} until then")
    return lines


def _explain_group(run: Path, history: RunHistory, group: int) -> tuple[dict[str, Any], list[str]]:
    former = [life for life in history.former_groups if life.group == group]
    now = history.groups.get(group)
    if now is None and not former:
        _refuse_unknown(run, "group", group, history.groups)
    lines = [line for life in former for line in [*_format_life(life, history), ""]]
    lines += _format_life(now, history) if now else [f"group {group} has not been drawn again"]
    content = {"group": asdict(now) | {"state": now.state} if now else None, "discarded": [asdict(f) for f in former]}
    return content, lines


def _format_life(life: GroupLife, history: RunHistory) -> list[str]:
    row = "the journal does not say when it was drawn" if life.drawn_at is None else f"row {life.row} of {life.source}"
    lines = [f"group {life.group}: {row}"]
    if life.discarded:
        lines[0] += f"\n  discarded: {life.discarded}"
    events: list[tuple[float | None, str]] = []
    for number, (at, version) in enumerate(life.begun):
        drawn = f"drawn for step {life.drawn_for}, begun" if number == 0 and at == life.drawn_at else "begun again"
        events.append((at, f"{drawn} at weight version {version}"))
    if life.done_at is not None:
        tokens = sum(sample[0] for sample in life.samples)
        kept = "dropped by the filter" if life.dropped == "filter" else "kept"
        size = f"{_count(len(life.samples), 'sample')}, {_count(tokens, 'token')}"
        events.append((life.done_at, f"complete and scored: {size}; {kept}"))
        events += [(None, line) for line in _format_samples(life.samples)]
    if life.taken_by is not None:
        events.append((life.taken_at, f"taken by step {life.taken_by}"))
    if life.trained_by is not None:
        steps = history.steps if not life.discarded else {step.step: step for step in history.former_steps}
        loss = steps[life.trained_by].loss if life.trained_by in steps else None
        value = "" if loss is None else f" (loss {loss:.4g})"
        events.append((life.trained_at, f"trained on by step {life.trained_by}{value}"))
    if life.replayed_by:
        events.append((None, f"replayed by {', '.join(f'step {step}' for step in life.replayed_by)}"))
    if life.dropped and life.dropped != "filter":
        events.append((life.dropped_at, f"dropped: {life.dropped}"))
    if life.state == "waiting" and not life.discarded:
        events.append((None, _describe_waiting(life)))
    return lines + [f"{'' if at is None else format_time(at):>11}  {text}" for at, text in events]


def _describe_waiting(life: GroupLife) -> str:
    if life.taken_by is not None:
        return f"step {life.taken_by} has not ended, or was refused"
    return "waiting: no step has taken it yet" if life.done_at is not None else "waiting: it is not complete"


def _format_samples(samples: list[list[Any]]) -> list[str]:
    lines = [f"  {'sample':<8}{'tokens':<8}{'status':<11}{'reward':<12}written by"]
    for number, sample in enumerate(samples):
        tokens, status, reward, _ = sample
        name = "-" if status is None else Status(status).name.lower()
        score = "-" if reward is None else f"{reward:g}"
        runs = list_runs(sample)
        if len(runs) == 1:
            wrote = f"version {runs[0][1]}"
        else:
            wrote = ", ".join(f"version {version} ({_count(count, 'token')})" for count, version in runs) or "-"
        lines.append(f"  {number:<8}{tokens:<8}{name:<11}{score:<12}{wrote}")
    return lines


def _explain_step(run: Path, history: RunHistory, step: int) -> tuple[dict[str, Any], list[str]]:
    former = [past for past in history.former_steps if past.step == step]
    now = history.steps.get(step)
    if now is None and not former:
        _refuse_unknown(run, "step", step, history.steps)
    lines = []
    for entry in [*former, *([now] if now else [])]:
        done = (
            "has not ended, or was refused" if entry.trained_at is None else f"ended at {format_time(entry.trained_at)}"
        )
        loss = "" if entry.loss is None else f", loss {entry.loss:.4g}"
        lines.append(f"step {step}: {done}{loss}")
        if entry.discarded:
            lines.append(f"  discarded: {entry.discarded}")
        lines += [f"  {_format_member(history, group, step)}" for group in entry.groups]
        lines += [f"  {_format_member(history, group, step)} (replayed)" for group in entry.replayed]
    content = {"step": asdict(now) if now else None, "discarded": [asdict(past) for past in former]}
    return content, lines


def _format_member(history: RunHistory, group: int, step: int) -> str:
    """Describe a group of a step by its row, its mean reward and the weights that wrote it."""
    lives = [history.groups.get(group), *(life for life in history.former_groups if life.group == group)]
    life = next((life for life in lives if life and life.taken_by == step), lives[0] or GroupLife(group))
    rewards = [sample[2] for sample in life.samples if sample[2] is not None]
    reward = f"mean reward {sum(rewards) / len(rewards):.4g}" if rewards else "no reward"
    versions = sorted({version for sample in life.samples for _, version in list_runs(sample)})
    wrote = f"written by version {', '.join(map(str, versions))}" if versions else "no tokens known"
    return f"group {group}: row {life.row} of {life.source}, {reward}, {wrote}"


def _refuse_unknown(run: Path, what: str, number: int, existing: Collection[int]) -> None:
    nearest = sorted(sorted(existing, key=lambda candidate: abs(candidate - number))[:_NEAREST])
    there = f"the nearest are {', '.join(map(str, nearest))}" if nearest else "there is none yet"
    raise ValueError(f"{run / JOURNAL} has no {what} {number}; {there}")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
