"""What all backends that run models of transformers over packed rows have in common.

Log-probs come from coalign.backends.hf.heads, attention over packed sequences from coalign.backends.attention, the
order of events in a training step from coalign.backends.base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coalign.backends import lora, pretrained
from coalign.backends.base import HEADS, Measure, Outputs, TrainableModule
from coalign.backends.hf import layers
from coalign.backends.hf.heads import LanguageModel, PackedModel, ScalarModel
from coalign.backends.layout import Layout, pack
from coalign.backends.optim import WeightAverage
from coalign.backends.process_group import all_reduce_values, enforce_determinism
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.memory import get_storage
from coalign.roles import Context

# glibc maps larger blocks anew each time, page by page: larger activations made a step 13 % slower.
CPU_BLOCK = 32 * 2**20


class HuggingFaceModule(TrainableModule):
    """A causal LM, value model or reward model, frozen or trained.

    A subclass sets ``model``, and ``optimizer`` if the model is trained. It overrides `_forward`, `_backward` and
    `_gather` where its library works differently.
    """

    adapters = True
    model: PackedModel
    optimizer: Any = None
    average: WeightAverage | None = None
    data: dist.ProcessGroup | None = None  # of one rank for each part of the batch; None: all ranks

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        model = pretrained.build_skeleton(config, name=name)
        cls.check_model(model, config, name)
        PackedModel(model).check()

    @classmethod
    def check_model(cls, model: PreTrainedModel, config: ModelConfig, name: str) -> None:
        """Raises ValueError for what ``model``, with or without weights, cannot do as ``config`` says."""
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            raise ValueError(
                f"models.{name}.load: config.json of {config.load} sets `output_router_logits: true`, for a loss that "
                "balances experts and that Coalign does not compute; set it to false there"
            )

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        self.device = torch.device(context.device)
        compute = getattr(torch, config.compute_dtype or config.dtype)
        self.compute_dtype = compute if compute != getattr(torch, config.dtype) else None
        if config.deterministic:
            enforce_determinism()

    # ---- what a subclass may override

    def _forward(self, layout: Layout, needs: Sequence[str]) -> Outputs:
        with self._autocast():
            return self.model(layout.to(self.device), needs=needs)

    def _backward(self, loss: Tensor) -> None:
        """Add its gradient. Losses have global denominators, so gradients are sums over micro-batches and ranks."""
        loss.backward()

    def _gather(self, tensor: Tensor) -> Tensor:
        """The full tensor of a weight that may be sharded. A collective."""
        return tensor

    # ---- methods of TrainableModule

    def run(self, micros: Sequence[Batch], loss: Measure | None = None, *, needs: Sequence[str] = ()) -> list[Outputs]:
        self.model.train(loss is not None)
        if loss is not None:  # the optimizer step releases it
            self.arena.reserve(self.context.model, "gradients", self._gradient_size)
        results = []
        for micro in micros:
            layout = pack(micro, share_prefix=self.config.share_prefix)
            with torch.set_grad_enabled(loss is not None):
                outputs = self._forward(layout, needs)
                if loss is not None:
                    self._backward(loss(micro, outputs))
            results.append({name: out.detach() for name, out in outputs.items()})
        return results

    def _set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def token_budget(self, longest: int) -> int | None:
        budget = self.config.max_tokens_per_micro
        if self.device.type != "cpu":
            return budget
        fits = max(CPU_BLOCK // (4 * widest_output(self.model.model)), longest)
        return fits if budget is None else min(budget, fits)

    def all_reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        if self.context.world_size == 1:
            return list(values)
        return all_reduce_values(values, op, self.device, self.data)

    @property
    def exports(self) -> bool:
        return True

    def export_weights(self, *, changing: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Weights are gathered one by one; the rank that has yielded the fewest bytes so far yields the next."""
        export = lora.export_merged if self.context.adapter_rank is None else lora.export_separate
        yielded = [0] * self.context.world_size
        for name, tensor in export(self.model.model, self._gather, changing=changing):
            owner = yielded.index(min(yielded))
            yielded[owner] += tensor.nbytes
            if owner == self.context.rank:
                yield name, tensor.detach()

    def save_hf(self, dir: str | Path, *, average: bool = False) -> None:
        if average and self.average is None:
            raise ValueError(f"model '{self.context.model}' keeps no average of its weights (ema)")
        with self.average.swap_in() if average and self.average else nullcontext():
            weights = {}
            for name, tensor in lora.export_merged(self.model.model, self._gather):
                if self.context.rank == 0:
                    weights[name] = tensor.detach()
            if self.context.rank == 0:
                pretrained.save(self.model.model, weights, self.config, dir)

    def save_adapter(self, dir: str | Path) -> None:
        lora.save(self.model.model, dir, self._gather, write=self.context.rank == 0)

    def base_weights(self) -> AbstractContextManager[None]:
        if not pretrained.has_adapters(self.config):
            return super().base_weights()
        return lora.disable_adapters(self.model)

    @property
    def constant(self) -> Sequence[str]:
        return ("weights",) if self.config.frozen else ()

    def tensors(self, part: str) -> Iterable[Tensor]:
        if part == "weights":
            return self.model.parameters()  # without buffers, which are small
        if part == "gradients":
            return [p.grad for p in self.model.parameters() if p.grad is not None]
        if part == "optimizer" and self.optimizer is not None:
            entries = (value for state in self.optimizer.state.values() for value in state.values())
            averages = self.average.tensors.values() if self.average else ()
            return [*(value for value in entries if isinstance(value, Tensor)), *averages]
        return ()

    @property
    def _gradient_size(self) -> int:
        """Bytes, on this rank's device."""
        here = (p for p in self.model.parameters() if p.requires_grad and p.device.type == self.device.type)
        return sum(get_storage(p).nbytes() for p in here)

    # ---- building

    def _read(self, device: torch.device) -> PackedModel:
        """Load the whole model. Raises what coalign.backends.pretrained raises."""
        model = self._wrap(pretrained.load(self.config, seed=self.context.seed, name=self.context.model)).to(device)
        model.check()
        return model

    def _wrap(self, model: PreTrainedModel) -> PackedModel:
        """The model with the head that it computes with, after `check_model`."""
        self.check_model(model, self.config, self.context.model)
        if self.config.frozen:
            model.requires_grad_(False)
        elif self.config.activation_checkpointing:
            layers.recompute_layers(model, self.config.activation_checkpointing)
        if self.config.head == "lm":
            # Greedy sampling (temperature 0) has no distribution of its own; log-probs are then at temperature 1.
            temperature = self.config.sampling.temperature or 1.0
            return LanguageModel(model, temperature=temperature, top=self.config.candidates)
        return ScalarModel(model, output=HEADS[self.config.head][0])

    def _autocast(self) -> AbstractContextManager[object]:
        # Over several ranks, the library that shards the parameters also casts them.
        if self.compute_dtype is None or self.context.world_size > 1:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


def widest_output(model: PreTrainedModel) -> int:
    """The largest number of outputs per token of any linear layer below the head."""
    linears = [m for m in model.base_model.modules() if isinstance(m, nn.Linear | Conv1D)]
    widths = (m.nf if isinstance(m, Conv1D) else m.out_features for m in linears)
    return max(widths, default=model.config.get_text_config().hidden_size)
