"""How many of the held-out logs have the right cause named first: python -m packages.diagnose.tests.score [--misses]"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from coalign_diagnose.logs import LogFile
from coalign_diagnose.sources import read_sources
from coalign_diagnose.verdict import RunDiagnosis, judge
from packages.diagnose.tests.samples import name_cause

HERE = Path(__file__).parent
SETS = tuple(folder for folder in sorted(HERE.glob("held_out*")) if (folder / "answers.yaml").exists())
# Which categories of rules say what a category of answers means. A verdict without a rule has none.
_MEANINGS = yaml.safe_load((HERE / "categories.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class JudgedLog:
    """A case of a held-out set: what was named and what is right."""

    name: str
    verdict: RunDiagnosis
    answer: dict[str, Any]
    folder: Path

    @property
    def is_at_line(self) -> bool:
        """Whether the cause stands at the line of the answer, or at one that it calls as right."""
        if self.verdict.cause is None:
            return False
        lines = [self.answer["line"], *(self.answer.get("also") or [])]
        return str(Path(self.verdict.cause.place).relative_to(self.folder)) in map(str, lines)

    @property
    def is_of_category(self) -> bool:
        """Whether it stands at a right line, or its rule is of a category that means the answer's."""
        if self.is_at_line or self.verdict.cause is None or self.verdict.cause.rule is None:
            return self.is_at_line
        return self.verdict.cause.rule.category in _MEANINGS.get(self.answer["category"], ())


@cache
def judge_set(folder: Path) -> tuple[JudgedLog, ...]:
    answers = yaml.safe_load((folder / "answers.yaml").read_text(encoding="utf-8"))
    judged = []
    for name, answer in answers.items():
        path = folder / name if (folder / name).is_dir() else folder / f"{name}.log"
        judged.append(JudgedLog(name, judge(read_sources([str(path)])), answer, folder))
    return tuple(judged)


def main() -> None:
    for folder in SETS:
        judged = judge_set(folder)
        for each in judged:
            if not each.is_at_line and "--misses" in sys.argv:
                cause, named = each.verdict.cause, name_cause(each.verdict)
                place = Path(cause.place).relative_to(folder) if cause else "-"
                mark = "same category" if each.is_of_category else "WRONG"
                right = f"{each.answer['line']} ({each.answer['category']}) {each.answer['cause']}"
                sys.stdout.write(f"{mark}: {each.name}: {named} at {place}; right: {right}\n")
        lines, categories = sum(each.is_at_line for each in judged), sum(each.is_of_category for each in judged)
        sys.stdout.write(f"{folder.name}: of {len(judged)}, {lines} at the line, {categories} by category\n")
    healthy = [path for path in sorted((HERE / "healthy").iterdir()) if path.name != "README.md"]
    false = [path.name for path in healthy if judge(read_healthy(path)).cause is not None]
    sys.stdout.write(f"healthy: {len(false)} of {len(healthy)} with a false cause {false}\n")


def read_healthy(path: Path) -> list[LogFile]:
    return read_sources([str(path)]) if path.is_dir() else [LogFile(path.name, path.read_bytes())]


if __name__ == "__main__":
    main()
