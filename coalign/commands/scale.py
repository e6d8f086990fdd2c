"""`coalign scale RUN policy=4 trainer=2`: asks a running run for other numbers of processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from coalign.config import load
from coalign.engine.hooks.run_folder import FolderInUse, lock_folder
from coalign.engine.hooks.scaling import read_answer, write_request
from coalign.report.display import Display

POLL_SECONDS = 0.2


def scale_run(run: Path, processes: Sequence[str], display: Display) -> None:
    """Ask for the numbers in ``processes`` ("policy=4"), and show the answer, which comes after the step under way.

    Raises ValueError for numbers and models that are wrong, for a folder where no run is going, and if the run refuses.
    """
    wanted = dict(_parse(text) for text in processes)
    _check_going(run)
    models = load(run / "config.yaml", ()).models
    if unknown := [name for name in wanted if name not in models]:
        raise ValueError(f"{run} has no model '{unknown[0]}'; there are {', '.join(models)}")
    write_request(run, wanted)
    display.note(f"asked {run}; waiting for the end of its step (Ctrl-C: it will be done all the same)")
    while (answer := read_answer(run)) is None:
        _check_going(run)
        time.sleep(POLL_SECONDS)
    refused = [f"{name}: {said}" for name, said in answer.items() if said.startswith("refused")]
    for name, said in answer.items():
        if f"{name}: {said}" not in refused:
            display.note(f"{name}: {said}")
    if refused:
        raise ValueError("; ".join(refused))


def _parse(text: str) -> tuple[str, int]:
    name, sign, number = text.partition("=")
    if not (name and sign and number.isdecimal() and int(number) > 0):
        raise ValueError(f"'{text}' says no number of processes; expected MODEL=NUMBER, such as policy=4")
    return name, int(number)


def _check_going(run: Path) -> None:
    """Raise ValueError if no run is going in this folder."""
    if (run / "config.yaml").exists():
        try:
            lock_folder(run).close()
        except FolderInUse:
            return
    raise ValueError(f"no run is going in {run}; set num_process or num_gpu of the model, and start it")
