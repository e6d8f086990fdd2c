"""`make(senders, readers, module)`: a trainer of some ranks and a policy of some replicas, each rank a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.weights import modules
from tests.weights.processes import Processes


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Processes, Processes]]]:
    running: list[Processes] = []

    def start(
        senders: int = 1, readers: int = 1, module: str = "Reader", *, turns: bool = False, source: str = "Sender"
    ):
        running.append(Processes("trainer", getattr(modules, source), senders, turns=turns))
        running.append(Processes("policy", getattr(modules, module), readers, turns=turns))
        return running[-2:]

    yield start
    for model in running:
        model.close()
