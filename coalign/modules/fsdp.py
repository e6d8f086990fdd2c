"""Hugging Face models in torch: one process is the plain case; several ranks shard everything with FSDP2, and share
rows, layers and experts as coalign.modules.parallel says.

It knows no loss and no family of models: log-probs come from coalign.modules.heads, attention over packed sequences
from coalign.modules.attention, the order of events from coalign.modules.base.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.memory.copying import storage_of
from coalign.modules import checkpoint, lora, optim, pretrained, recompute
from coalign.modules.base import HEADS, Measure, Outputs, TrainableModule
from coalign.modules.ema import Average
from coalign.modules.heads import LanguageModel, PackedModel, ScalarModel
from coalign.modules.layout import Layout, pack
from coalign.modules.parallel import blocks, checks, experts
from coalign.modules.parallel.ranks import Ranks
from coalign.modules.parallel.rows import Rows
from coalign.modules.schedule import learning_rate
from coalign.types import Context

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# A row that every model can read.
PROBE = Batch(torch.tensor([16]), {"tokens": torch.arange(16, dtype=torch.int32)})
# glibc maps a larger block afresh each time, page by page: activations beyond it made a step 13 % slower.
CPU_BLOCK = 32 * 2**20


class FSDPModule(TrainableModule):
    """A causal LM, value model or reward model, frozen or trained."""

    adapters = True
    parallel = ("tensor_parallel", "context_parallel", "expert_parallel", "dp_replicate")
    model: PackedModel
    optimizer: optim.Optimizer | optim.SideBySide | None = None
    average: Average | None = None
    rows: Rows | None = None  # over several ranks

    @classmethod
    def one_group(cls, config: ModelConfig) -> bool:
        return not config.frozen or any(getattr(config, key) > 1 for key in cls.parallel)

    @classmethod
    def check_parallel(cls, model: pretrained.PreTrainedModel, config: ModelConfig, name: str) -> None:
        checks.check(model, decoder_layers(model), config, name)

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        self.device = torch.device(context.device)
        compute = getattr(torch, config.compute_dtype or config.dtype)
        self.compute_dtype = compute if compute != getattr(torch, config.dtype) else None
        if config.deterministic:  # in all of this process
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def setup(self) -> None:
        """Load the model; with several ranks join the others first. Raises what coalign.modules.pretrained raises."""
        if self.context.world_size == 1:
            self.model = self._wrap(self._read()).to(self.device)
            self.model.check()
        else:
            join(self.context, host=self.config.cpu_offload)
            ranks = Ranks(self.config, self.device)
            self.rows = Rows(ranks.rows)
            self._load_sharded(ranks)
        if self.config.frozen:
            self.model.requires_grad_(False)
        else:
            layers = decoder_layers(self.model.model)
            self.optimizer = optim.build(self.model.parameters(), self.config.optimizer, layers=layers)
            if self.config.ema:
                self.average = Average(self.model, self.config.ema.decay)

    def close(self) -> None:
        if self.context.world_size > 1:
            dist.destroy_process_group()

    # ---- verbs of TrainableModule

    def run(self, micros: Sequence[Batch], loss: Measure | None = None, *, needs: Sequence[str] = ()) -> list[Outputs]:
        self.model.train(loss is not None)
        if loss is not None:  # until the optimizer clears them
            self.arena.reserve(self.context.model, "gradients", self._gradient_size)
        results = []
        for micro in micros:
            layout = pack(micro, share_prefix=self.config.share_prefix)
            with torch.set_grad_enabled(loss is not None):
                outputs = self._outputs(layout, needs)
                if loss is not None:
                    loss(micro, outputs).backward()
            results.append({name: out.detach() for name, out in outputs.items()})
        if loss is None and self.context.world_size > 1:
            self.model.reshard()  # a backward would have done it; whoever reads the weights next expects shards
        return results

    def _outputs(self, layout: Layout, needs: Sequence[str]) -> Outputs:
        if self.rows is None or self.rows.parts == 1:
            with self._autocast():
                return self.model(layout.to(self.device), needs=needs)
        part = self.rows.part(layout)
        return self.rows.whole(self.model(part.layout.to(self.device), needs=needs), part)

    def optimizer_step(self) -> float:
        norm = optim.clip(self.model.parameters(), self.config.optimizer.clip_grad_norm)
        if norm < float("inf"):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate
            self.optimizer.step()
            if self.average:
                self.average.update()
        self.optimizer.zero_grad()
        self.arena.reserve(self.context.model, "gradients", 0)
        return norm

    @property
    def learning_rate(self) -> float:
        config = self.config.optimizer
        if config.unit == "tokens":
            return learning_rate(self.tokens - 1, config, total=self.context.tokens)
        steps = self.context.steps - self.config.learns_after
        total = steps * self.config.updates_per_batch * self.config.epochs_per_batch
        return learning_rate(self.updates, config, total=total)

    def token_budget(self, longest: int) -> int | None:
        budget = self.config.max_tokens_per_micro
        if self.device.type != "cpu":
            return budget
        row = 4 * max(m.out_features for m in self.model.model.base_model.modules() if isinstance(m, nn.Linear))
        fits = max(CPU_BLOCK // row, longest)
        return fits if budget is None else min(budget, fits)

    def all_reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        if self.context.world_size == 1:
            return list(values)
        all_of = torch.tensor(values, dtype=torch.float64, device=self.device)
        others = self.rows.data if self.rows else None
        dist.all_reduce(all_of, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=others)
        return all_of.tolist()

    def export_weights(self, *, changing: bool = False) -> Iterator[tuple[str, Tensor]]:
        given = lora.merged if self.context.adapter_rank is None else lora.apart
        yield from self._on_first_rank(given(self.model.model, self._whole, changing=changing))

    def _on_first_rank(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The others take part in making them whole."""
        for name, tensor in weights:
            if self.context.rank == 0:
                yield name, tensor.detach()

    def save(self, dir: str | Path) -> None:
        state = checkpoint.training_state(self.model, self.optimizer, self.average)
        progress = {"version": self.version, "updates": self.updates, "tokens": self.tokens}
        checkpoint.save(dir, state, progress, alone=self.context.world_size == 1)

    def load(self, dir: str | Path) -> None:
        alone = self.context.world_size == 1
        progress = checkpoint.load(dir, self.model, self.optimizer, self.average, alone=alone)
        self.version, self.updates, self.tokens = (progress[name] for name in ("version", "updates", "tokens"))

    def save_hf(self, dir: str | Path, *, average: bool = False) -> None:
        if average and self.average is None:
            raise ValueError(f"model '{self.context.model}' keeps no average of its weights (ema)")
        with self.average.in_place() if average else nullcontext():
            weights = dict(self._on_first_rank(lora.merged(self.model.model, self._whole)))
            if self.context.rank == 0:
                pretrained.save(self.model.model, weights, self.config, dir)

    def save_adapter(self, dir: str | Path) -> None:
        lora.save(self.model.model, dir, self._whole, write=self.context.rank == 0)

    def base_weights(self) -> AbstractContextManager[None]:
        if not pretrained.has_adapters(self.config):
            return super().base_weights()
        return lora.off(self.model)

    @property
    def constant(self) -> Sequence[str]:
        return ("weights",) if self.config.frozen else ()

    def tensors(self, part: str) -> Iterable[Tensor]:
        if part == "weights":
            return self.model.parameters()  # buffers are small tables
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
        return sum(storage_of(p).nbytes() for p in here)

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if self.context.world_size > 1 else tensor

    # ---- building

    def _read(self) -> pretrained.PreTrainedModel:
        return pretrained.load(self.config, seed=self.context.seed, name=self.context.model)

    def _wrap(self, model: pretrained.PreTrainedModel) -> PackedModel:
        if self.config.activation_checkpointing and not self.config.frozen:
            recompute.enable(model, self.config.activation_checkpointing)
        if self.config.head == "lm":
            # Greedy sampling (temperature 0) has no distribution of its own; its log-probs are the model's.
            temperature = self.config.sampling.temperature or 1.0
            return LanguageModel(model, temperature=temperature, top=self.config.candidates)
        return ScalarModel(model, output={"value": "values", "reward": "scores"}[self.config.head])

    def _autocast(self) -> AbstractContextManager[object]:
        # Over several ranks FSDP casts the parameters itself.
        if self.compute_dtype is None or self.context.world_size > 1:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _load_sharded(self, ranks: Ranks) -> None:
        """Rank 0 reads the weights and hands every rank its shards; no other rank ever holds the whole model."""
        state, buffers, known = {}, {}, torch.zeros(1 if self.config.head == "reward" else len(PROBE["tokens"]) - 1)
        if self.context.rank == 0:
            full = self._wrap(self._read())
            full.check()
            state, buffers = full.state_dict(), dict(full.named_buffers())
            with torch.no_grad():
                known = full.eval()(pack(PROBE))[HEADS[self.config.head][0]].float()
        model = self._wrap(pretrained.skeleton(self.config, name=self.context.model))
        self.check_parallel(model.model, self.config, self.context.model)
        model.heads = self.rows.heads
        cut(model, ranks)
        shard(model, ranks, self.compute_dtype, host=self.config.cpu_offload)
        model.to_empty(device="cpu" if self.config.cpu_offload else self.device)
        model.apply(partial(_buffers_to, self.device))
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        # Buffers outside of the state dict (rotary frequencies) hold whatever the memory held.
        for name, buffer in model.named_buffers():
            if self.context.rank == 0:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, 0)
        self.model = model
        self._check_cut(known.to(self.device))

    def _check_cut(self, known: Tensor) -> None:
        """Compare with what rank 0 found, in one process, for PROBE: a plan that does not fit its model would go
        unnoticed."""
        dist.broadcast(known, 0)
        [own] = self.run([PROBE])
        difference = float((own[HEADS[self.config.head][0]].float() - known).abs().max())
        if not difference < (0.01 if (self.config.compute_dtype or self.config.dtype) == "float32" else 0.5):
            raise NotImplementedError(
                f"model '{self.context.model}': {type(self.model.model).__name__}, cut over {self.context.world_size} "
                f"processes, does not compute what it does in one: outputs differ by {difference:.3g}"
            )


