"""Watches the routers of a transformers model, and has them choose given experts (routing replay, 2510.11370).

Which modules are routers, and which of their outputs are logits, transformers declares for each model
(`_can_record_outputs`). All of them choose experts by `torch.topk`, so the choice is read there, and replaced there.
The weights of the given experts then follow from the router's own logits, by the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from coalign.algorithms.routing import balance_loss, count_choices, describe_load, z_loss
from coalign.types import UNKNOWN_EXPERT, Stat, Stats


class ExpertChoice(TorchFunctionMode):
    """Reads what a router chooses of ``experts`` by topk, and replaces it by ``given`` i64[T, k]."""

    def __init__(self, experts: int, given: Tensor | None) -> None:
        super().__init__()
        self.experts, self.given = experts, given
        self.choices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        scores, (values, chosen) = args[0], out
        if scores.dim() != 2 or scores.shape[1] != self.experts:  # among groups of experts
            return out
        if self.given is not None:
            if self.given.shape[1] != chosen.shape[1]:
                raise ValueError(f"a router chooses {chosen.shape[1]} experts; {self.given.shape[1]} were recorded")
            chosen = torch.where(self.given == UNKNOWN_EXPERT, chosen, self.given)
            values = scores.gather(1, chosen)
        self.choices.append(chosen)
        return torch.return_types.topk((values, chosen))


class Routers:
    """The routers of a model, in the order of its layers. After a forward within ``watch``: ``logits`` [T, E] and
    ``chosen`` i64[T, k] of each layer, and the ``weights`` [T] of its tokens. ``unfit``: why they cannot be watched,
    once a forward has shown it. ``enabled``: whether ``watch`` keeps anything."""

    enabled = True

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(_find_routers(model))
        self.model_class = type(model).__name__
        self.unfit = None if self.modules else f"{self.model_class} declares no routers"
        self.logits: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.weights = torch.ones(0)
        self._given: Tensor | None = None
        self._watching = False
        for layer, (module, index) in enumerate(self.modules):
            experts = max((p.shape[0] for p in module.parameters() if p.dim() == 2), default=0)
            module.forward = partial(self._route, layer, index, experts, module.forward)

    @contextmanager
    def watch(self, weights: Tensor, given: Tensor | None = None) -> Iterator[None]:
        """Watch the forward within this context. ``given`` i[T, L, k]: experts to choose, until the next ``watch``:
        backward may compute layers again."""
        if given is not None and given.shape[1] != (count := len(self.modules)):
            raise ValueError(f"{self.model_class} has {count} routers; experts of {given.shape[1]} were recorded")
        self.forget()
        self.weights = weights
        self._given, self._watching = given, self.enabled and self.unfit is None
        try:
            yield
        finally:
            self._watching = False

    def _route(self, layer: int, index: int, experts: int, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        if not self._watching and self._given is None:
            return forward(*args, **kw)
        choice = ExpertChoice(experts, None if self._given is None else self._given[:, layer].long())
        with choice:
            out = forward(*args, **kw)
        logits = out[index] if isinstance(out, tuple) else out
        if len(choice.choices) != 1 or logits.shape != (len(choice.choices[0]), experts):
            self.unfit = f"the routers of {self.model_class} do not choose experts by one topk over their logits"
            if self._given is not None:
                raise NotImplementedError(self.unfit)
        elif self._watching:
            self.logits.append(logits)
            self.chosen.append(choice.choices[0])
        return out

    def forget(self) -> None:
        """Drop what the last forward left."""
        self.logits, self.chosen = [], []

    def count(self) -> Tensor:
        """The tokens of each expert in the last forward, f64[L, E]."""
        pairs = zip(self.chosen, self.logits, strict=True)
        return torch.stack([count_choices(chosen, self.weights, logits.shape[1]) for chosen, logits in pairs]).detach()


@dataclass(frozen=True, slots=True)
class RouterCoefficients:
    """Factors of the routers' losses. They are means over ``layers``, and over all ``tokens`` of an update."""

    aux_loss: float
    z_loss: float
    layers: int
    tokens: float

    def __bool__(self) -> bool:
        return bool(self.aux_loss or self.z_loss)


class RouterTotals:
    """Sums up the routing of an update: counts f64[L, E] of tokens, and the values of the routers' losses."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.losses: dict[str, float] = {}

    def add_counts(self, counts: Tensor) -> None:
        self.counts = counts if self.counts is None else self.counts + counts

    def compute_loss(self, logits: Tensor, weights: Tensor, counts: Tensor, factors: RouterCoefficients) -> Tensor:
        """Return one layer's share of the losses for the tokens of ``logits`` [T, E]. ``counts`` f64[E] are those of
        the whole update."""
        weights, total = weights.to(logits.device, torch.float32), torch.zeros((), device=logits.device)
        if factors.aux_loss:
            value = balance_loss(logits, weights, counts.to(logits.device), factors.tokens) / factors.layers
            self._note("aux_loss", value)
            total = total + factors.aux_loss * value
        if factors.z_loss:
            value = z_loss(logits, weights, factors.tokens) / factors.layers
            self._note("z_loss", value)
            total = total + factors.z_loss * value
        return total

    def _note(self, name: str, value: Tensor) -> None:
        self.losses[name] = self.losses.get(name, 0.0) + float(value.detach())

    def describe(self, add_up: Callable[[Tensor], Tensor]) -> Stats:
        """Return the statistics of the update, and begin another. ``add_up`` adds values over the ranks."""
        if self.counts is None:
            return {}
        names, size = sorted(self.losses), self.counts.numel()
        losses = [self.losses[name] for name in names]
        summed = add_up(torch.tensor([*self.counts.flatten().tolist(), *losses], dtype=torch.float64)).cpu()
        load = describe_load(summed[:size].view(self.counts.shape))
        self.counts, self.losses = None, {}
        return load | {f"router/{n}": Stat(v) for n, v in zip(names, summed[size:].tolist(), strict=True)}


def _find_routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield (module, the index of the logits in its output)."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import OutputRecorder

    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    declared = [(module._can_record_outputs or {}).get("router_logits") or [] for module in inner]
    entries = [entry for outputs in declared for entry in (outputs if isinstance(outputs, list) else [outputs])]
    recorders = [entry if isinstance(entry, OutputRecorder) else OutputRecorder(entry) for entry in entries]
    for name, module in model.named_modules():
        for recorder in recorders:
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                yield module, recorder.index
                break
