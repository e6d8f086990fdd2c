"""The contract of a generation engine: what a policy's module needs from whatever computes its tokens.

An engine implements two classes: a ``GenerationSession``, which takes requests and computes step by step, and an
``InferenceEngine``, which starts sessions and takes weights. Pausing, early ends, batches, environments and servers
follow from these, by session_driver.py. Nothing here knows a tokenizer, a Batch or a backend.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from coalign.backends.engines.request import OnDone, PartialResponse, Request, SubmittedRequest
from coalign.config.schema import SamplingConfig
from coalign.types import Status

OnToken = Callable[[int, int, int, float], None]  # (group, index, token, its log-prob)


class GenerationSession(ABC):
    """Takes requests and computes their responses in steps.

    Any thread may call ``submit``, ``cut`` and ``forget`` at any time; one thread calls ``step``. Leaving the session
    as a context closes it.

    arrived: requests since the last step. waiting: those with samples that have not started. ended: conversations that
    have had their last turn. tokens_chosen: tokens of all responses. tokens_prefilled, tokens_kept: prompt tokens that
    were computed, and that were found in the KV cache.
    """

    engine: InferenceEngine

    def __init__(self, engine: InferenceEngine, sampling: SamplingConfig, on_token: OnToken | None) -> None:
        self.engine, self.sampling, self.on_token = engine, sampling, on_token
        self.arrived: deque[SubmittedRequest] = deque()
        self.waiting: deque[SubmittedRequest] = deque()
        self.ended: deque[tuple[int, int]] = deque()
        self.tokens_chosen = self.tokens_prefilled = self.tokens_kept = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is unfinished, and free its memory; the engine stays usable."""
        self.engine.sessions.remove(self)

    # ---- what an engine implements

    @property
    @abstractmethod
    def active(self) -> Sequence[PartialResponse]:
        """The samples that are being computed."""

    @abstractmethod
    def take_active(self) -> Sequence[PartialResponse]:
        """Remove the active samples, with their keys and values, and return them as they are."""

    def drop_kept(self) -> None:  # noqa: B027
        """Drop keys and values of older weights that a request might reuse: of earlier turns and of waiting prompts."""

    @abstractmethod
    def step(self) -> None:
        """Start the requests that fit, then compute one token for every active sequence. Raises FloatingPointError for
        logits that are not finite."""

    # ---- what every session inherits

    @property
    def unfinished(self) -> bool:
        """Whether ``step`` has anything left to do."""
        return bool(self.arrived or self.waiting or self.active)

    @property
    def unstarted(self) -> int:
        """Samples that wait until the engine can compute them."""
        return sum(submitted.waiting for submitted in [*self.arrived, *self.waiting])

    def submit(self, request: Request, on_done: OnDone) -> SubmittedRequest:
        """Ask for responses. Each one is given to ``on_done(offset, response)`` on the thread that steps. The result
        can be passed to ``cut``. Raises ValueError for a prompt that is empty, holds an unknown token, or can never
        fit."""
        vocabulary, context = self.engine.vocabulary, self.engine.context
        submitted = SubmittedRequest.plan(request, self.sampling, on_done, vocabulary=vocabulary, context=context)
        self.arrived.append(submitted)
        return submitted

    def cut(self, *requests: SubmittedRequest) -> None:
        """End these requests at the next step: their samples come back as they are (PARTIAL)."""
        for request in requests:
            request.cut = True
            self.cut(*request.successors)

    def cut_all(self) -> None:
        self.cut(*self.arrived, *self.waiting, *(answer.submitted for answer in self.active))

    def forget(self, group: int, index: int) -> None:
        """Drop what the engine keeps of a conversation: it has had its last turn."""
        self.ended.append((group, index))

    def requeue(self, requests: Sequence[SubmittedRequest]) -> None:
        """Accept the successors of samples that were taken: they start before all others."""
        self.waiting.extendleft(requests[::-1])

    def restart(self) -> None:
        """Prefill the active samples again, with the tokens that they have, by the current weights. The result is the
        same as if another engine continued them."""
        self.requeue([answer.create_successor() for answer in self.take_active()])

    def count_prompt(self, submitted: SubmittedRequest, *, prefilled: int, kept: int) -> None:
        """Count tokens of a prompt that were computed, and that were found in the KV cache."""
        submitted.tokens_prefilled += prefilled
        submitted.tokens_kept += kept
        self.tokens_prefilled += prefilled
        self.tokens_kept += kept

    def record(self, answer: PartialResponse, token: int, logprob: float) -> Status | None:
        """Add the next token of a response; return the status if the response ends with it."""
        status = answer.add(token, logprob, self.engine.version, self.engine.end_tokens)
        self.tokens_chosen += 1
        if self.on_token is not None:
            request = answer.submitted.request
            self.on_token(request.group, request.first + answer.offset, token, logprob)
        return status

    def finish(self, answer: PartialResponse, status: Status) -> None:
        answer.submitted.on_done(answer.offset, answer.response(status))

    def finish_unstarted(self) -> None:
        """Return, as they are, the samples of requests that were cut before these started."""
        for submitted in [submitted for submitted in self.waiting if submitted.cut]:
            self.waiting.remove(submitted)
            for offset in range(submitted.started, submitted.request.samples):
                self.finish(PartialResponse(submitted, offset, None), Status.PARTIAL)