def join(context: Context, *, host: bool = False) -> None:
    """Make the process group of this model's ranks, which meet at ``context.rendezvous``. ``host``: they exchange what
    lies in the host's memory, too."""
    if context.rendezvous is None:
        raise ValueError(f"model '{context.model}' has {context.world_size} ranks and no rendezvous address")
    device = torch.device(context.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if host and device.type == "cuda" else {"cpu": "gloo", "cuda": "nccl"}[device.type],
        init_method=f"tcp://{context.rendezvous}",
        rank=context.rank,
        world_size=context.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def cut(model: PackedModel, ranks: Ranks) -> None:
    """Deal the experts of a skeleton out, and cut its layers, over ranks that compute together."""
    if ranks.experts is not ranks.whole:
        experts.apply(model.model, ranks.experts["expert"])
    if ranks.layers is not ranks.whole:
        blocks.apply(model.model, decoder_layers(model.model), ranks.layers["tensor"])


def shard(model: PackedModel, ranks: Ranks, compute_dtype: torch.dtype | None, *, host: bool) -> None:
    """FSDP2 on every decoder layer, its experts apart, and on the rest; gradients are summed over ranks, never
    averaged: the loss already carries global denominators. ``host``: shards stay in the host's memory."""
    offload = CPUOffloadPolicy(pin_memory=ranks.whole.device_type == "cuda") if host else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    dealt_out = experts.experts_of(model.model) if ranks.experts is not ranks.whole else []
    groups = [(dealt_out, ranks.experts), (decoder_layers(model.model), ranks.layers), ([model], ranks.whole)]
    for module, mesh in ((module, mesh) for modules, mesh in groups for module in modules):
        fully_shard(module, mesh=ranks.sharding(mesh), mp_policy=precision, offload_policy=offload)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _buffers_to(device: torch.device, module: nn.Module) -> None:
    """Buffers are not sharded, so they are where their module computes."""
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


def decoder_layers(model: pretrained.PreTrainedModel) -> list[nn.Module]:
    """The blocks that transformers calls indivisible. Sharding makes them instances of a subclass of another name."""
    blocks = set(model._no_split_modules or ())
    return [m for m in model.modules() if blocks & {kind.__name__ for kind in type(m).__mro__}]
