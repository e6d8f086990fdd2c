"""Models of transformers: what all of their trainers have in common, and the one in plain torch.

FSDPModule runs in one process, or sharded over several with FSDP2. Ranks can also share rows, layers and experts
(coalign.backends.hf.parallel). The order of events in a training step is in coalign.backends.base.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coalign.backends import lora, optim, pretrained, trainer_state
from coalign.backends.attention import check_kernel, choose_kernel
from coalign.backends.base import HEADS, IDLE, Measure, Outputs, TrainableModule
from coalign.backends.engines.native import kernels
from coalign.backends.hf import linear_layers
from coalign.backends.hf.checks import check_routers, check_rows, check_vision, find_hidden_routers, is_known
from coalign.backends.hf.exact import LeafReduction, check_exact
from coalign.backends.hf.heads import ROWS, LanguageModel, PackedModel, ScalarModel
from coalign.backends.hf.plans import check_cuts, decoder_layers, tower_layers
from coalign.backends.hf.row_sharding import RankAxis, RowSharding
from coalign.backends.optim import WeightAverage
from coalign.backends.packing import Layout
from coalign.backends.process_group import all_reduce_values, enforce_determinism, join_process_group
from coalign.backends.routers import RouterCoefficients, RouterTotals
from coalign.backends.trainer_state import BackgroundSaves
from coalign.backends.vision import ImageEmbedder, name_components
from coalign.config.errors import located_at
from coalign.config.schema import ModelConfig, VisionConfig
from coalign.cpu import use_kernels
from coalign.data.batch import Batch
from coalign.data.images.processor import ImageProcessor
from coalign.devices import keep_generator, seed_generator
from coalign.memory import get_storage, move_module
from coalign.roles import Context
from coalign.types import Stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coalign.backends.hf.parallel import RankMeshes

log = logging.getLogger(__name__)

# glibc maps larger blocks anew each time, page by page: larger activations made a step 13 % slower.
CPU_BLOCK = 32 * 2**20


class HuggingFaceModule(BackgroundSaves, TrainableModule):
    """A causal LM, value model or reward model, frozen or trained. A subclass sets ``model``, and ``optimizer`` if the
    model is trained. It overrides `_forward`, `_backward` and `_gather` where its library works differently."""

    adapters = True
    model: PackedModel
    optimizer: Any = None
    average: WeightAverage | None = None
    data: dist.ProcessGroup | None = None  # one rank for each shard of the batch; None: all ranks

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        if is_known(config):
            return
        packed = cls.build_skeleton(config, name)
        check_rows(packed.rows, config, name)
        if config.vision is not None:
            check_vision(packed, config, name)
            pretrained.read_processor(config)
        cls.check_model(packed.model, config, name)
        check_routers(packed.routers, config, name)

    @classmethod
    def build_skeleton(cls, config: ModelConfig, name: str) -> PackedModel:
        """Build the model without weights, with the rows that `rows` names, or for `auto` the fastest that its
        architecture declares to compute. Raises NotImplementedError if there are none."""

        for rows in ("packed", "padded") if config.rows == "auto" else (config.rows,):
            try:
                model = PackedModel(pretrained.build_skeleton(config, name=name, packed=rows == "packed"), rows)
                model.check()
                return model
            except NotImplementedError:
                if rows == "padded" or config.rows != "auto":
                    raise
        raise AssertionError("unreachable: the last rows are refused")

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        rows = "packed" if is_known(config) else cls.build_skeleton(config, "*").rows
        if rows != "packed":
            return [f"computes {rows} rows"]
        device = torch.accelerator.current_accelerator(check_available=True)
        if not config.devices or device is None:
            return []
        dtype = getattr(torch, config.compute_dtype or config.dtype)
        kernel = choose_kernel(dtype, device) if config.attention == "auto" else config.attention
        return [f"attention over packed rows: {kernel}"]

    @classmethod
    def check_routing_replay(cls, config: ModelConfig, name: str) -> None:
        model = cls.build_skeleton(config, name)
        alone = "single rows do not show their routers" if model.rows == "single" else None
        if reason := alone or find_hidden_routers(model.routers, config):
            raise ValueError(f"rollout.routing_replay is true, and models.{name} cannot replay: {reason}")

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        super().check_settings(config, name, device)
        with located_at("models", name, "attention"):
            check_kernel(config.attention, getattr(torch, config.compute_dtype or config.dtype), device)

    @classmethod
    def check_model(cls, model: PreTrainedModel, config: ModelConfig, name: str) -> None:
        """Raises ValueError for what ``model``, with or without weights, cannot do as ``config`` says."""
        asked = getattr(model.config.get_text_config(), "output_router_logits", False)
        if asked and not config.frozen and not config.router_aux_loss_coef:
            raise ValueError(
                f"models.{name}.load: config.json of {config.load} sets `output_router_logits: true`, for a loss that "
                f"balances experts: set models.{name}.router_aux_loss_coef, or that to false there"
            )

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        self.device = torch.device(context.device)
        compute = getattr(torch, config.compute_dtype or config.dtype)
        self.compute_dtype = compute if compute != getattr(torch, config.dtype) else None
        self.routing = RouterTotals()
        if config.deterministic or config.reduction == "exact":
            enforce_determinism()

    @property
    def is_sharded(self) -> bool:
        """Whether a library shards the model. It may do so on one rank, which then computes the same as several."""
        return self.context.world_size > 1

    # ---- what a subclass may override

    def _forward(self, layout: Layout, needs: Sequence[str]) -> Outputs:
        # The library that shards the parameters also casts them.
        dtype = None if self.is_sharded else self.compute_dtype
        with torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext():
            return self.model(replace(layout.to(self.device), kernel=self.config.attention), needs=needs)

    def _backward(self, loss: Tensor) -> None:
        """Add its gradient. Losses have global denominators, so gradients are sums over micro-batches and ranks."""
        loss.backward()

    def _gather(self, tensor: Tensor) -> Tensor:
        """The full tensor of a weight that may be sharded. A collective."""
        return tensor

    # ---- methods of TrainableModule

    def run(self, micros: Sequence[Batch], loss: Measure | None = None, *, needs: Sequence[str] = ()) -> list[Outputs]:
        if limit := self.model.rope_limit:
            lengths = (int(micro.lengths.max()) for micro in micros if len(micro))
            pretrained.check_rope_length(*limit, max(lengths, default=0))
        self.model.train(loss is not None)
        routers, add_router_loss = self.model.routers, None
        routers.enabled = loss is not None and not self.config.compile
        if loss is not None:  # the optimizer step releases it
            self.arena.reserve(self.context.model, "gradients", self._gradient_size)
            add_router_loss = self._prepare_router_loss(micros, needs) if routers.modules else None
        results = []
        for number, micro in enumerate(micros):
            leaf = nullcontext() if loss is None else self._train_leaf(number, len(micros))
            with torch.set_grad_enabled(loss is not None), leaf:
                outputs = self._forward(self._pack(micro), needs)
                if loss is not None:
                    value = loss(micro, outputs)
                    self._backward(value if add_router_loss is None else add_router_loss(value))
            results.append({name: out.detach() for name, out in outputs.items()})
        routers.forget()
        return results

    def _train_leaf(self, number: int, count: int) -> AbstractContextManager[None]:
        """A context for forward and backward of the micro-batch ``number`` of this rank's ``count``."""
        return nullcontext()

    def _pack(self, micro: Batch) -> Layout:
        layout = self.model.pack(micro, share_prefix=self.config.share_prefix)
        return replace(layout, copies=torch.zeros_like(layout.tokens)) if micro is IDLE else layout

    # ---- experts

    def _prepare_router_loss(self, micros: Sequence[Batch], needs: Sequence[str]) -> Callable[[Tensor], Tensor]:
        """Return the function that adds the routers' losses for the last forward to a loss, and counts their choices.
        The loss that balances experts needs the tokens of each expert over all micro-batches and ranks before the first
        backward. If this rank has several micro-batches, they are counted by a forward of their own."""
        routers, config = self.model.routers, self.config
        (tokens,) = self.all_reduce([float(sum(micro.tokens_total for micro in micros if micro is not IDLE))])
        coefficients = config.router_aux_loss_coef, config.router_z_loss_coef
        factors = RouterCoefficients(*coefficients, len(routers.modules), tokens)
        totals: Tensor | None = None
        if factors.aux_loss and len(micros) > 1:
            with torch.no_grad(), keep_generator(self.device):  # the same dropout as in training
                counts = []
                for micro in micros:
                    self._forward(self._pack(micro), needs)
                    counts.append(routers.count())
                totals = self._add_up(torch.stack(counts).sum(0))

        def add(value: Tensor) -> Tensor:
            if routers.unfit or not routers.logits:
                return value
            here = routers.count()
            self.routing.add_counts(here)
            if factors:
                counts = self._add_up(here) if totals is None else totals
                for logits, layer_counts in zip(routers.logits, counts, strict=True):
                    value = value + self.routing.compute_loss(logits, routers.weights, layer_counts, factors)
            return value

        return add

    def _add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks: no two of them have the same token."""
        values = values.clone()
        if self.context.world_size > 1:
            dist.all_reduce(values)
        return values

    def describe_routing(self) -> Stats:
        if not self.model.routers.modules:
            return {}
        return self.routing.describe(lambda values: self._add_up(values.to(self.device)))

    def _set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * group.get("lr_scale", 1.0)

    @classmethod
    def limit_micro(cls, config: ModelConfig, device: str, *, longest: int, widest: int) -> int | None:
        budget = config.max_tokens_per_micro
        if device != "cpu":
            return budget
        fits = max(CPU_BLOCK // (4 * widest), longest)
        return fits if budget is None else min(budget, fits)

    def token_budget(self, longest: int) -> int | None:
        widest = _widest_output(self.model.model)
        return self.limit_micro(self.config, self.device.type, longest=longest, widest=widest)

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
                self._write(dir, weights, pretrained.build_writer(self.model.model, self.config, self.context, dir))

    def save_adapter(self, dir: str | Path) -> None:
        def write(tensors: Mapping[str, Tensor]) -> None:
            lora.write(self.model.model, dir, tensors)
            pretrained.save_tokenizer(self.config, self.context, dir)

        tensors = lora.collect(self.model.model, self._gather)
        if self.context.rank == 0:
            self._write(dir, tensors, write)

    def base_weights(self) -> AbstractContextManager[None]:
        if not pretrained.has_adapters(self.config):
            return super().base_weights()
        return lora.disable_adapters(self.model)

    def tensors(self, component: str) -> Iterable[Tensor]:
        if component == "weights":
            return self.model.parameters()  # without buffers, which are small
        if component == "gradients":
            return [p.grad for p in self.model.parameters() if p.grad is not None]
        if component == "optimizer" and self.optimizer is not None:
            entries = (value for state in self.optimizer.state.values() for value in state.values())
            averages = self.average.tensors.values() if self.average else ()
            return [*(value for value in entries if isinstance(value, Tensor)), *averages]
        return ()

    @property
    def _gradient_size(self) -> int:
        """Bytes, on this rank's device."""
        trained = (p for p in self.model.parameters() if p.requires_grad and p.device.type == self.device.type)
        return sum(get_storage(p).nbytes() for p in trained)

    # ---- building

    def _read(self, device: torch.device) -> PackedModel:
        """Load the model, with rows that give the log-probs of its own forward. `rows: auto` in one process tries the
        rows that the model declares, then those that ask less of it."""
        config, name = self.config, self.context.model
        ways: Sequence[str] = [self.build_skeleton(config, name).rows]
        if config.rows == "auto" and self.context.world_size == 1:
            ways = ROWS[ROWS.index(ways[0]) :]
        for rows in ways:
            check_rows(rows, config, name)
            source = pretrained.load(config, seed=self.context.seed, name=name, packed=rows == "packed")
            model = self._wrap(source, rows)
            move_module(model, device)
            try:
                model.check()
            except NotImplementedError:
                if rows == ways[-1]:
                    raise
                continue
            if rows != "packed":
                log.info("models.%s computes %s rows (docs/backends.md)", name, rows)
            check_routers(model.routers, config, name)
            return model
        raise AssertionError("unreachable: the last rows are refused")

    def _wrap(self, model: PreTrainedModel, rows: str) -> PackedModel:
        self.check_model(model, self.config, self.context.model)
        lora.check_separate(model, self.context)
        if self.device.type == "cpu" and not self.config.compile:
            use_kernels(model)
        if self.config.frozen:
            model.requires_grad_(False)
        elif self.config.activation_checkpointing:
            linear_layers.recompute_layers(model, self.config.activation_checkpointing)
        if self.config.head == "lm":
            # Greedy sampling (temperature 0) has no distribution of its own; log-probs are then at temperature 1.
            temperature = self.config.sampling.temperature or 1.0
            packed = LanguageModel(model, rows, temperature=temperature, top=self.config.candidates)
        else:
            packed = ScalarModel(model, rows, output=HEADS[self.config.head][0])
        if self.config.vision is not None:
            self._enable_images(packed, self.config.vision)
        if isinstance(packed, LanguageModel):
            vocabulary = packed.head.weight.shape[0]
            packed.read.forbid(pretrained.list_forbidden_ids(self.config, self.context, vocabulary), vocabulary)
        return packed

    def _enable_images(self, model: LanguageModel | ScalarModel, vision: VisionConfig) -> None:
        """Give the model an image embedder, and freeze the components that the section `vision` freezes."""
        check_vision(model, self.config, self.context.model)
        trains_features = False
        for name, component in name_components(model.model).items():
            parameter = model.model.get_parameter(name)
            if getattr(vision, component) == "freeze":
                parameter.requires_grad_(False)
            trains_features |= component != "language" and parameter.requires_grad
        processor = pretrained.read_processor(self.config, self.context.images)
        settings = {"keep": vision.cache_mib * 2**20, "learns": trains_features}
        is_sharded = self.is_sharded and self.one_group(self.config)
        model.images = ImageEmbedder(model.model, cast(ImageProcessor, processor), is_sharded=is_sharded, **settings)

    def _scale_learning_rates(self) -> dict[nn.Parameter, float]:
        """The multiples of the learning rate for the components that have one."""
        vision = self.config.vision
        if vision is None or vision.tower_lr_scale == vision.projector_lr_scale == 1.0:
            return {}
        scales = {"tower": vision.tower_lr_scale, "projector": vision.projector_lr_scale, "language": 1.0}
        model = self.model.model
        return {model.get_parameter(name): scales[component] for name, component in name_components(model).items()}


