"""The engine's model: a transformers causal LM built without weights, and the weights it is given.

Built on the meta device, it owns no memory until ``Model.load`` adopts the tensors of another model (zero copy) or
copies them.

Two short proofs, made once for every model: that the engine computes what transformers computes, and that a sequence
gets the same bits in any batch.

An architecture may use attention in a way that its declarations do not tell (positions counted from another number, one
layer's attention called twice). Then the engine's tokens would be plausible and wrong, so it refuses to run. Where bits
depend on the batch, it says so: tokens are right, but another order or number of replicas may draw others.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from coalign.backends.engines.native import attention, kernels
from coalign.backends.engines.native.attention import NAME, REFUSAL, ROWS, STRIDE, Decode, KVCache, Prefill, Segment
from coalign.backends.engines.native.kernels import Linear, replace_linears

NO_INTERFACE = "it does not use transformers' attention interface"
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Model:
    """A causal LM on ``device`` in ``dtype`` that the engine can drive.

    Raises ValueError for a model that keeps state other than keys and values, or does not use transformers' attention
    interface, and NotImplementedError for attention that the engine does not compute.
    """

    def __init__(
        self, config: PreTrainedConfig, *, dtype: torch.dtype, device: str, trust_remote_code: bool = False
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        with torch.device("meta"):
            self.module = _build(config, dtype, trust_remote_code).eval()
        _refuse_foreign_state(self.module)
        _refuse_foreign_attention(self.module)
        self.module.requires_grad_(False)
        _materialise_buffers(self.module, self.device)
        self.linears = replace_linears(self.module)
        self._homes = _homes(self.module)
        self._shared: set[str] = set()  # names whose storage belongs to somebody else

    @property
    def vocabulary(self) -> int:
        return self.module.get_input_embeddings().weight.shape[0]

    @property
    def context(self) -> int | None:
        """Tokens of the longest sequence that the architecture says it can read."""
        return getattr(self.module.config.get_text_config(), "max_position_embeddings", None)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Take parameters and persistent buffers by their Hugging Face names (of tied ones, one is enough): the first
        time all of them; what is not given later stays.

        ``adopt``: use the given tensors as storage where dtype and device allow. Otherwise copy into own storage, which
        is allocated the first time. Raises ValueError for missing, unexpected or misshapen names.
        """
        unexpected = []
        for name, tensor in weights:
            if name not in self._homes:
                unexpected.append(name)
                continue
            self._take(name, tensor.detach(), adopt)
        missing = sorted({home[0] for home in self._homes.values() if _get(self.module, home[0]).is_meta})
        if missing or unexpected:
            kind = type(self.module).__name__
            raise ValueError(f"the weights do not fit {kind}: missing {missing}, unexpected {sorted(unexpected)}")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What ``load`` takes: (name, live tensor), tied ones once."""
        for name in dict.fromkeys(names[0] for names in self._homes.values()):
            yield name, _get(self.module, name)

    def _take(self, name: str, tensor: Tensor, adopt: bool) -> None:
        aliases = self._homes[name]
        current = _get(self.module, name)
        if tensor.shape != current.shape:
            raise ValueError(f"weight '{name}' has shape {list(tensor.shape)}; the model needs {list(current.shape)}")
        if adopt and tensor.dtype == current.dtype and tensor.device == self.device:
            self._shared.add(aliases[0])
        elif current.is_meta or aliases[0] in self._shared:
            self._shared.discard(aliases[0])
            tensor = tensor.to(self.device, current.dtype, copy=True)
        else:
            current.copy_(tensor)
            return
        tensor = nn.Parameter(tensor, requires_grad=False) if isinstance(current, nn.Parameter) else tensor
        for alias in aliases:
            _set(self.module, alias, tensor)

    @contextlib.contextmanager
    def packed(self) -> Iterator[None]:
        """Within this context the linear layers compute with packed copies of their weights."""
        self.pack()
        try:
            yield
        finally:
            for linear in self.linears:
                linear.unpack()

    def pack(self) -> None:
        """Derive the packed copies from the current weights."""
        if self.kernel is not None:
            for linear in self.linears:
                linear.pack(self.kernel)

    @cached_property
    def kernel(self) -> kernels.KernelChoice | None:
        """Computes the linear layers. None: they are plain ones."""
        if self.device.type != "cpu" or self.dtype not in kernels.KERNELS or not self.linears:
            return None
        return kernels.choose(((layer.in_features, layer.out_features) for layer in self.linears), self.dtype)

    @property
    def variant_parts(self) -> list[str]:
        """What may compute a row in other bits when its batch changes, as far as it is known without computing."""
        if self.kernel is None:
            return [f"linear layers in {self.dtype} on {self.device.type}"]
        parts = [] if self.kernel.is_invariant else [f"linear layers by {self.kernel.name}"]
        known = (nn.Embedding, Linear)
        others = {type(m).__name__ for m in self.module.modules() if not isinstance(m, known) and _has_matrix(m)}
        return parts + sorted(others)

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: attention.Prefill | attention.Decode, rows: Tensor | None
    ) -> Tensor:
        """Logits [len(rows), V] of the packed ``tokens`` i64[T] at ``positions`` i64[T]; T a multiple of ROWS.

        ``rows`` i64: where logits are wanted (None: everywhere).
        """
        keep = 0 if rows is None else torch.cat([rows, rows[-1:].expand(-len(rows) % attention.ROWS)])
        out = self.module(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep, kv=kv
        )
        return out.logits[0] if rows is None else out.logits[0, : len(rows)]


def _build(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    try:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=trust_remote_code,
        )
    except KeyError as problem:  # some classes look attention up among a few of their own, and know no other
        if problem.args != (attention.NAME,):
            raise
        raise ValueError(REFUSAL.format(f"the model type `{config.model_type}`", NO_INTERFACE)) from problem


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _refuse_foreign_state(module: nn.Module) -> None:
    kind, config = type(module).__name__, module.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other or module._is_stateful:
        raise ValueError(REFUSAL.format(kind, f"it has layers other than causal attention {sorted(other)}"))
    if not module._supports_attention_backend or "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise ValueError(REFUSAL.format(kind, NO_INTERFACE))


@torch.no_grad()
def _refuse_foreign_attention(module: nn.Module) -> None:
    """Run a model without weights as far as no number decides what comes next. Raises UnsupportedAttention."""
    tokens = torch.zeros(1, attention.ROWS, dtype=torch.int64, device="meta")
    positions = torch.arange(attention.ROWS, device="meta")[None]
    try:
        module(input_ids=tokens, position_ids=positions, use_cache=False, kv=attention.Shapes())
    except attention.UnsupportedAttention:
        raise
    except RuntimeError:  # a router, say, has to know which experts it chose
        return


def _materialise_buffers(module: nn.Module, device: torch.device) -> None:
    """Give non-persistent buffers (rotary frequencies, embedding scales) their values: no checkpoint holds them."""
    rebuilt = []
    for name, child in module.named_modules():
        for key in child._non_persistent_buffers_set:
            buffer = child._buffers[key]
            if buffer is not None:
                fill = float("nan") if buffer.is_floating_point() else 0
                child._buffers[key] = torch.full_like(buffer, fill, device=device)
                rebuilt.append((f"{name}.{key}", child, key))
        # The initialiser writes what the constructor would have computed off the meta device.
        if child._non_persistent_buffers_set:
            module._init_weights(child)
    if lost := [name for name, child, key in rebuilt if child._buffers[key].isnan().any()]:
        raise ValueError(
            f"cannot rebuild the buffers {lost} of {type(module).__name__}: its _init_weights does not set them"
        )


def _homes(module: nn.Module) -> dict[str, list[str]]:
    """Every name of a weight -> all names of that weight (tied ones share a tensor), the first as its identity."""
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [(n, b) for n, b in module.named_buffers(remove_duplicate=False) if b.is_meta]
    groups: dict[int, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return {name: names for names in groups.values() for name in names}


def _get(module: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, tensor)


_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the logits' own spread; a wrong token shows about 1
_STEPS = 4  # tokens decoded after the prefill


@torch.inference_mode()
def check_against_transformers(model: Model) -> None:
    """Compare the logits of one short sequence, prefilled and then decoded, with a plain forward.

    Raises ValueError where they differ at more than half of the positions (in bfloat16 a router may tip at a few).
    """
    tokens = _tokens(model)
    expected, met = _plain(model, tokens), _by_engine(model, tokens)
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = ((met - expected).norm(dim=-1) / spread).median().item()
    if error > _TOLERANCE[model.dtype]:  # not so for NaN: weights that are not numbers are reported when they generate
        kind = type(model.module).__name__
        raise ValueError(
            f"the native engine cannot run {kind}: its logits would differ from those of a plain forward by "
            f"{error:.1e} of their spread"
        )


def _plain(model: Model, tokens: Tensor) -> Tensor:
    model.module.set_attn_implementation("eager")
    logits = model.module(input_ids=tokens[None], use_cache=False).logits[0, ROWS - 1 :]
    model.module.set_attn_implementation(NAME)
    return logits.float()


@torch.inference_mode()
def is_invariant(model: Model) -> bool:
    """Whether the logits of that sequence have the same bits alone, among others, and where it goes on after a cut."""
    tokens = _tokens(model)
    alone = _by_engine(model, tokens)
    return torch.equal(alone, _by_engine(model, tokens, others=2 * ROWS + 1)) and torch.equal(
        alone[1:], _continued(model, tokens)
    )


def _tokens(model: Model) -> Tensor:
    return torch.arange(1, ROWS + _STEPS + 1, device=model.device) * 7919 % model.vocabulary


def _by_engine(model: Model, tokens: Tensor, others: int = 0) -> Tensor:
    """Logits after ROWS tokens of the prompt and at each step behind them, float32 [_STEPS + 1, V]. ``others``: longer
    sequences beside it, in slots before its own."""
    slots, length = -(-(others + 1) // ROWS) * ROWS, _room((3 if others else 1) * len(tokens))
    cache, positions = KVCache(slots, length, lambda size: None), torch.arange(length, device=model.device)
    fed, places, segments = [], [], []
    for slot in range(others):
        start, count = len(places), len(tokens) + slot
        fed += [(slot + i) % model.vocabulary for i in range(count)]
        places += range(count)
        segments.append(Segment(start, start + count, slice(slot, slot + 1)))
    segments.append(Segment(len(places), len(places) + ROWS, slice(others, others + 1)))
    fed += tokens[:ROWS].tolist()
    places += range(ROWS)
    last = torch.tensor([len(places) - 1], device=model.device)
    out = [model.forward(*_padded(model, fed, places), Prefill(cache, segments), last)]
    for step in range(ROWS, len(tokens)):
        fed, at = torch.zeros(2, slots, dtype=torch.int64, device=model.device)
        at[:others] = positions[step + len(tokens) : step + len(tokens) + 1]
        fed[others], at[others] = tokens[step], step
        columns = int(at.max()) + 1
        out.append(model.forward(fed, at, Decode(cache, at, columns), None)[others : others + 1])
    return torch.cat(out).float()


def _continued(model: Model, tokens: Tensor) -> Tensor:
    """The logits of the steps where all tokens are there at once, as of a sample that goes on. float32 [_STEPS, V]"""
    cache, count = KVCache(ROWS, _room(len(tokens)), lambda size: None), len(tokens)
    whole = Prefill(cache, [Segment(0, count, slice(0, 1), decoded=_STEPS)])
    rows = torch.arange(ROWS, count, device=model.device)
    return model.forward(*_padded(model, tokens.tolist(), list(range(count))), whole, rows).float()


def _room(tokens: int) -> int:
    """Columns of a cache for so many tokens, as Slots has them."""
    return -(-tokens // STRIDE) * STRIDE


def _padded(model: Model, tokens: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
    padding = [0] * (-len(tokens) % ROWS)
    return tuple(torch.tensor(values + padding, device=model.device) for values in (tokens, positions))
