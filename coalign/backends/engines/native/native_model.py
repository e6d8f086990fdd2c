"""The model that the native engine computes with: a transformers causal LM and the weights loaded into it.

Two probes run once for every model. ``check_against_transformers`` compares its logits with a plain forward, since an
architecture may use attention in a way that its declarations do not tell. ``is_invariant`` tests whether a sequence
gets the same bits in any batch; where it does not, another order or number of replicas may draw other tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coalign.backends.attention import check_attention, refuse_failure
from coalign.backends.engines.meta_model import TOLERANCE, MetaModel, compare_logits
from coalign.backends.engines.native import kernels
from coalign.backends.engines.native.cached_attention import (
    EXPERTS,
    NAME,
    REFUSAL,
    ROWS,
    STRIDE,
    DecodeAttention,
    KVCache,
    PrefillAttention,
    PrefillSequence,
    ShapeOnlyAttention,
    register_attention,
)
from coalign.backends.engines.native.kernels import PackedLinear, replace_linears
from coalign.backends.packing import join_neighbours
from coalign.backends.pretrained import MIXERS, choose_attention
from coalign.backends.routers import Routers
from coalign.backends.vision import install_embeddings
from coalign.backends.vision_language import find_body
from coalign.cpu import use_kernels
from coalign.data.images.processor import ImageProcessor
from coalign.types import TOKEN_COLUMNS, ImageSpan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NO_INTERFACE = "it does not use transformers' attention interface"


class NativeModel(MetaModel):
    """A causal LM on ``device`` in ``dtype`` that the native engine can run.

    ``record_experts``: the experts of each token are stored in the cache. Raises ValueError for a model that keeps
    state other than keys and values, or does not use transformers' attention interface, and NotImplementedError for
    attention that the engine does not compute.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        device: str,
        trust_remote_code: bool = False,
        record_experts: bool = False,
        images: ImageProcessor | None = None,
    ) -> None:
        self.record_experts = record_experts
        refusal = ValueError(REFUSAL.format(f"the model type `{config.model_type}`", NO_INTERFACE))
        more = {"trust_remote_code": trust_remote_code, "images": images}
        super().__init__(config, refusal, dtype=dtype, device=device, attention=register_attention(), **more)
        self.linears = replace_linears(self.module)
        if self.device.type == "cpu":
            use_kernels(self.module)
        self._packings = 0  # contexts of ``packed`` that are open

    def check(self) -> None:
        _refuse_foreign_state(self.module)
        probe = {"input_ids": torch.zeros(1, ROWS, dtype=torch.int64, device="meta")}
        probe["position_ids"] = torch.arange(ROWS, device="meta")[None]
        self.routers = Routers(self.module)
        with self.routers.watch(torch.ones(ROWS, device="meta")):
            check_attention(self.module, lambda: self.module(**probe, use_cache=False, kv=ShapeOnlyAttention()))
        if self.record_experts and self.routers.unfit:
            raise ValueError(f"the native engine cannot record experts: {self.routers.unfit}")

    @property
    def experts(self) -> tuple[int, int] | None:
        """The layers with experts, and how many a token has there; None if they are not recorded."""
        return (len(self.routers.modules), self.routers.chosen[0].shape[1]) if self.record_experts else None

    @contextlib.contextmanager
    def packed(self) -> Iterator[None]:
        """Let the linear layers compute with packed copies of their weights within this context. Contexts may overlap.
        Weights that change meanwhile are packed again by ``load``."""
        self._packings += 1
        if self._packings == 1:
            self._pack()
        try:
            yield
        finally:
            self._packings -= 1
            if not self._packings:
                for linear in self.linears:
                    linear.product = None

    def load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        super().load(weights, adopt=adopt)
        if self._packings:
            self._pack()

    def _pack(self) -> None:
        if self.kernel is not None:
            for linear in self.linears:
                linear.pack(self.kernel)

    @cached_property
    def kernel(self) -> kernels.KernelChoice | None:
        """The kernel of the linear layers; None: plain ones."""
        if self.device.type != "cpu":
            return None
        counts = Counter((layer.in_features, layer.out_features) for layer in self.linears)
        return kernels.choose_kernel(tuple(sorted(counts.items())), self.dtype)

    @property
    def variant_layers(self) -> list[str]:
        """The layers that may round a row differently in another batch, as far as is known without computing."""
        layers = kernels.list_variant_linears(self.kernel, self.dtype, self.device)
        if self.kernel is None:
            return layers
        invariant = (nn.Embedding, PackedLinear)
        modules = (m for m in self.module.modules() if not isinstance(m, invariant))
        unchecked = {type(m).__name__ for m in modules if any(p.dim() > 1 for p in m.parameters(recurse=False))}
        return layers + sorted(unchecked)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: PrefillAttention | DecodeAttention,
        rows: Tensor | None,
        spans: Sequence[ImageSpan] = (),
    ) -> Tensor:
        """Compute logits [len(rows), V] of packed ``tokens`` i64[T] at ``positions`` i64[T], or with M-RoPE [3, T]; T
        is a multiple of ROWS.

        ``rows`` i64: the rows whose logits are wanted (None: all). ``spans``: images among the tokens.
        """
        keep = 0 if rows is None else torch.cat([rows, rows[-1:].expand(-len(rows) % ROWS)])
        inputs = {"input_ids": tokens[None], "position_ids": positions[..., None, :], "logits_to_keep": keep}
        with contextlib.ExitStack() as stack:
            if spans:
                assert self.images is not None
                stack.enter_context(install_embeddings(find_body(self.module), self.images.embed(tokens, spans)))
            if self.record_experts:
                stack.enter_context(self.routers.watch(tokens))
            out = self.module(**inputs, use_cache=False, kv=kv)
        if self.record_experts:
            kv.store(EXPERTS, torch.stack(self.routers.chosen).to(TOKEN_COLUMNS["routed_experts"])[None])
        return out.logits[0] if rows is None else out.logits[0, : len(rows)]


