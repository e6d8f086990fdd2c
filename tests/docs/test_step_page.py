"""docs/how_a_step_works.md names the files that a step runs: no more and no fewer."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType

from coalign.engine.engine import Engine
from tests.runs import ROOT, run, settings

PAGE = ROOT / "docs/how_a_step_works.md"
CHECKED = ("coalign/", "packages/cpu/coalign_cpu/")


class StepProfiler:
    """Collects the files that run in ``step`` and after it, until the next one begins, on all threads."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.files: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<"):
            self.files.add(code.co_filename)  # a function's; a module or a class may be imported meanwhile

    @contextmanager
    def installed(self, monkeypatch) -> Iterator[None]:
        take_step = Engine._take_step

        def note_step(engine: Engine) -> None:
            self.is_on = engine.step == self.step - 1
            take_step(engine)

        monkeypatch.setattr(Engine, "_take_step", note_step)
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def list_named(text: str) -> set[str]:
    """The files that the sections of the step name; a name without a folder stands in that of the name before it."""
    step = text[text.index("\n## The loop") : text.index("\n## When steps overlap")]
    named, folder = set(), Path()
    for name in re.findall(r"`([\w/]+\.py)`", step):
        path = next(
            p for p in (Path(name), Path("coalign", name), folder / name, folder.parent / name) if (ROOT / p).is_file()
        )
        named.add(str(path))
        folder = path.parent
    return named


def test_the_page_names_every_file_of_a_step(tmp_path, monkeypatch):
    config = settings(tmp_path, "grpo", steps=4, eval_every=1, save_every=4)
    profiler = StepProfiler(3)
    with profiler.installed(monkeypatch):
        run(config)
    ran = {file.removeprefix(f"{ROOT}/") for file in profiler.files}
    ran = {file for file in ran if file.startswith(CHECKED)} - {"coalign/__init__.py"}  # it helps where one imports
    named = list_named(PAGE.read_text())
    assert ran - named == set(), "run in a step, and not on the page"
    assert named - ran == set(), "on the page, and not run in a step"
