"""Lets other threads hold the engine between two tokens.

What every generation engine is: the contract between a policy's module and whatever computes its tokens.

An engine of one's own implements two classes: a ``Run``, which takes requests and computes in steps, and an
``InferenceEngine``, which opens one and takes weights. Pausing in the middle, early ends, environments and the loop
over a batch follow from that, the same for all engines. It knows no tokenizer, no Batch and no backend.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from coalign.backends.engines.request import OnDone, Prompt, Request, Response
from coalign.backends.engines.sampling import Sampling
from coalign.types import Status


class Gate:
    """A step runs only while nobody holds the gate; ``hold`` returns once no step is running. Holds nest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holds = 0
        self._stepping = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._holds == 0)
            self._stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def hold(self) -> None:
        with self._changed:
            self._holds += 1
            self._changed.wait_for(lambda: not self._stepping)

    def release(self) -> None:
        """Undo one ``hold``; RuntimeError without one."""
        with self._changed:
            if not self._holds:
                raise RuntimeError("resume without pause")
            self._holds -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()


Progress = Callable[[int, int, int], None]  # (responses finished, responses in all, tokens chosen)
OnToken = Callable[[int, int, int], None]  # (group, index, token)


class Run(ABC):
    """Requests on their way. ``submit``, ``cut`` and ``forget`` may be called by any thread at any time, ``step`` by
    one.

    ``total``, ``finished``: responses. ``tokens_chosen``: of all of them. ``tokens_prefilled``, ``tokens_kept``: of
    prompts, computed and found in the cache. ``room``: tokens of the longest sequence (prompt and response) that can be
    computed, None without a limit.
    """

    def __init__(self, room: int | None) -> None:
        self.room = room
        self.total = self.finished = 0
        self.tokens_chosen = self.tokens_prefilled = self.tokens_kept = 0

    @property
    @abstractmethod
    def unfinished(self) -> bool:
        """Something is left to do for ``step``."""

    @abstractmethod
    def submit(self, request: Request, on_done: OnDone) -> Prompt:
        """Ask for responses; ``on_done(place, response)`` hears of each on the thread that steps.

        Returns what ``cut`` takes. Raises ValueError for a prompt that is empty, holds an unknown token, or can never
        fit.
        """

    def cut(self, *prompts: Prompt) -> None:
        """At the next step, hand the samples of these prompts back as they are (PARTIAL)."""
        for prompt in prompts:
            prompt.cut = True

    @abstractmethod
    def cut_all(self) -> None: ...

    def forget(self, group: int, index: int) -> None:  # noqa: B027
        """The conversation has had its last turn: nothing has to be kept of it."""

    @abstractmethod
    def step(self) -> None:
        """Start what fits, then one token for everybody. Raises FloatingPointError for logits that are not finite."""


class InferenceEngine(ABC):
    """Generates with weights that may change under it, between two tokens.

    ``version`` of the weights: -1 before there are any.
    """

    version = -1
    weights_dtype: torch.dtype | None = None  # of all weights, if it is one: to that it casts those it is given

    def __init__(self) -> None:
        self._gate = Gate()
        self._turn = threading.Lock()
        self._running: Run | None = None

    # ---- what an engine supplies

    @abstractmethod
    def _run(self, sampling: Sampling, on_token: OnToken | None) -> AbstractContextManager[Run]:
        """A run, and within the context all that has to hold while it computes. Entered while no weights come; leaving
        it ends what is unfinished."""

    @abstractmethod
    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Take weights by their Hugging Face names: the first time all of them, later those that have changed.

        ``adopt``: the given tensors may be used as they are. Raises ValueError for weights that do not fit.
        """

    def close(self) -> None:  # noqa: B027
        """Give back what was taken."""

    # ---- what follows from it

    def pause(self) -> None:
        """Stop at the next token boundary (any thread but the generating one); returns when nothing runs."""
        self._gate.hold()

    def resume(self) -> None:
        self._gate.release()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool) -> None:
        """Take new weights at a token boundary: later tokens, also of responses under way, come from ``version``.

        ``adopt`` shares the given tensors where the engine can. While a run is open nobody may change them: it may
        compute with packed copies. Raises ValueError for weights that do not fit.
        """
        with self._gate.held():
            self._load(weights, adopt=adopt)
            self.version = version

    @contextmanager
    def open(self, sampling: Sampling, on_token: OnToken | None = None) -> Iterator[Run]:
        """A Run that takes requests and, with ``advance``, computes. One at a time: a second caller waits.

        ``on_token(group, index, token)`` hears of every token as it is chosen, on the thread that advances; what it
        raises ends the call, and the engine is ready for the next one.
        """
        with self._turn, ExitStack() as stack:
            with self._gate.held():
                run = self._running = stack.enter_context(self._run(sampling, on_token))
            try:
                yield run
            finally:
                self._running = None

    def advance(self, run: Run) -> None:
        """One step of an open run, once nobody holds the engine."""
        with self._gate.step():
            run.step()

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        progress: Progress | None = None,
        on_token: OnToken | None = None,
        min_groups: int | None = None,
    ) -> list[list[Response]]:
        """The responses of each request, in the order of its samples; see ``in_parts``."""
        [answers] = self.in_parts(requests, [len(requests)], sampling, progress, on_token, min_groups)
        return answers

    def in_parts(
        self,
        requests: Sequence[Request],
        sizes: Sequence[int],
        sampling: Sampling,
        progress: Progress | None = None,
        on_token: OnToken | None = None,
        min_groups: int | None = None,
    ) -> Iterator[list[list[Response]]]:
        """The responses of the first ``sizes[0]`` requests, each in the order of its samples, as soon as all of them
        are there; then those of the next ones. All are computed together, and only while somebody asks for the next
        part; until the last one, nobody else can use the engine.

        ``min_groups``: as soon as all samples of so many groups are at their end, the others are handed back as they are
        (PARTIAL). ``on_token``: see ``open``. Raises ValueError for a prompt that is empty, holds an unknown token, or
        can never fit, RuntimeError if the engine says that it is done and a response is missing.
        """
        missing: Counter[int] = Counter()  # samples of each group that are not at their end
        for request in requests:
            missing[request.group] += request.samples
        answers: list[list[Any]] = [[None] * request.samples for request in requests]
        cuts = list(accumulate(sizes, initial=0))
        waiting = [sum(request.samples for request in requests[a:b]) for a, b in pairwise(cuts)]

        def note(answer: list[Any], group: int, part: int, place: int, response: Response) -> None:
            answer[place] = response
            missing[group] -= response.status != Status.PARTIAL
            waiting[part] -= 1

        with self.open(sampling, on_token) as run:
            for part, (start, stop) in enumerate(pairwise(cuts)):
                for request, answer in zip(requests[start:stop], answers[start:stop], strict=True):
                    run.submit(request, partial(note, answer, request.group, part))
            for part, (start, stop) in enumerate(pairwise(cuts)):
                while run.unfinished and (waiting[part] or stop == cuts[-1]):
                    if min_groups is not None and sum(not left for left in missing.values()) >= min_groups:
                        run.cut_all()
                    self.advance(run)
                    if progress is not None:
                        progress(run.finished, run.total, run.tokens_chosen)
                if waiting[part]:
                    asked = sum(request.samples for request in requests)
                    raise RuntimeError(f"the engine returned {asked - sum(waiting)} of {asked} responses")
                if part < len(sizes) - 1:
                    yield answers[start:stop]
        yield answers[cuts[-2] :]
