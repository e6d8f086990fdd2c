"""Models of transformers in plain torch, in one process or sharded over several with FSDP2.

Ranks can also share rows, layers and experts (coalign.backends.hf.parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from coalign.backends import checkpoint, optim, pretrained
from coalign.backends.base import HEADS, Measure, Outputs
from coalign.backends.engines.native import kernels
from coalign.backends.hf import layers as float8
from coalign.backends.hf import parallel as expert_parallel
from coalign.backends.hf import parallel as tensor_parallel
from coalign.backends.hf.heads import PackedModel
from coalign.backends.hf.layers import check_compile, compile_layers
from coalign.backends.hf.module import HuggingFaceModule
from coalign.backends.hf.parallel import RankMeshes
from coalign.backends.hf.rows import RankAxis, RowSharding
from coalign.backends.layout import Layout, pack
from coalign.backends.optim import WeightAverage
from coalign.backends.process_group import join_process_group
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context

# A row that every model can read, to compare a cut model with the whole one.
PROBE = Batch(torch.tensor([16]), {"tokens": torch.arange(16, dtype=torch.int32)})


class FSDPModule(HuggingFaceModule):
    """A causal LM, value model or reward model, frozen or trained."""

    parallel = ("tensor_parallel", "context_parallel", "expert_parallel", "dp_replicate")
    optimizer: optim.Optimizer | optim.CombinedOptimizer | None = None
    rows: RowSharding | None = None  # set over several ranks

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        if config.fp8:
            float8.check_float8_device_type(device, f"models.{name}.fp8")

    @classmethod
    def check_model(cls, model: PreTrainedModel, config: ModelConfig, name: str) -> None:
        super().check_model(model, config, name)
        tensor_parallel.check_cuts(model, decoder_layers(model), config, name)

    @classmethod
    def check_machine(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        if config.fp8:
            float8.check_float8(device, f"models.{name}.fp8")
        if config.compile:
            check_compile(device, f"models.{name}.compile")
        if config.optimizer.name == "adamw_8bit" and not config.frozen:
            optim.check_adamw_8bit()

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        if config.num_gpu or config.compute_dtype != "bfloat16" or kernels.has_bf16():
            return ()
        return (kernels.FLOAT32_INSTEAD,)

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        if (
            self.compute_dtype is not None
            and kernels.choose_compute_dtype(self.compute_dtype, self.device) == torch.float32
        ):
            self.compute_dtype = None

    def setup(self) -> None:
        """Join the other ranks and load the model. Raises what the checks of Module and pretrained.load raise."""
        self.check_before_setup()
        if self.context.world_size == 1:
            self.model = self._read(self.device)
            if self.config.fp8:
                float8.convert_to_float8(decoder_layers(self.model.model))
        else:
            join_process_group(self.context, host=self.config.cpu_offload)
            ranks = RankMeshes(self.config, self.device)
            self.rows = RowSharding(RankAxis.of(ranks.rows["context"]), RankAxis.of(ranks.rows["tensor"]))
            self.data = ranks.rows.get_group("data")
            self._load_sharded(ranks, self.rows)
        layers = decoder_layers(self.model.model)
        if self.config.compile:
            compile_layers(layers)
        if not self.config.frozen:
            self.optimizer = optim.build_optimizer(self.model.parameters(), self.config.optimizer, layers=layers)
            if self.config.ema:
                self.average = WeightAverage(self.model, self.config.ema.decay)

    def close(self) -> None:
        if self.context.world_size > 1:
            dist.destroy_process_group()

    # ---- methods of TrainableModule

    def run(self, micros: Sequence[Batch], loss: Measure | None = None, *, needs: Sequence[str] = ()) -> list[Outputs]:
        results = super().run(micros, loss, needs=needs)
        if loss is None and self.context.world_size > 1:
            cast(Any, self.model).reshard()  # as a backward does: readers of the weights expect shards
        return results

    def _forward(self, layout: Layout, needs: Sequence[str]) -> Outputs:
        if self.rows is None or self.rows.parts == 1:
            return super()._forward(layout, needs)
        part = self.rows.cut(layout)
        return self.rows.gather(super()._forward(part.layout, needs), part)

    def _gather(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def optimizer_step(self) -> float:
        assert self.optimizer is not None  # train_step refuses frozen models
        norm = optim.clip_gradients(self.model.parameters(), self.config.optimizer.clip_grad_norm)
        if norm < float("inf"):
            self._set_learning_rate()
            self.optimizer.step()
            if self.average:
                self.average.update()
        self.optimizer.zero_grad()
        self.arena.reserve(self.context.model, "gradients", 0)
        return norm

    def save(self, dir: str | Path) -> None:
        state = checkpoint.get_training_state(self.model, self.optimizer, self.average)
        checkpoint.save(dir, state, self.progress, alone=self.context.world_size == 1)

    def load(self, dir: str | Path) -> None:
        alone = self.context.world_size == 1
        self.restore_progress(checkpoint.load(dir, self.model, self.optimizer, self.average, alone=alone))

    # ---- building

    def _load_sharded(self, ranks: RankMeshes, rows: RowSharding) -> None:
        """Rank 0 reads the weights and sends every rank its shards; no other rank ever holds the whole model."""
        state, buffers, known = {}, {}, torch.zeros(1 if self.config.head == "reward" else len(PROBE["tokens"]) - 1)
        if self.context.rank == 0:
            full = self._read(torch.device("cpu"))
            state, buffers = full.state_dict(), dict(full.named_buffers())
            with torch.no_grad():
                known = full.eval()(pack(PROBE))[HEADS[self.config.head][0]].float()
        model = self._wrap(pretrained.build_skeleton(self.config, name=self.context.model))
        model.heads = rows.heads
        if self.config.fp8:
            float8.convert_to_float8(decoder_layers(model.model))
        cut(model, ranks)
        shard(model, ranks, self.compute_dtype, host=self.config.cpu_offload)
        model.to_empty(device="cpu" if self.config.cpu_offload else self.device)
        model.apply(partial(_buffers_to, self.device))
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        # Buffers outside of the state dict (rotary frequencies) are uninitialised.
        for name, buffer in model.named_buffers():
            if self.context.rank == 0:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, 0)
        self.model = model
        self._check_cut(known.to(self.device))

    def _check_cut(self, known: Tensor) -> None:
        """NotImplementedError unless the outputs for PROBE are those ``known`` from one process: a plan of cuts that
        does not fit its model would go unnoticed."""
        dist.broadcast(known, 0)
        [own] = self.run([PROBE])
        difference = float((own[HEADS[self.config.head][0]].float() - known).abs().max())
        if not difference < (0.01 if (self.config.compute_dtype or self.config.dtype) == "float32" else 0.5):
            raise NotImplementedError(
                f"model '{self.context.model}': {type(self.model.model).__name__}, cut over {self.context.world_size} "
                f"processes, does not compute what it does in one: outputs differ by {difference:.3g}"
            )


def cut(model: PackedModel, ranks: RankMeshes) -> None:
    """Distribute the experts of a model without weights, and cut its layers."""
    if ranks.experts is not ranks.whole:
        expert_parallel.apply_expert_parallel(model.model, ranks.experts["expert"])
    if ranks.layers is not ranks.whole:
        tensor_parallel.apply_tensor_parallel(model.model, decoder_layers(model.model), ranks.layers["tensor"])


def shard(model: PackedModel, ranks: RankMeshes, compute_dtype: torch.dtype | None, *, host: bool) -> None:
    """Apply FSDP2 to every decoder layer, separately to its distributed experts, and to the rest. Gradients are summed
    over ranks, not averaged: the loss has global denominators. ``host``: shards stay in the host's memory."""
    offload = CPUOffloadPolicy(pin_memory=ranks.whole.device_type == "cuda") if host else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    experts = expert_parallel.find_experts(model.model) if ranks.experts is not ranks.whole else []
    groups = [(experts, ranks.experts), (decoder_layers(model.model), ranks.layers), ([model], ranks.whole)]
    for module, mesh in ((module, mesh) for modules, mesh in groups for module in modules):
        sharded = fully_shard(module, mesh=ranks.sharding(mesh), mp_policy=precision, offload_policy=offload)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _buffers_to(device: torch.device, module: nn.Module) -> None:
    """Move buffers to where their module computes: they are not sharded."""
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of the classes in `_no_split_modules`. (Sharding replaces their class by a subclass.)"""
    blocks = set(model._no_split_modules or ())
    return [m for m in model.modules() if blocks & {kind.__name__ for kind in type(m).__mro__}]
