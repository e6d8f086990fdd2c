"""Steps an engine for requests that arrive at any time: continuous batching over open sessions.

A session has one sampling configuration, so each configuration has a session; they take turns. A few idle ones stay
open, because opening one takes time.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from coalign.backends.engines.contract import GenerationSession
from coalign.backends.engines.request import Request, SubmittedRequest
from coalign.backends.engines.rollout_module import RolloutModule
from coalign.config.schema import SamplingConfig
from coalign.threads import start_thread
from coalign.types import ImageSpan, Response, Status

log = logging.getLogger(__name__)

OPEN_SESSIONS = 4  # sampling configurations that are computed side by side; each keeps a KV cache
ENDED = "the server has ended"


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """Answers to a prompt (token ids) under one sampling configuration.

    ``sampling`` is without stop strings and limit, which the job has itself. ``stream`` chooses the random numbers.
    ``images``: where they stand in the prompt.
    """

    prompt: list[int]
    samples: int
    sampling: SamplingConfig
    limit: int
    stop: tuple[str, ...] = ()
    stream: int = 0
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """The next token of the answer ``index`` of a job."""

    index: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The answer ``index`` has ended; PARTIAL if its job was cut."""

    index: int
    status: Status


@dataclass(frozen=True, slots=True)
class JobFailure:
    """The job has ended. ``is_refused``: it can never be computed, for example because its prompt is too long."""

    problem: str
    is_refused: bool


JobEvent = ChosenToken | AnswerEnd | JobFailure
OnEvent = Callable[[JobEvent], object]


class CompletionEngine(ABC):
    """Computes jobs. Any thread may call its methods."""

    @abstractmethod
    def submit(self, job: GenerationJob, on_event: OnEvent) -> Callable[[], None]:
        """Begin a job; a thread of this engine calls ``on_event``. Returns a function that cuts the job short."""

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why no job can be computed any more; None while all is well."""

    @abstractmethod
    def close(self) -> None:
        """End unfinished jobs, and free the engine."""


@dataclass(slots=True, eq=False)
class _RunningJob:
    job: GenerationJob
    on_event: OnEvent
    missing: int
    submitted: SubmittedRequest | None = None
    is_cut: bool = False


class _SamplingSession:
    """An open session, and its unfinished jobs by their number, which is the group of their samples."""

    def __init__(self, module: RolloutModule, sampling: SamplingConfig) -> None:
        self.stack = ExitStack()
        self.jobs: dict[int, _RunningJob] = {}
        self.session: GenerationSession = self.stack.enter_context(module.engine.open(sampling, self._report))

    def begin(self, number: int, running: _RunningJob) -> None:
        """Raises ValueError for a prompt that can never fit."""
        job = running.job
        request = Request(
            job.prompt, number, job.samples, limit=job.limit, stop=job.stop, images=job.images, stream=job.stream
        )  # its group tells whose tokens come; its stream, and not the group, chooses them

        def finish(index: int, response: Response) -> None:
            running.missing -= 1
            if not running.missing:
                del self.jobs[number]
            running.on_event(AnswerEnd(index, response.status))

        running.submitted = self.session.submit(request, finish)
        self.jobs[number] = running

    def fail(self, problem: str) -> None:
        """End all jobs."""
        jobs, self.jobs = list(self.jobs.values()), {}
        for running in jobs:
            running.on_event(JobFailure(problem, is_refused=False))

    def _report(self, group: int, index: int, token: int, logprob: float) -> None:
        if (running := self.jobs.get(group)) is not None:
            running.on_event(ChosenToken(index, token, logprob))


class EngineLoop(CompletionEngine):
    """Computes jobs with a policy's module in this process, on a thread of its own. The module has its weights."""

    def __init__(self, module: RolloutModule) -> None:
        self._module = module
        self._news = threading.Condition()  # guards the next four
        self._arrived: deque[tuple[int, _RunningJob]] = deque()
        self._cut: list[_RunningJob] = []
        self._number = 0
        self._is_closing = False
        self._sessions: dict[str, _SamplingSession] = {}  # by their sampling, as JSON; the one used last comes last
        self._waiting: deque[tuple[int, _RunningJob]] = deque()  # wait until another session is idle
        self._thread = start_thread(self._run, "coalign-engine-loop")

    def submit(self, job: GenerationJob, on_event: OnEvent) -> Callable[[], None]:
        running = _RunningJob(job, on_event, job.samples)
        with self._news:
            if self._is_closing:
                on_event(JobFailure(ENDED, is_refused=False))
                return lambda: None
            self._number += 1
            self._arrived.append((self._number, running))
            self._news.notify()

        def cut() -> None:
            with self._news:
                self._cut.append(running)
                self._news.notify()

        return cut

    @property
    def failure(self) -> str | None:
        return None if self._thread.is_alive() else ENDED

    def close(self) -> None:
        with self._news:
            self._is_closing = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_news():
                self._begin_waiting()
                for sampling in [name for name, session in self._sessions.items() if session.jobs]:
                    self._step(sampling)
        finally:
            for session in self._sessions.values():
                session.fail(ENDED)
                session.stack.close()
            for _, running in [*self._waiting, *self._arrived]:
                running.on_event(JobFailure(ENDED, is_refused=False))
            self._module.close()

    def _take_news(self) -> bool:
        """Take jobs that have arrived or were cut; wait for some if there is nothing to compute. False: closing."""
        with self._news:
            busy = bool(self._waiting) or any(session.jobs for session in self._sessions.values())
            self._news.wait_for(lambda: busy or self._arrived or self._cut or self._is_closing)
            self._waiting += self._arrived
            self._arrived.clear()
            cut, self._cut = self._cut, []
            closing = self._is_closing
        for running in cut:
            running.is_cut = True
            if running.submitted is not None:
                running.submitted.cut = True
        return not closing

    def _begin_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for number, running in waiting:
            if running.is_cut:
                for index in range(running.job.samples):
                    running.on_event(AnswerEnd(index, Status.PARTIAL))
            elif (chosen := self._open(running.job.sampling)) is None:
                self._waiting.append((number, running))
            else:
                try:
                    chosen.begin(number, running)
                except ValueError as error:
                    running.on_event(JobFailure(str(error).replace(f" of group {number}", ""), is_refused=True))

    def _open(self, sampling: SamplingConfig) -> _SamplingSession | None:
        """Return the session of a sampling configuration, opened if needed; None while too many others are busy."""
        name = sampling.model_dump_json()
        chosen = self._sessions.pop(name, None)
        if chosen is None:
            idle = [idle_name for idle_name, session in self._sessions.items() if not session.jobs]
            if len(self._sessions) >= OPEN_SESSIONS:
                if not idle:
                    return None
                self._sessions.pop(idle[0]).stack.close()
            chosen = _SamplingSession(self._module, sampling)
        self._sessions[name] = chosen
        return chosen

    def _step(self, name: str) -> None:
        """Compute a token of each answer of a session. A failure ends the jobs of this session alone."""
        session = self._sessions[name]
        try:
            with self._module.engine.stepping():
                session.session.step()
            problem = "" if session.session.unfinished or not session.jobs else "the engine lost responses"
        except Exception as error:
            log.exception("a step of the engine failed")
            problem = f"{type(error).__name__}: {error}"
        if problem:
            del self._sessions[name]
            session.fail(problem)
            session.stack.close()
