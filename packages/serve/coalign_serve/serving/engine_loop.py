"""Steps an engine for requests that arrive at any time: continuous batching over open sessions.

A session samples in one way, so there is one for each way that is asked for; they take turns. A few stay open when they
have nothing to do, because opening one takes time.
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

OPEN_SESSIONS = 4  # ways of sampling that are computed side by side; each keeps a KV cache
ENDED = "the server has ended"


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """Answers to a prompt (token ids), which are sampled alike but for their random numbers.

    ``sampling`` is without stop strings and limit, which are of the job. ``stream`` chooses the random numbers.
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
    """The next token of the answer ``place`` of a job."""

    place: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The answer ``place`` has ended; PARTIAL if its job was cut."""

    place: int
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
        """Begin a job; ``on_event`` hears of it on a thread of the source. Returns what cuts the job short."""

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

        def finish(place: int, response: Response) -> None:
            running.missing -= 1
            if not running.missing:
                del self.jobs[number]
            running.on_event(AnswerEnd(place, response.status))

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
        self._waiting: deque[tuple[int, _RunningJob]] = deque()  # for another session to end
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
                for sampling in [name for name, each in self._sessions.items() if each.jobs]:
                    self._step(sampling)
        finally:
            for each in self._sessions.values():
                each.fail(ENDED)
                each.stack.close()
            for _, running in [*self._waiting, *self._arrived]:
                running.on_event(JobFailure(ENDED, is_refused=False))
            self._module.close()

    def _take_news(self) -> bool:
        """Take what has arrived and what was cut; wait for it if there is nothing to compute. False: it is the end."""
        with self._news:
            busy = bool(self._waiting) or any(each.jobs for each in self._sessions.values())
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
                for place in range(running.job.samples):
                    running.on_event(AnswerEnd(place, Status.PARTIAL))
            elif (chosen := self._open(running.job.sampling)) is None:
                self._waiting.append((number, running))
            else:
                try:
                    chosen.begin(number, running)
                except ValueError as error:
                    running.on_event(JobFailure(str(error).replace(f" of group {number}", ""), is_refused=True))

    def _open(self, sampling: SamplingConfig) -> _SamplingSession | None:
        """Return the session of a sampling, opened if needed; None while too many others are busy."""
        name = sampling.model_dump_json()
        chosen = self._sessions.pop(name, None)
        if chosen is None:
            idle = [other for other, each in self._sessions.items() if not each.jobs]
            if len(self._sessions) >= OPEN_SESSIONS:
                if not idle:
                    return None
                self._sessions.pop(idle[0]).stack.close()
            chosen = _SamplingSession(self._module, sampling)
        self._sessions[name] = chosen
        return chosen

    def _step(self, name: str) -> None:
        """Compute a token of each answer of a session. What goes wrong ends its jobs, and no others."""
        each = self._sessions[name]
        try:
            with self._module.engine.stepping():
                each.session.step()
            problem = "" if each.session.unfinished or not each.jobs else "the engine lost responses"
        except Exception as error:
            log.exception("a step of the engine failed")
            problem = f"{type(error).__name__}: {error}"
        if problem:
            del self._sessions[name]
            each.fail(problem)
            each.stack.close()
