"""The embedded rollout engine: generates with weights that may change under it, between two tokens.

It knows no tokenizer, no Batch and no backend. What a token will be depends on the weights and on
(seed, group, index, position) only; linear.py says how the arithmetic keeps to that.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coalign.native import probe
from coalign.native.gate import Gate
from coalign.native.model import Model
from coalign.native.request import Request, Response
from coalign.native.run import OnToken, Run
from coalign.native.sampling import Sampling
from coalign.types import Status

Progress = Callable[[int, int, int], None]  # (responses finished, responses in all, tokens chosen)


class Engine:
    """Generates with ``model``.

    seed: of the sampling. max_sequences: decoded at once. kv_tokens: tokens the KV cache may hold (None: enough for
    max_sequences of the longest). prefill_tokens: prompt tokens in one forward (a longer prompt goes alone).
    end_tokens: ids that end a response. decode: token ids to text, for stop strings.
    """

    def __init__(
        self,
        model: Model,
        *,
        seed: int,
        max_sequences: int,
        kv_tokens: int | None,
        prefill_tokens: int,
        end_tokens: Iterable[int],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.model = model
        self.seed = seed
        self.max_sequences = max_sequences
        self.kv_tokens = kv_tokens
        self.prefill_tokens = prefill_tokens
        self.end_tokens = frozenset(end_tokens)
        self.decode = decode
        self.version = -1
        self._gate = Gate()
        self._turn = threading.Lock()
        self._running: Run | None = None

    def pause(self) -> None:
        """Stop at the next token boundary (any thread but the generating one); returns when nothing runs."""
        self._gate.hold()

    def resume(self) -> None:
        self._gate.release()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool) -> None:
        """Take new weights at a token boundary: later tokens, also of responses under way, come from ``version``.

        ``adopt`` shares the given tensors. While a run is open nobody may change them: it computes partly with
        packed copies. Raises ValueError for weights that do not fit, or an architecture that fails the first probe.
        """
        with self._gate.held():
            self.model.load(weights, adopt=adopt)
            if self.version < 0:
                probe.check(self.model)
            self.version = version
            if self._running is not None:
                self.model.pack()

    @contextlib.contextmanager
    def open(self, sampling: Sampling, on_token: OnToken | None = None) -> Iterator[Run]:
        """A Run that takes requests and, with ``advance``, computes. One at a time: a second caller waits.

        ``on_token(group, index, token)`` hears of every token as it is chosen, on the thread that advances; what it
        raises ends the call, and the engine is ready for the next one.
        """
        with self._turn, torch.inference_mode(), self.model.packed():
            with self._gate.held():
                run = self._running = Run(self, sampling, on_token)
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
        enough: int | None = None,
    ) -> list[list[Response]]:
        """The responses of each request, in the order of its samples.

        ``enough``: as soon as all samples of so many groups are at their end, the others are handed back as they are
        (PARTIAL). ``on_token``: see ``open``. Raises ValueError for a prompt that is empty, holds an unknown token, or
        can never fit.
        """
        missing: Counter[int] = Counter()  # samples of each group that are not at their end
        for request in requests:
            missing[request.group] += request.samples
        answers: list[list[Any]] = [[None] * request.samples for request in requests]

        def note(answer: list[Any], group: int, place: int, response: Response) -> None:
            answer[place] = response
            missing[group] -= response.status != Status.PARTIAL

        with self.open(sampling, on_token) as run:
            for request, answer in zip(requests, answers, strict=True):
                run.submit(request, partial(note, answer, request.group))
            while run.unfinished:
                if enough is not None and sum(not left for left in missing.values()) >= enough:
                    run.cut_all()
                self.advance(run)
                if progress is not None:
                    progress(run.finished, run.total, run.tokens_chosen)
        return answers
