"""Companions: packages beside Coalign that bring commands, backends, rewards, checks and explanations.

The entry points of a companion's distribution name what it brings; the core imports none of them::

    [project.entry-points."coalign.commands"]
    board = "coalign_board.command:board"

=====================  ==============================================================================================
group                  an entry
=====================  ==============================================================================================
``coalign.api``        a function of `import coalign`
``coalign.commands``   a function with typer's annotations, or a `typer.Typer` with commands of its own
``coalign.backends``   a subclass of ``Module``, which `models.<name>.module` names
``coalign.rewards``    a reward function (see coalign.rewards), which `reward.fn` names. The questions of judges have a
                       group of their own, ``coalign.rewards.judge_questions``; so have environments, which
                       `rollout.fn` names: ``coalign.environments``
``coalign.formats``    ``gguf(file, directory, weights)``: makes a Hugging Face directory of a file of this format.
                       ``indexed(prefix, vocabulary, …)``: opens tokenised documents as rows of training data
``coalign.checks``     parts of `coalign check`. ``pipeline(file, overrides, cluster, display)``: the whole check of a
                       pipeline, False for other files. ``cluster(text)``: what `--cluster` describes.
                       ``data(plan, models, simulated)``: what the first rows of the data say (DataFindings).
                       ``memory(report, plan, config, cluster, lengths)`` and ``placement(report, plan, config,
                       cluster)``: whether the run fits. ``sandbox()``: what a sandbox for code cannot limit here
``coalign.kernels``    ``operations`` (a module) and ``layers(model)``: what coalign.cpu offers
``coalign.explains``   ``foreign_file(path, data, text="")``, ``foreign_key(key, value)``, ``exact_foreign_key(key,
                       value)``: what an error says of files and keys of other frameworks. ``ending(error,
                       folder)``: why a run ended
=====================  ==============================================================================================
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

API, COMMANDS, BACKENDS = "coalign.api", "coalign.commands", "coalign.backends"
REWARDS, QUESTIONS = "coalign.rewards", "coalign.rewards.judge_questions"
ENVIRONMENTS, FORMATS = "coalign.environments", "coalign.formats"
CHECKS, EXPLAINS, KERNELS = "coalign.checks", "coalign.explains", "coalign.kernels"
GROUPS = (API, COMMANDS, BACKENDS, REWARDS, QUESTIONS, ENVIRONMENTS, FORMATS, CHECKS, EXPLAINS, KERNELS)
# What the companions of Coalign's repository bring.
COMPANIONS = {
    "coalign-agents": {
        COMMANDS: ("agent-test",),
        ENVIRONMENTS: ("agent", "game", "program", "self_play", "simulated_user", "tool_use", "verifiers"),
    },
    "coalign-board": {COMMANDS: ("board", "watch")},
    "coalign-cpu": {KERNELS: ("layers", "operations")},
    "coalign-deepspeed": {BACKENDS: ("deepspeed",)},
    "coalign-diagnose": {COMMANDS: ("diagnose", "doctor", "explain")},
    "coalign-graders": {
        REWARDS: (
            *("contains", "exact_match", "f1", "regex", "math", "multiple_choice", "code"),
            *("Remote", "RemoteJudge", "Tournament", "pairwise"),
        ),
        BACKENDS: ("judge", "preference"),
        QUESTIONS: ("Pairwise", "Pointwise", "Rubric"),
        CHECKS: ("sandbox",),
    },
    "coalign-jobs": {COMMANDS: ("launch", "sweep")},
    "coalign-megatron": {
        BACKENDS: ("megatron",),
        COMMANDS: ("convert", "extend-vocab", "indexed"),
        FORMATS: ("indexed",),
    },
    "coalign-migrate": {COMMANDS: ("import-config",)},
    "coalign-plan": {COMMANDS: ("plan",), CHECKS: ("cluster", "memory", "placement")},
    "coalign-prepare": {CHECKS: ("data",), COMMANDS: ("init", "inspect-data", "recipes", "schema"), FORMATS: ("gguf",)},
    "coalign-serve": {
        API: ("evaluate", "generate"),
        CHECKS: ("pipeline",),
        COMMANDS: ("chat", "check-sync", "eval", "generate", "merge", "pipeline", "score", "serve", "serve-reward"),
    },
    "coalign-vllm": {BACKENDS: ("vllm",)},
}


@cache
def _read_entries() -> Any:  # its type changed with Python 3.12
    """Read the entry points of all distributions, which takes ten milliseconds, once."""
    return entry_points()


@cache
def list_entries(group: str) -> dict[str, EntryPoint]:
    """Return what installed companions bring of a group, by name."""
    return {entry.name: entry for entry in _read_entries().select(group=group)}


def name_missing(group: str, name: str) -> str | None:
    """Return the companion of Coalign that brings something and is not installed; None if none is missing."""
    if name in list_entries(group):
        return None
    return next((companion for companion, brings in COMPANIONS.items() if name in brings.get(group, ())), None)


@cache
def list_modules() -> frozenset[str]:
    """Return the top modules of Coalign and of the companions that are installed."""
    brought = (entry.module for group in GROUPS for entry in list_entries(group).values())
    return frozenset({"coalign", *(module.partition(".")[0] for module in brought)})


def load(group: str, name: str, title: str) -> Any:
    """Load what a companion brings; None for a name that no companion has.

    Raises ImportError, which calls it ``title``, if its companion is not installed.
    """
    if (entry := list_entries(group).get(name)) is not None:
        return entry.load()
    if companion := name_missing(group, name):
        raise ImportError(f"{title} comes with a companion of Coalign: pip install {companion}")
    return None


def ask(group: str, name: str, *arguments: Any) -> Any:
    """Call what a companion brings of a group; None if none does."""
    entry = list_entries(group).get(name)
    return None if entry is None else entry.load()(*arguments)