def _refuse_foreign_state(module: PreTrainedModel) -> None:
    name, config = type(module).__name__, module.config.get_text_config()
    mixers = set(getattr(config, "layer_types", None) or ()) - MIXERS
    if mixers or module._is_stateful:
        raise ValueError(REFUSAL.format(name, f"it has layers other than causal attention {sorted(mixers)}"))
    if not module._supports_attention_backend or "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise ValueError(REFUSAL.format(name, NO_INTERFACE))


_STEPS = 4  # tokens decoded after the prefill


@torch.inference_mode()
def check_against_transformers(model: NativeModel) -> None:
    """Compare the logits of one short sequence, prefilled and then decoded, with a plain forward. Raises ValueError
    where they differ at more than half of the positions (in bfloat16 a router may flip at a few), and for a model that
    fails on such rows."""
    tokens = _probe_tokens(model)
    model.module.set_attn_implementation("eager")
    expected = model.module(input_ids=tokens[None], use_cache=False).logits[0, ROWS - 1 :].float()
    sees = model.images is not None
    model.module.set_attn_implementation(choose_attention(model.module.config, NAME, sees=sees))
    with _refuse_failure(model, ""):  # such as that of a layer that expects another layout in memory
        logits = _compute_stepwise(model, tokens)
    _check_logits(model, logits, expected, "")


@torch.inference_mode()
def check_images(model: NativeModel) -> None:
    """Raises ValueError unless a prompt with pictures, and tokens after it, have the logits of a plain forward."""
    if (images := model.images) is None:
        return
    prompt, spans = images.make_probe()
    tokens = torch.tensor([*prompt, *images.plain[5 : 5 + _STEPS]], device=model.device)
    with _refuse_failure(model, "with images: "):
        sdpa = {"": "sdpa"} | dict.fromkeys(model.module.config.sub_configs, "sdpa")
        model.module.set_attn_implementation(sdpa)
        expected = model.module(**images.list_plain_inputs(tokens, spans)).logits[0, len(prompt) - 1 :].float()
        model.module.set_attn_implementation(choose_attention(model.module.config, NAME, sees=True))
        logits = _compute_stepwise(model, tokens, prompt=len(prompt), spans=spans)
    _check_logits(model, logits, expected, "with images ")


