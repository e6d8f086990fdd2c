"""`coalign scale`, `save` and `stop`: asks a running run for something, and waits for its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coalign.config import load
from coalign.report.display import Display
from coalign.run_files.control import ControlRequest, require_going, submit, wait_for_answer


def scale_run(run: Path, processes: Sequence[str], display: Display) -> None:
    """Ask for the numbers in ``processes`` ("policy=4"), and show the answer, which comes after the step under way.

    Raises ValueError for numbers and models that are wrong, for a folder where no run is going, and if the run refuses.
    """
    wanted = dict(_parse(text) for text in processes)
    require_going(run)
    models = load(run / "config.yaml", ()).models
    if unknown := [name for name in wanted if name not in models]:
        raise ValueError(f"{run} has no model '{unknown[0]}'; there are {', '.join(models)}")
    ask_run(run, ControlRequest("scale", wanted), display)


def ask_run(run: Path, request: ControlRequest, display: Display) -> None:
    """Ask a run for one thing, and show the answer. Raises ValueError if no run is going, and if it refuses."""
    request_id = submit(run, request)
    display.note(f"asked {run}; waiting for the end of its step (Ctrl-C: it will be done all the same)")
    results = wait_for_answer(run, request_id)
    for result in results:
        if result.done:
            display.note(result.text)
    if refused := [result.text for result in results if not result.done]:
        raise ValueError("; ".join(refused))


def _parse(text: str) -> tuple[str, int]:
    name, sign, number = text.partition("=")
    if not (name and sign and number.isdecimal() and int(number) > 0):
        raise ValueError(f"'{text}' says no number of processes; expected MODEL=NUMBER, such as policy=4")
    return name, int(number)
