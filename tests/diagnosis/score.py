"""How many of the held-out logs have the right line named first: python -m tests.diagnosis.score [--misses]"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from coalign.diagnosis.logs import LogFile
from coalign.diagnosis.sources import read_sources
from coalign.diagnosis.verdict import RunDiagnosis, judge
from tests.diagnosis.samples import name_cause

HERE = Path(__file__).parent


def is_right(verdict: RunDiagnosis, answer: dict[str, object], folder: Path) -> bool:
    """Whether the cause stands at the line of the answer, or at one that it calls as right."""
    if verdict.cause is None:
        return False
    lines = [answer["line"], *(answer.get("also") or [])]
    return str(Path(verdict.cause.place).relative_to(folder)) in map(str, lines)


def main() -> None:
    folder = HERE / "held_out"
    answers = yaml.safe_load((folder / "answers.yaml").read_text())
    right = 0
    for name, answer in answers.items():
        path = folder / name if (folder / name).is_dir() else folder / f"{name}.log"
        verdict = judge(read_sources([str(path)]))
        good = is_right(verdict, answer, folder)
        right += good
        if not good and "--misses" in sys.argv:
            place = verdict.cause.place.split("held_out/")[-1] if verdict.cause else "-"
            sys.stdout.write(f"{name}: {name_cause(verdict)} at {place}; right: {answer['line']} {answer['cause']}\n")
    sys.stdout.write(f"held out: {right} of {len(answers)} named first\n")
    healthy = [path for path in sorted((HERE / "healthy").iterdir()) if path.name != "README.md"]
    false = [path.name for path in healthy if judge(read_healthy(path)).cause is not None]
    sys.stdout.write(f"healthy: {len(false)} of {len(healthy)} with a false cause {false}\n")


def read_healthy(path: Path) -> list[LogFile]:
    return read_sources([str(path)]) if path.is_dir() else [LogFile(path.name, path.read_bytes())]


if __name__ == "__main__":
    main()