def _refuse_failure(model: NativeModel, where: str) -> contextlib.AbstractContextManager[None]:
    return refuse_failure(lambda why: ValueError(REFUSAL.format(type(model.module).__name__, where + why)))


def _check_logits(model: NativeModel, logits: Tensor, expected: Tensor, where: str) -> None:
    error = compare_logits(logits, expected)
    if error > TOLERANCE[model.dtype]:  # false for NaN: generation reports weights that are NaN
        why = f"{where}its logits would differ from those of a plain forward by {error:.1e} of their spread"
        raise ValueError(REFUSAL.format(type(model.module).__name__, why))


@torch.inference_mode()
def is_invariant(model: NativeModel) -> bool:
    """Test whether the logits of that sequence have the same bits alone, among others, and continued after a cut."""
    tokens = _probe_tokens(model)
    alone, among = _compute_stepwise(model, tokens), _compute_stepwise(model, tokens, neighbours=2 * ROWS + 1)
    return torch.equal(alone, among) and torch.equal(alone[1:], _compute_continued(model, tokens))


def _probe_tokens(model: NativeModel) -> Tensor:
    return torch.arange(1, ROWS + _STEPS + 1, device=model.device) * 7919 % model.vocabulary


def _compute_stepwise(
    model: NativeModel, tokens: Tensor, neighbours: int = 0, prompt: int = ROWS, spans: Sequence[ImageSpan] = ()
) -> Tensor:
    """Prefill a ``prompt`` of so many tokens, with images, then decode the rest one by one. Returns logits of each
    step, float32 [n + 1, V]. ``neighbours``: the number of longer sequences computed with it, in the slots before its
    own."""
    slots, length = _round_up(neighbours + 1, ROWS), _round_up((3 if neighbours else 1) * len(tokens), STRIDE)
    cache, indices = KVCache(slots, length), torch.arange(length, device=model.device)
    fed, positions, sequences = [], [], []
    for slot in range(neighbours):
        start, count = len(positions), len(tokens) + slot
        fed += [(slot + i) % model.vocabulary for i in range(count)]
        positions += range(count)
        sequences.append(PrefillSequence(start, start + count, slice(slot, slot + 1)))
    images, start, shift = model.images if spans else None, len(positions), 0
    two_way = join_neighbours(spans) if images and images.has_two_way_images else ()
    probed = slice(neighbours, neighbours + 1)
    sequences.append(PrefillSequence(start, start + prompt, probed, two_way=two_way))
    fed, rotary = _pad(model, fed + tokens[:prompt].tolist(), [*positions, *range(prompt)])
    if images and (axes := images.find_positions(prompt, spans)) is not None:
        rotary, shift = F.pad(axes, (0, len(fed) - prompt)).to(model.device), images.find_shift(prompt, spans)
    last = torch.tensor([start + prompt - 1], device=model.device)
    out = [model.forward(fed, rotary, PrefillAttention(cache, sequences), last, spans)]
    for step in range(prompt, len(tokens)):
        fed, at = torch.zeros(2, slots, dtype=torch.int64, device=model.device)
        at[:neighbours] = indices[step + len(tokens) : step + len(tokens) + 1]
        fed[neighbours], at[neighbours] = tokens[step], step
        attention = DecodeAttention(cache, at, int(at.max()) + 1)
        out.append(model.forward(fed, at - shift, attention, None)[probed])
    return torch.cat(out).float()


def _compute_continued(model: NativeModel, tokens: Tensor) -> Tensor:
    """Compute the decoded steps in one prefill, as for a sample that continues. Returns logits, float32 [_STEPS, V]."""
    cache, count = KVCache(ROWS, _round_up(len(tokens), STRIDE)), len(tokens)
    prefill = PrefillAttention(cache, [PrefillSequence(0, count, slice(0, 1), decoded=_STEPS)])
    rows = torch.arange(ROWS, count, device=model.device)
    return model.forward(*_pad(model, tokens.tolist(), list(range(count))), prefill, rows).float()


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _pad(model: NativeModel, tokens: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
    padding = [0] * (-len(tokens) % ROWS)
    padded, at = (torch.tensor(values + padding, device=model.device) for values in (tokens, positions))
    return padded, at
