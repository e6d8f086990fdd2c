"""Trains in this process while the run is harmed at chosen moments.

Called as ``python -m tests.chaos.driver CONFIG FAULTS``: two JSON files. A fault is {step, phase, process, how, delay}.
``delay`` seconds after the engine enters a phase of the step, and no later than at the beginning of the last step, the
process is killed (SIGKILL) or stopped (SIGSTOP), or its connections with the process ``other`` are cut. ``process`` is
a part of an actor's name (`:trainer:rank1`), or `driver`. Without a process, bits of weights that are sent are
flipped (``how`` is `flip`, drawn by ``seed``), or the run folder's disk is filled or freed (`fill`, `free`). Each
fault happens once, also over several starts: those that happened are in FAULTS.done.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import coalign
from tests.chaos.damage import cut_connections, fill_disk, flip_weights_once, free_disk
from tests.runs import MARK


class Faults(coalign.Hook):
    """Makes faults happen, and writes down when, and when the next step was complete."""

    def __init__(self, path: Path) -> None:
        self.faults: list[dict[str, Any]] = json.loads(path.read_text())
        self.done = path.with_suffix(".done")
        self.engine: Any = None
        self.threads: list[threading.Thread] = []
        self.is_last_step = threading.Event()

    def begin(self, engine: Any) -> None:
        if self.engine is None:  # the run's own process may begin it only once
            self.engine = engine
            engine.phase_listeners.append(self.phase)

    def phase(self, name: str) -> None:
        happened = [line["fault"] for line in read_lines(self.done) if "fault" in line]
        for number, fault in enumerate(self.faults):
            if fault["phase"] == name and fault["step"] == self.engine.step and number not in happened:
                if "process" in fault:
                    self.begin_fault(self.strike, number, fault)
                else:
                    self.note(fault=number)
                    self.damage(fault)
        if (
            self.engine.step >= self.engine.last - 1
        ):  # what has been delayed happens now, or the run would end without it
            self.is_last_step.set()
            for thread in self.threads:
                thread.join()

    def begin_fault(self, happen: Callable[[int, dict[str, Any]], None], number: int, fault: dict[str, Any]) -> None:
        if fault.get("process") == "driver" and "delay" not in fault:
            happen(number, fault)  # at once, however fast this process is
        self.threads.append(threading.Thread(target=happen, args=(number, fault), daemon=True))
        self.threads[-1].start()

    def damage(self, fault: dict[str, Any]) -> None:
        folder = Path(self.engine.config.output)
        if fault["how"] == "flip":
            flip_weights_once(random.Random(fault["seed"]))
        else:
            {"fill": fill_disk, "free": free_disk}[fault["how"]](folder)

    def strike(self, number: int, fault: dict[str, Any]) -> None:
        self.is_last_step.wait(fault.get("delay", 0.0))
        own = os.getpid() if fault["process"] == "driver" else None
        victim = own or find_process(fault["process"])
        other = find_process(fault["other"]) if "other" in fault else None
        if victim is None or ("other" in fault and other is None):
            return
        if other is None:
            self.note(fault=number)
            os.kill(victim, signal.SIGSTOP if fault.get("how") == "stop" else signal.SIGKILL)
        elif connections := cut_connections(victim, other):
            self.note(fault=number, connections=connections)

    def after_step(self, engine: Any, stats: Any, batch: Any) -> None:
        self.note(step=engine.step)

    def note(self, **record: int) -> None:
        with open(self.done, "a") as file:
            file.write(json.dumps({**record, "time": time.time()}) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def find_process(name: str) -> int | None:
    """The process of an actor of this run; None while it is being started."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == os.environ[MARK] and any(name in part for part in process.cmdline()):
                return process.pid
        except psutil.Error:
            continue
    return None


if __name__ == "__main__":
    config, faults = Path(sys.argv[1]), Path(sys.argv[2])
    coalign.train(json.loads(config.read_text()), hooks=[Faults(faults)])