class InferenceEngine(ABC):
    """Generates with weights that may change between two tokens.

    ``version`` of the weights is -1 before any have been loaded. ``end_tokens``: ids that end a response. vocabulary:
    number of token ids. context: tokens of the longest sequence that the model can read; None: no limit.

    recomputes_kv: new weights compute the keys and values of unfinished responses again, so that what follows is a
    function of their tokens and these weights. Otherwise responses keep what the old weights computed, at no cost.
    """

    version = -1
    recomputes_kv = False
    end_tokens: frozenset[int] = frozenset()
    session_class: type[GenerationSession]
    vocabulary: int
    context: int | None

    def __init__(self) -> None:
        self._state = threading.Condition()  # guards _pauses and _stepping
        self._pauses = 0
        self._stepping = False
        self.sessions: list[GenerationSession] = []  # those that are open

    # ---- what an engine implements

    @abstractmethod
    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Take weights by their Hugging Face names: all of them the first time, later those that have changed.
        ``adopt``: the given tensors may be used as they are. Raises ValueError for weights that do not fit."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest sequence (prompt and response) that it can compute; None: no limit."""
        return self.context

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """The dtype to which all given weights are cast; None if there is not one for all."""
        return None

    @property
    def experts(self) -> tuple[int, int] | None:
        """The layers with experts, and how many a token has there, if responses say which; None if they do not. Known
        once weights are loaded."""
        return None

    def close(self) -> None:  # noqa: B027
        """Free memory and processes."""

    # ---- what every engine inherits

    def pause(self) -> None:
        """Stop at the next token; return when no step is running. Pauses nest. Not for the generating thread."""
        with self._state:
            self._pauses += 1
            self._state.wait_for(lambda: not self._stepping)

    def resume(self) -> None:
        """Undo one ``pause``. Raises RuntimeError without one."""
        with self._state:
            if not self._pauses:
                raise RuntimeError("resume without pause")
            self._pauses -= 1
            self._state.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool) -> None:
        """Take new weights between two tokens: later tokens, also of unfinished responses, come from ``version``. Not
        within ``stepping``. ``adopt`` shares the given tensors where the engine can. Do not change them while a session
        is open: it may compute with packed copies. Raises ValueError for weights that do not fit."""
        with self.paused():
            self._load(weights, adopt=adopt)
            self.version = version
            for session in self.sessions:
                session.drop_kept()
                if self.recomputes_kv:
                    session.restart()

    def open(self, sampling: SamplingConfig, on_token: OnToken | None = None) -> GenerationSession:
        """Open a session, whose steps are computed within ``stepping``. Several may be open, and take turns.
        ``on_token(group, index, token, logprob)`` is called for every token as it is chosen, on the thread that
        steps; what it raises, ``step`` raises."""
        with self.paused():
            session = self.session_class(self, sampling, on_token)
            self.sessions.append(session)
        return session

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within this context, entered once the engine is not paused, an open session may compute a step. One thread at
        a time is in it."""
        with self._state:
            self._state.wait_for(lambda: not self._pauses and not self._stepping)
            self._stepping = True
        try:
            yield
        finally:
            with self._state:
                self._stepping = False
                self._state.notify_all()
