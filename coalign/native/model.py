"""The engine's model: a transformers causal LM built without weights, and the weights it is given.

Built on the meta device, it owns no memory until ``Model.load`` adopts the tensors of another model (zero copy) or
copies them.
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

from coalign.native import attention, kernels
from coalign.native.attention import REFUSAL
from coalign.native.linear import Linear, replace_linears

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
