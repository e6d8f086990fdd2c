"""Drives the sessions of an engine for all that generates: batches, rolling batches, episodes, answers of a server.

A client makes a ``GenerationTask`` of what it wants, and lets a ``SessionDriver`` step until the task is done.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

from coalign.backends.engines.contract import GenerationSession, InferenceEngine, OnToken
from coalign.backends.engines.request import Request
from coalign.config.schema import SamplingConfig
from coalign.types import Response, Status

Progress = Callable[[int, int, int], None]  # (responses finished, responses in all, tokens chosen)


class GenerationTask:
    """What a client wants of a session. total: samples. finished: samples that have ended. complete_groups: groups of
    which no sample is missing, or was cut."""

    total: int
    finished = 0
    complete_groups = 0

    @property
    def done(self) -> bool:
        """Whether nothing of the task is left to generate."""
        return self.finished == self.total

    def wait(self, seconds: float) -> None:
        """Wait until the task may ask for more tokens, at most ``seconds``. Called while it is not done and the engine
        has nothing to compute. RuntimeError if it asks for nothing more: the engine has lost its responses."""
        raise RuntimeError(f"the engine returned {self.finished} of {self.total} responses")

    def stop(self) -> None:
        """End what the task does beside the engine: its session is about to close."""


_Task = TypeVar("_Task", bound=GenerationTask)


class ResponseTask(GenerationTask):
    """Responses to ``requests``, by request, then sample. Raises ValueError for a prompt that can never fit."""

    def __init__(self, session: GenerationSession, requests: Sequence[Request]) -> None:
        self.responses: list[list[Any]] = [[None] * request.samples for request in requests]
        self.total = sum(map(len, self.responses))
        self._incomplete = Counter(request.group for request in requests for _ in range(request.samples))
        submitted = []
        try:
            for request, responses in zip(requests, self.responses, strict=True):
                submitted.append(session.submit(request, partial(self._record, request.group, responses)))
        except ValueError:
            session.cut(*submitted)
            raise

    @property
    def complete_groups(self) -> int:
        return sum(not samples for samples in self._incomplete.values())

    def _record(self, group: int, responses: list[Any], offset: int, response: Response) -> None:
        responses[offset] = response
        self._incomplete[group] -= response.status != Status.PARTIAL
        self.finished += 1


class SessionDriver:
    """Computes tasks that may begin at any time, side by side: in a session for each sampling configuration.

    Beyond ``max_sessions``, sessions without an unfinished task are closed when another one is wanted. on_token: see
    InferenceEngine.open.
    """

    def __init__(self, engine: InferenceEngine, on_token: OnToken | None = None, *, max_sessions: int = 1) -> None:
        self.engine, self.on_token, self.max_sessions = engine, on_token, max_sessions
        self.tasks: dict[GenerationSession, list[GenerationTask]] = {}  # the session that was used last comes last

    @property
    def busy(self) -> list[GenerationSession]:
        """The sessions with an unfinished task."""
        return [session for session, tasks in self.tasks.items() if not all(task.done for task in tasks)]

    def begin(self, sampling: SamplingConfig, create: Callable[[GenerationSession], _Task]) -> _Task:
        """Create a task in the session of ``sampling``, which is opened if needed. Raises what ``create`` raises."""
        session = next((session for session in self.tasks if session.sampling == sampling), None)
        busy = self.busy
        idle = [other for other in self.tasks if other is not session and other not in busy]
        for other in idle[: max(0, len(self.tasks) + (session is None) - self.max_sessions)]:
            self.close(other)
        if session is None:
            session = self.engine.open(sampling, self.on_token)
        unfinished = [task for task in self.tasks.pop(session, []) if not task.done]
        self.tasks[session] = unfinished
        unfinished.append(task := create(session))
        return task

    def step(self, sessions: Iterable[GenerationSession] | None = None, *, seconds: float = math.inf) -> None:
        """Compute a token of every sample of ``sessions`` (None: all); if there is none to compute, wait for one of
        their tasks, at most ``seconds``."""
        chosen = list(self.tasks if sessions is None else sessions)
        if able := [session for session in chosen if session.unfinished]:
            for session in able:
                with self.engine.stepping():
                    session.step()
            return
        for task in [task for session in chosen for task in self.tasks[session] if not task.done][:1]:
            task.wait(seconds)

    def close(self, *sessions: GenerationSession) -> None:
        """Close these sessions, or all; what they have not finished is lost."""
        with ExitStack() as stack:
            for session in sessions or list(self.tasks):
                stack.callback(session.close)
                for task in self.tasks.pop(session):
                    stack.callback(task.stop)


def generate_in_order(
    engine: InferenceEngine,
    sampling: SamplingConfig,
    factories: Sequence[Callable[[GenerationSession], _Task]],
    progress: Progress | None = None,
    on_token: OnToken | None = None,
    min_groups: int | None = None,
) -> Iterator[_Task]:
    """Create tasks in a session of their own, compute them together, and yield them in order, each as it is done.

    Nothing is computed before the caller asks for the next one. As soon as ``min_groups`` groups are complete, all
    other samples are returned as they are (PARTIAL). Raises RuntimeError if the engine loses a response.
    """
    with closing(SessionDriver(engine, on_token)) as driver:
        tasks = [driver.begin(sampling, create) for create in factories]
        [session] = driver.tasks
        for task in tasks:
            while not task.done:
                if min_groups is not None and sum(other.complete_groups for other in tasks) >= min_groups:
                    session.cut_all()
                driver.step()
                if progress is not None:
                    total = sum(other.total for other in tasks)
                    progress(sum(other.finished for other in tasks), total, session.tokens_chosen)
            if task is not tasks[-1]:
                yield task
    yield tasks[-1]  # the memory of the session is free by now


def generate_responses(
    engine: InferenceEngine,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    progress: Progress | None = None,
    on_token: OnToken | None = None,
    min_groups: int | None = None,
) -> list[list[Response]]:
    """Return the responses of each request, in the order of its samples; see ``generate_in_order``. Raises ValueError
    for a prompt that is empty, holds an unknown token, or can never fit."""
    create = partial(ResponseTask, requests=requests)
    [task] = generate_in_order(engine, sampling, [create], progress, on_token, min_groups)
    return task.responses
