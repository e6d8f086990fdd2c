"""The model of the engine on transformers' own cache, and the rows that it computes together.

A model keeps what it needs of earlier tokens in an object of its own making: keys and values, states of convolutions,
recurrent states. Here that object is only a tree of tensors, whose first dimension is the row. So rows are chosen,
repeated and joined alike for every architecture.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from coalign.backends.engines.meta_model import TOLERANCE, MetaModel, compare_logits
from coalign.backends.pretrained import MIXERS, describe_encoder

log = logging.getLogger(__name__)

CACHES = ("past_key_values", "cache_params", "state")  # what transformers' models call their cache
REFUSAL = "`module: transformers` cannot sample from {}: {}"
_PROMPTS, _STEPS = (9, 5, 10), 4  # tokens of the probe's prompts, and of what follows each
BATCHINGS = ("padded", "equal", "whole")  # from the fastest to the one that asks least of a model


@dataclass(slots=True, eq=False)
class CachedRows:
    """Rows of tokens that a model has computed, padded on the left to one ``length``.

    padding: i64[B] places of each row that hold no token. state: the model's cache.
    """

    padding: Tensor
    length: int = 0
    state: Any = None

    def select(self, rows: Sequence[int]) -> CachedRows:
        """Copy these rows; one may come several times. Padding that all of them share is dropped."""
        index = torch.tensor(rows, device=self.padding.device)
        padding = self.padding[index]
        excess = int(padding.min())
        length = self.length - excess

        def change(tensors: Sequence[Tensor]) -> Tensor:
            chosen = tensors[0].index_select(0, index)
            # Only keys and values are ever padded. A sliding window holds fewer of them than the row is long.
            return chosen[..., -min(length, chosen.shape[-2]) :, :] if excess else chosen

        return CachedRows(padding - excess, length, _combine([self.state], change, length))

    def join(self, other: CachedRows) -> CachedRows:
        """Put other rows below these; the shorter ones get more padding."""
        length = max(self.length, other.length)
        padding = torch.cat([rows.padding + (length - rows.length) for rows in (self, other)])

        def change(tensors: Sequence[Tensor]) -> Tensor:
            if self.length != other.length:
                widest = max(tensor.shape[-2] for tensor in tensors)
                tensors = [F.pad(tensor, (0, 0, widest - tensor.shape[-2], 0)) for tensor in tensors]
            return torch.cat(list(tensors))

        return CachedRows(padding, length, _combine([self.state, other.state], change, length))

    def count_bytes(self) -> int:
        sizes: list[int] = []

        def count(tensors: Sequence[Tensor]) -> Tensor:
            sizes.append(tensors[0].nbytes)
            return tensors[0]

        _combine([self.state], count, self.length)
        return sum(sizes)


def _combine(states: Sequence[Any], change: Callable[[Sequence[Tensor]], Tensor], length: int) -> Any:
    """Build a cache whose tensors are made by ``change`` of those at the same place in ``states``."""
    first = states[0]
    if isinstance(first, Tensor):
        return change(states) if first.dim() > 1 else first
    if isinstance(first, dict):
        return {key: _combine([state[key] for state in states], change, length) for key in first}
    if isinstance(first, list | tuple):
        return type(first)([_combine(entries, change, length) for entries in zip(*states, strict=True)])
    if isinstance(first, type | PreTrainedConfig) or not hasattr(first, "__dict__"):
        return first
    made = copy.copy(first)
    vars(made).update(_combine([vars(state) for state in states], change, length))
    if hasattr(first, "cumulative_length"):  # sliding windows: the tokens seen, of which they hold the last ones
        made.cumulative_length = length
    return made


class TransformersModel(MetaModel):
    """Any causal LM of transformers, with the attention that transformers chooses for it.

    ``batching``, which rows are computed together (BATCHINGS):
    padded: all of them; shorter ones are padded on the left, and the padding is masked.
    equal: rows of one length, for models that keep more than keys and values.
    whole: rows of one length, each from its first token at every step, for models without a usable cache.

    Raises ValueError for an encoder, and for a model type of which transformers has no causal LM.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        device: str,
        batching: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        kind = f"the model type `{config.model_type}`"
        refusal = ValueError(REFUSAL.format(kind, "transformers cannot build it"))
        super().__init__(config, refusal, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        parameters = inspect.signature(self.module.forward).parameters
        known = lambda name: name in parameters  # noqa: E731
        self.takes_positions, self.takes_mask = known("position_ids"), known("attention_mask")
        self.selects_logits = known("logits_to_keep")
        self.cache = next(filter(known, CACHES), None)
        takes_switch = known("use_cache") or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.switch = {"use_cache": self.cache is not None} if takes_switch else {}
        self.forced = batching
        self.batching = batching or self.choose_batching()

    def check(self) -> None:
        if reason := describe_encoder(self.module):
            raise ValueError(REFUSAL.format(type(self.module).__name__, reason))

    def choose_batching(self) -> str:
        """Choose by what the architecture declares; the probe may find that less holds."""
        if self.cache is None:
            return "whole"
        layers = set(getattr(self.module.config.get_text_config(), "layer_types", None) or ())
        stateful = self.module._is_stateful or layers - MIXERS - {"chunked_attention"}
        return "padded" if self.cache == CACHES[0] and self.takes_mask and not stateful else "equal"

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, CachedRows]:
        """Compute prompts, of one length unless rows are padded. Returns the logits f[B, V] after them."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        tokens = [[0] * count + list(prompt) for count, prompt in zip(padding, prompts, strict=True)]
        rows = CachedRows(torch.tensor(padding, device=self.device))
        return self.extend(rows, self._as_tensor(tokens)), rows

    def extend(self, rows: CachedRows, tokens: Tensor) -> Tensor:
        """Compute tokens i64[B, n] that follow ``rows``, and add them there. Returns the logits f[B, V] after them."""
        start, rows.length = rows.length, rows.length + tokens.shape[1]
        inputs: dict[str, Any] = {"logits_to_keep": 1} if self.selects_logits else {}
        off = {key: False for key in self.switch}
        if self.batching == "whole":
            tokens = tokens if rows.state is None else torch.cat([rows.state[..., 0], tokens], 1)
            rows.state = tokens[..., None]
            return self.module(input_ids=tokens, **inputs, **off).logits[:, -1]
        assert self.cache is not None
        places = torch.arange(rows.length, device=self.device) - rows.padding[:, None]
        if bool(rows.padding.any()):
            inputs["attention_mask"] = (places >= 0).long()
        if self.takes_positions:
            inputs["position_ids"] = places[:, start:].clamp(min=0)
        if rows.state is not None:
            inputs[self.cache] = rows.state
        out = self.module(input_ids=tokens, **inputs, **self.switch)
        rows.state = getattr(out, self.cache, None)
        return out.logits[:, -1]

    @torch.inference_mode()
    def probe(self) -> None:
        """Compare logits computed with the cache, among other rows, with those of plain forwards.

        Where they differ, take the next stricter batching. Raises ValueError if none is left, or if one was asked for.
        """
        kind, tolerance = type(self.module).__name__, TOLERANCE[self.dtype]
        declared, reason = self.batching, ""
        for batching in [declared] if self.forced else BATCHINGS[BATCHINGS.index(declared) :]:
            self.batching = batching
            try:
                error = self._measure_error()
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:  # some models fail on rows that others compute
                reason = f"{type(problem).__name__}: {shorten(str(problem), 200)}"
                continue
            if not error > tolerance:  # weights that are not numbers are reported by generation
                if batching != declared:
                    log.warning("module transformers: %s is exact only with `batching: %s`", kind, batching)
                return
            reason = f"its logits differ from those of a plain forward by {error:.1e} of their spread"
        raise ValueError(REFUSAL.format(kind, f"{reason} (batching: {self.batching})"))

    def _measure_error(self) -> float:
        """Feed short texts through all that generation does with rows; see compare_logits."""
        texts = [
            [(7919 * place + 31 * number + 5) % self.vocabulary for place in range(length + _STEPS)]
            for number, length in enumerate(_PROMPTS)
        ]
        off = {key: False for key in self.switch}
        whole = [self.module(input_ids=self._as_tensor([text]), **off).logits[0] for text in texts]
        found: list[list[Tensor]] = [[] for _ in texts]
        expected: list[list[Tensor]] = [[] for _ in texts]

        def note(names: list[int], logits: Tensor, rows: CachedRows) -> CachedRows:
            ends = (rows.length - rows.padding - 1).tolist()
            for name, row, end in zip(names, logits, ends, strict=True):
                found[name].append(row)
                expected[name].append(whole[name][end])
            return rows

        def begin(*names: int) -> CachedRows:
            return note([*names], *self.prefill([texts[name][: _PROMPTS[name]] for name in names]))

        def feed(names: list[int], rows: CachedRows, count: int = 1) -> CachedRows:
            starts = (rows.length - rows.padding).tolist()
            tokens = [texts[name][start : start + count] for name, start in zip(names, starts, strict=True)]
            return note(names, self.extend(rows, self._as_tensor(tokens)), rows)

        first = feed([0, 0], begin(0).select([0, 0]))
        if self.batching == "padded":
            rows = feed([0, 0, 1, 2], first.join(begin(1, 2)))
            feed([1], feed([1], rows.select([2])), count=2)
        else:
            same, other = first.join(begin(2)), begin(1)
            for _ in range(2):
                feed([0, 0, 2], same)
                feed([1], other)
            feed([2], same.select([2]))
        # Of each text: where positions count padding, only the shortest shows it.
        pairs = zip(found, expected, strict=True)
        return float(torch.tensor([compare_logits(torch.stack(a), torch.stack(b)) for a, b in pairs]).max())

    def _as_tensor(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(tokens, device=self.device)