def _widest_output(model: PreTrainedModel) -> int:
    """The largest number of outputs per token of any linear layer below the head."""
    from transformers.pytorch_utils import Conv1D

    linears = [m for m in model.base_model.modules() if isinstance(m, nn.Linear | Conv1D)]
    widths = (m.nf if isinstance(m, Conv1D) else m.out_features for m in linears)
    return max(widths, default=cast(nn.Embedding, model.get_input_embeddings()).embedding_dim)


def make_probe(model: PackedModel) -> Batch:
    """Make a row that ``model`` can read, with two pictures if it sees, to compare a cut model with the whole one."""
    if model.images is None:
        return Batch(torch.tensor([16]), {"tokens": torch.arange(16, dtype=torch.int32)})
    tokens, spans = model.images.make_probe()
    mask = torch.ones(len(tokens), dtype=torch.bool)
    for start, stop in ((0, 1), *((span.start, span.stop) for span in spans)):
        mask[start:stop] = False
    columns = {"tokens": torch.tensor(tokens, dtype=torch.int32), "loss_mask": mask}
    return Batch(torch.tensor([len(tokens)]), columns, {"images": [tuple(spans)]})


class FSDPModule(HuggingFaceModule):
    """A causal LM, value model or reward model, frozen or trained."""

    parallel = ("tensor_parallel", "context_parallel", "expert_parallel", "dp_replicate")
    exact = True
    reads_images = True
    optimizer: optim.Optimizer | optim.CombinedOptimizer | None = None
    rows: RowSharding | None = None  # set over several ranks
    _reduction: LeafReduction | None = None  # set for `reduction: exact`
    _passes = 0  # calls of `run` that trained since the last optimizer step
    _owns_group = False  # it made the default process group

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        super().check_settings(config, name, device)
        if config.reduction == "exact":
            check_exact(config, name)
        if config.fp8:
            linear_layers.check_float8_device_type(device, f"models.{name}.fp8")

    @classmethod
    def check_model(cls, model: PreTrainedModel, config: ModelConfig, name: str) -> None:
        super().check_model(model, config, name)
        check_cuts(model, decoder_layers(model), config, name)

    @classmethod
    def check_machine(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        if config.fp8:
            linear_layers.check_float8(device, f"models.{name}.fp8")
        if config.compile:
            linear_layers.check_compile(device, f"models.{name}.compile")
        if config.optimizer.name == "adamw_8bit" and not config.frozen:
            optim.check_adamw_8bit()

    @classmethod
    def tune(cls, config: ModelConfig) -> None:
        _ = kernels.has_bf16() if config.compute_dtype == "bfloat16" else kernels.is_onednn_faster()

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        is_fast = config.devices or config.compute_dtype != "bfloat16" or kernels.has_bf16()
        return [*super().notes(config), *([] if is_fast else [kernels.FLOAT32_INSTEAD])]

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        compute = self.compute_dtype
        if compute is not None and kernels.choose_compute_dtype(compute, self.device) == torch.float32:
            self.compute_dtype = None

    def setup(self) -> None:
        """Join the other ranks and load the model. Raises what the checks of Module and pretrained.load raise."""
        self.check_before_setup()
        if not self.is_sharded:
            self.model = self._read(self.device)
            if self.config.fp8:
                linear_layers.convert_to_float8(decoder_layers(self.model.model))
        else:
            if self.context.world_size > 1 or not dist.is_initialized():  # by another model of this process
                join_process_group(self.context, host=self.config.cpu_offload)
                self._owns_group = True
            from coalign.backends.hf.parallel import RankMeshes  # slow, with torch's DTensor

            ranks = RankMeshes(self.config, self.device)
            self.rows = RowSharding(*(RankAxis.of(ranks.rows.get_group(name)) for name in ("context", "tensor")))
            self.data = ranks.rows.get_group("data")
            self._load_sharded(ranks, self.rows)
        layers = decoder_layers(self.model.model)
        towers = tower_layers(self.model.model)
        is_plain = self.compute_dtype is None and self.config.tensor_parallel == self.config.expert_parallel == 1
        if self.config.compile:
            linear_layers.compile_layers(layers)
        elif is_plain and self.device.type == "cpu" and kernels.is_onednn_faster():
            linear_layers.use_onednn([*layers, *towers])
        if not self.config.frozen:
            exact, scales = self.config.reduction == "exact", self._scale_learning_rates()
            settings = {"layers": [*layers, *towers], "exact": exact, "scales": scales}
            self.optimizer = optim.build_optimizer(self.model.parameters(), self.config.optimizer, **settings)
            self._reduction = LeafReduction(self.model) if exact else None
            if self.config.ema:
                self.average = WeightAverage(self.model, self.config.ema.decay)

    @property
    def is_sharded(self) -> bool:
        return super().is_sharded or (self.config.reduction == "exact" and not self.config.frozen)

    def close(self) -> None:
        self._close_writer()
        if self._owns_group:
            dist.destroy_process_group()

    # ---- methods of TrainableModule

    def run(self, micros: Sequence[Batch], loss: Measure | None = None, *, needs: Sequence[str] = ()) -> list[Outputs]:
        results = super().run(micros, loss, needs=needs)
        if loss is None and self.is_sharded:
            cast(Any, self.model).reshard()  # as a backward does: readers of the weights expect shards
        self._passes += loss is not None
        return results

    @contextmanager
    def _train_leaf(self, number: int, count: int) -> Iterator[None]:
        if self._reduction is None:
            yield
            return
        self._reduction.is_last = number == count - 1
        leaf = number * self.context.world_size + self.context.rank
        with seed_generator(self.device, hash((self.context.seed, self.updates, self._passes, leaf))):
            yield

    def _forward(self, layout: Layout, needs: Sequence[str]) -> Outputs:
        if self.rows is None or self.rows.ranks == 1:
            return super()._forward(layout, needs)
        shard = self.rows.cut(layout)
        return self.rows.gather(super()._forward(shard.layout, needs), shard)

    def _gather(self, tensor: Tensor) -> Tensor:
        return optim.gather(tensor)

    def optimizer_step(self) -> float:
        assert self.optimizer is not None  # train_step refuses frozen models
        limit, exact = self.config.optimizer.clip_grad_norm, self._reduction is not None
        norm = optim.clip_gradients(self.model.parameters(), limit, exact=exact)
        if norm < float("inf"):
            self._set_learning_rate()
            self.optimizer.step()
            if self.average:
                self.average.update()
        self.optimizer.zero_grad()
        self._passes = 0
        self.arena.reserve(self.context.model, "gradients", 0)
        return norm

    def save(self, dir: str | Path) -> None:
        state = trainer_state.get_training_state(self.model, self.optimizer, self.average)
        alone, group = self.context.world_size == 1, self._background.group if self._background else None
        self._write(dir, state, partial(trainer_state.save, dir, progress=self.progress, alone=alone, group=group))

    def load(self, dir: str | Path) -> None:
        alone = self.context.world_size == 1
        self.restore_progress(trainer_state.load(dir, self.model, self.optimizer, self.average, alone=alone))

    # ---- building

    def _load_sharded(self, ranks: RankMeshes, rows: RowSharding) -> None:
        """Rank 0 reads the weights and sends every rank its shards; no other rank ever holds the whole model."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        from coalign.backends.hf.parallel import cut_model, move_buffers, shard_model

        state, buffers, expected = {}, {}, None
        if self.context.rank == 0:
            full = self._read(torch.device("cpu"))
            state, buffers = full.state_dict(), dict(full.named_buffers())
            with torch.no_grad():
                expected = full.eval()(full.pack(make_probe(full)))[HEADS[self.config.head][0]].float()
        skeleton = self.build_skeleton(self.config, self.context.model)
        model = self._wrap(skeleton.model, skeleton.rows)
        model.heads = rows.heads
        if self.config.fp8:
            linear_layers.convert_to_float8(decoder_layers(model.model))
        cut_model(model, ranks)
        shard_model(model, ranks, self.compute_dtype, host=self.config.cpu_offload)
        model.to_empty(device="cpu" if self.config.cpu_offload else self.device)
        model.apply(partial(move_buffers, self.device))
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        # Buffers outside of the state dict (rotary frequencies) are uninitialised.
        for name, buffer in model.named_buffers():
            if self.context.rank == 0:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, 0)
        self.model = model
        self._check_cut(expected)

    def _check_cut(self, expected: Tensor | None) -> None:
        """NotImplementedError unless outputs for a probe are the ``expected`` ones, which rank 0 got from the whole
        model: a plan of cuts that does not fit its model would go unnoticed."""
        [outputs] = self.run([make_probe(self.model)])
        computed = outputs[HEADS[self.config.head][0]].float()
        expected = torch.empty_like(computed) if expected is None else expected.to(computed)
        dist.broadcast(expected, 0)
        difference = float((computed - expected).abs().max())
        if not difference < (0.01 if (self.config.compute_dtype or self.config.dtype) == "float32" else 0.5):
            raise NotImplementedError(
                f"model '{self.context.model}': {type(self.model.model).__name__}, cut over {self.context.world_size} "
                f"processes, does not compute what it does in one: outputs differ by {difference:.3g}"
            )
