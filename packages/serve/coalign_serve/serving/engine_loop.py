"""Computes requests that arrive at any time: continuous batching over the sessions of an engine.

Each sampling configuration has a session; they take turns. A few idle ones stay open, because opening one takes time.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from coalign.backends.engines.contract import GenerationSession
from coalign.backends.engines.request import Request, SubmittedRequest
from coalign.backends.engines.rollout_module import RolloutModule
from coalign.backends.engines.session_driver import GenerationTask, SessionDriver
from coalign.config.schema import SamplingConfig
from coalign.threads import start_thread
from coalign.types import ImageSpan, Status

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


class _RunningJob(GenerationTask):
    """A job and its listener. ``number``: the group of its samples, which tells whose tokens come."""

    def __init__(self, number: int, job: GenerationJob, on_event: OnEvent) -> None:
        self.number, self.job, self.on_event = number, job, on_event
        self.total = job.samples
        self.is_cut = False
        self.session: GenerationSession | None = None
        self.submitted: SubmittedRequest | None = None

    def submit(self, session: GenerationSession) -> _RunningJob:
        """Raises ValueError for a prompt that can never fit."""
        self.session, job = session, self.job
        request = Request(
            job.prompt, self.number, job.samples, limit=job.limit, stop=job.stop, images=job.images, stream=job.stream
        )
        self.submitted = session.submit(request, lambda index, response: self.end_answer(index, response.status))
        if self.is_cut:  # by another thread, just now
            self.submitted.cut = True
        return self

    def cut(self) -> None:
        """End the answers as they are; any thread may call this."""
        self.is_cut = True
        if self.submitted is not None:
            self.submitted.cut = True

    def end_answer(self, index: int, status: Status) -> None:
        self.finished += 1
        self.on_event(AnswerEnd(index, status))

    def fail(self, problem: str, *, is_refused: bool = False) -> None:
        self.finished = self.total
        self.on_event(JobFailure(problem, is_refused))


class EngineLoop(CompletionEngine):
    """Computes jobs with a policy's module in this process, on a thread of its own. The module has its weights."""

    def __init__(self, module: RolloutModule) -> None:
        self._module = module
        self._news = threading.Condition()  # guards the next three
        self._arrived: list[_RunningJob] = []
        self._number = 0
        self._is_closing = False
        self._driver = SessionDriver(module.engine, self._report, max_sessions=OPEN_SESSIONS)
        self._jobs: dict[int, _RunningJob] = {}  # those in a session, by number
        self._waiting: list[_RunningJob] = []  # wait until another session is idle
        self._thread = start_thread(self._run, "coalign-engine-loop")

    def submit(self, job: GenerationJob, on_event: OnEvent) -> Callable[[], None]:
        with self._news:
            if self._is_closing:
                on_event(JobFailure(ENDED, is_refused=False))
                return lambda: None
            self._number += 1
            running = _RunningJob(self._number, job, on_event)
            self._arrived.append(running)
            self._news.notify()
        return running.cut

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
                for session in self._driver.busy:
                    self._step(session)
                self._jobs = {number: running for number, running in self._jobs.items() if not running.done}
        finally:
            for running in [*self._jobs.values(), *self._waiting, *self._arrived]:
                if not running.done:
                    running.fail(ENDED)
            self._driver.close()
            self._module.close()

    def _take_news(self) -> bool:
        """Take jobs that have arrived; wait for some if there is nothing to compute. False: closing."""
        with self._news:
            busy = bool(self._waiting or self._jobs)
            self._news.wait_for(lambda: busy or self._arrived or self._is_closing)
            self._waiting += self._arrived
            self._arrived = []
            return not self._is_closing

    def _begin_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for running in waiting:
            if running.is_cut:
                for index in range(running.total):
                    running.end_answer(index, Status.PARTIAL)
            elif sum(session.sampling != running.job.sampling for session in self._driver.busy) >= OPEN_SESSIONS:
                self._waiting.append(running)
            else:
                try:
                    self._driver.begin(running.job.sampling, running.submit)
                    self._jobs[running.number] = running
                except ValueError as error:
                    running.fail(str(error).replace(f" of group {running.number}", ""), is_refused=True)

    def _report(self, number: int, index: int, token: int, logprob: float) -> None:
        self._jobs[number].on_event(ChosenToken(index, token, logprob))

    def _step(self, session: GenerationSession) -> None:
        """Compute a token of each answer of a session. A failure ends the jobs of this session alone."""
        try:
            self._driver.step([session])
        except Exception as error:
            log.exception("a step of the engine failed")
            for running in self._jobs.values():
                if running.session is session and not running.done:
                    running.fail(f"{type(error).__name__}: {error}")
            self._driver.close(session)
