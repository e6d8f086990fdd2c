"""The embedded generation engine: computes with the trainer's own tensors where it can.

What a token will be depends on the weights and on (seed, group, index, position) only, as far as the arithmetic of this
machine keeps to that: kernels.py chooses it so, and probe.py tests it on every model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from coalign.generation.engine import InferenceEngine, OnToken
from coalign.generation.sampling import Sampling
from coalign.generation.stops import Decoder
from coalign.native import probe
from coalign.native.model import Model
from coalign.native.run import NativeRun

log = logging.getLogger(__name__)


class NativeEngine(InferenceEngine):
    """Generates with ``model``. ``is_invariant``, once weights are there: a token has the same bits in any batch.

    seed: of the sampling. max_sequences: decoded at once. kv_tokens: tokens the KV cache may hold (None: enough for
    max_sequences of the longest). prefill_tokens: prompt tokens in one forward (a longer prompt goes alone).
    end_tokens: ids that end a response. decoder: see coalign.generation.stops. reserve: hears how many bytes the KV
    cache is about to have, and may raise.
    """

    is_invariant = False

    def __init__(
        self,
        model: Model,
        *,
        seed: int,
        max_sequences: int,
        kv_tokens: int | None,
        prefill_tokens: int,
        end_tokens: Iterable[int],
        decoder: Decoder,
        reserve: Callable[[int], None] = lambda size: None,
    ) -> None:
        super().__init__()
        self.model = model
        self.seed = seed
        self.max_sequences = max_sequences
        self.kv_tokens = kv_tokens
        self.prefill_tokens = prefill_tokens
        self.end_tokens = frozenset(end_tokens)
        self.decoder = decoder
        self.reserve = reserve

    @property
    def weights_dtype(self) -> torch.dtype | None:
        kinds = {tensor.dtype for _, tensor in self.model.weights() if tensor.is_floating_point()}
        return kinds.pop() if len(kinds) == 1 else None

    @contextmanager
    def _run(self, sampling: Sampling, on_token: OnToken | None) -> Iterator[NativeRun]:
        with torch.inference_mode(), self.model.packed():
            try:
                yield NativeRun(self, sampling, on_token)
            finally:
                self.reserve(0)

    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Also raises ValueError for an architecture that fails the first probe."""
        self.model.load(weights, adopt=adopt)
        if self.version < 0:
            probe.check(self.model)
            with self.model.packed():
                self.is_invariant = probe.is_invariant(self.model)
            if not self.is_invariant:
                parts = ", ".join(self.model.variant_parts) or "its attention"
                log.warning(
                    "native engine: log-probs of %s may differ in their last bits from one batch to another (%s)",
                    type(self.model.module).__name__,
                    parts,
                )
        if self._running is not None:
            self.model.pack()
