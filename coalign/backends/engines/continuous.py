"""Generation that goes on between the calls of a worker: for asynchronous runs, whose weights change in between."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from coalign.backends.engines.contract import GenerationSession, InferenceEngine
from coalign.backends.engines.episodes import EpisodeBatch, EpisodeRunner
from coalign.backends.engines.request import begin_generation, extend_samples, plan_requests
from coalign.config.schema import SamplingConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.types import Response, Stats


class _ResponseBatch:
    """A batch whose samples are single responses, while a session computes them. ``samples``: as they were given.
    Raises ValueError for a prompt that can never fit."""

    def __init__(
        self,
        engine: InferenceEngine,
        session: GenerationSession,
        samples: Batch,
        sampling: SamplingConfig,
        longest: int | None,
    ) -> None:
        self.engine, self.samples = engine, samples
        self.rows, requests = plan_requests(samples, sampling.max_new_tokens, None, longest)
        self.responses: dict[int, Response] = {}  # by the number of the row
        submitted, first = [], 0
        try:
            for request in requests:
                submitted.append(session.submit(request, partial(self._record, first)))
                first += request.samples
        except ValueError:
            session.cut(*submitted)
            raise

    @property
    def missing(self) -> int:
        return len(self.rows) - len(self.responses)

    @property
    def done(self) -> bool:
        return not self.missing

    def result(self) -> tuple[Batch, Stats]:
        responses = [self.responses[number] for number in range(len(self.rows))]
        return extend_samples(self.samples, self.rows, responses, self.engine.experts), {}

    def _record(self, first: int, offset: int, response: Response) -> None:
        self.responses[first + offset] = response


class _OpenSession:
    """A session of an engine that is open until ``close``, and the batches that it computes, by number."""

    def __init__(self, engine: InferenceEngine, sampling: SamplingConfig) -> None:
        self._stack = ExitStack()
        self.session = self._stack.enter_context(engine.open(sampling))
        self.batches: dict[int, _ResponseBatch | EpisodeBatch] = {}

    def close(self) -> None:
        try:
            for batch in self.batches.values():
                if isinstance(batch, EpisodeBatch):
                    batch.running.stop()
        finally:
            self._stack.close()


class ContinuousGeneration:
    """Generates for batches of prompts that arrive while others are computed; its sessions stay open between calls.

    There is one session for each sampling configuration, since an evaluation may sample differently than training.
    A session without a batch is closed when a batch for another one arrives.

    sampling: the configuration that options of a batch override. context: says how many samples a prompt has, and how
    long one may be. runner: plays episodes; None: every sample is one response.
    """

    def __init__(
        self, engine: InferenceEngine, sampling: SamplingConfig, context: Context, runner: EpisodeRunner | None = None
    ) -> None:
        self.engine, self.sampling, self.context, self.runner = engine, sampling, context, runner
        self._sessions: dict[str, _OpenSession] = {}  # by their sampling, as JSON

    def add(self, number: int, prompts: Batch, *, samples: int | None = None, **overrides: Any) -> None:
        """Begin a batch, which ``advance`` returns by its ``number``; prompts and options as RolloutModule.generate's.
        Raises ValueError for a number that is in use and for a prompt that can never fit, and pydantic.ValidationError
        for a bad override. The other batches go on."""
        if number in self._batches:
            raise ValueError(f"batch {number} is being computed already")
        usual = self.context.samples_per_prompt
        unfinished, sampling = begin_generation(prompts, self.sampling, usual, samples=samples, **overrides)
        chosen = self._open(sampling)
        if self.runner is None:
            batch = _ResponseBatch(self.engine, chosen.session, unfinished, sampling, self.context.sample_tokens)
        else:
            batch = self.runner.begin(self.engine, chosen.session, unfinished, sampling)
        chosen.batches[number] = batch

    def advance(self, seconds: float) -> tuple[int, Batch, Stats] | None:
        """Compute until a batch is complete, at most ``seconds``; return its number, the batch and its statistics.

        Of several complete ones, returns that of the lowest number, at once. None: there is none. With any ``seconds``
        above 0 at least one step is computed. Raises EpisodesFailed if every episode of a batch failed; then only that
        batch is gone. After any other error (those of InferenceEngine.generate, EnvironmentBlocked) nothing is left of
        any batch.
        """
        end, left = time.monotonic() + seconds, seconds
        while (number := min((n for n, batch in self._batches.items() if batch.done), default=None)) is None:
            if left <= 0 or not self.unfinished:
                return None
            try:
                self._step(left)
            except BaseException:
                self.close()
                raise
            left = end - time.monotonic()
        [batch] = [opened.batches.pop(number) for opened in self._sessions.values() if number in opened.batches]
        return number, *batch.result()

    @property
    def waiting(self) -> int:
        """The number of samples, or of turns of episodes, that wait until the engine can begin them."""
        return sum(opened.session.unstarted for opened in self._sessions.values())

    @property
    def unfinished(self) -> bool:
        """Whether any batch has not been returned."""
        return bool(self._batches)

    def close(self) -> None:
        """End all sessions; batches that are not complete are lost. Later batches begin anew."""
        with ExitStack() as stack:
            for opened in self._sessions.values():
                stack.callback(opened.close)
            self._sessions = {}

    @property
    def _batches(self) -> dict[int, _ResponseBatch | EpisodeBatch]:
        return {number: batch for opened in self._sessions.values() for number, batch in opened.batches.items()}

    def _open(self, sampling: SamplingConfig) -> _OpenSession:
        """Open the session of a sampling unless it is open; close others that have no batch, to free their memory."""
        key = sampling.model_dump_json()
        for idle in [idle for idle, opened in self._sessions.items() if idle != key and not opened.batches]:
            self._sessions.pop(idle).close()
        if key not in self._sessions:
            self._sessions[key] = _OpenSession(self.engine, sampling)
        return self._sessions[key]

    def _step(self, seconds: float) -> None:
        """Compute one token of every session that can, or wait for environments, at most ``seconds``."""
        able = [opened.session for opened in self._sessions.values() if opened.session.unfinished]
        for session in able:
            with self.engine.stepping():
                session.step()
        if able:
            return
        batches = list(self._batches.values())
        if lost := sum(batch.missing for batch in batches if isinstance(batch, _ResponseBatch)):
            raise RuntimeError(f"the engine lost {lost} responses")
        if playing := [batch for batch in batches if isinstance(batch, EpisodeBatch) and not batch.done]:
            playing[0].running.wait(seconds)
