"""Trains a Megatron model over its ranks: micro-batches through pipeline stages, gradients, optimizer steps.

Checkpoints have Megatron's format `torch_dist`, which any layout of ranks can read. torch's own writer stores the
shards that megatron-core plans: megatron-core's writer forks and spawns processes, which is unsafe in a worker.

Routers are watched, their losses added to the gradient, and recorded experts replayed. The losses are those of
coalign.algorithms.routing, over all tokens of an update. megatron-core computes its own for each micro-batch, and
scales them for gradients that are divided by numbers of tokens later, which is not done here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from coalign.algorithms.routing import count_choices
from coalign.backends.base import Measure, Outputs
from coalign.backends.hf.row_sharding import RowSharding
from coalign.backends.packing import Layout, pack
from coalign.backends.routers import ExpertChoice, RouterCoefficients, RouterTotals
from coalign.backends.trainer_state import BackgroundWriter, copy_to_host
from coalign.backends.vision import pack_with_images
from coalign.data.batch import Batch
from coalign.weights.metadata import DistributedCheckpointPlanner, DistributedCheckpointReader
from coalign_megatron.backend.lora import sum_partial_gradients
from coalign_megatron.backend.model import PackedGPT


class _AddLoss(torch.autograd.Function):
    """Passes ``x`` on; in backward, a loss beside it has the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


class MegatronRouters:
    """The routers of a rank's chunks. ``layers``: for each layer of the whole model, whether it has experts.

    ``set_tokens`` says before each forward which tokens it has. ``counts`` f64[L, E] grow by the tokens of each expert;
    L counts the layers with experts of the whole model, of which this rank has some.
    """

    def __init__(self, models: Sequence[nn.Module], layers: Sequence[int], experts: int) -> None:
        self.totals = RouterTotals()
        self.shape = sum(layers), experts
        self.counts = torch.zeros(self.shape, dtype=torch.float64)
        self.factors: RouterCoefficients | None = None  # factors of the losses; None: no gradient
        self.global_counts = self.counts
        self.tokens: tuple[Tensor, Tensor | None] = torch.ones(0), None
        self.again: dict[int, deque[tuple[Tensor, Tensor | None]]] = defaultdict(deque)
        numbers = [0, *accumulate(layers)]
        for router in (module for model in models for module in model.modules() if isinstance(module, TopKRouter)):
            number = numbers[cast(int, router.layer_number) - 1]
            router.routing = partial(self._route, number, router.routing)  # pyright: ignore[reportAttributeAccessIssue]

    def set_tokens(self, layout: Layout, *, idle: bool) -> None:
        """Take the tokens of the next forward; with sequence parallelism the routers of a rank see some of them."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        copies = cast(Tensor, layout.copies)
        weights = torch.zeros_like(copies) if idle else copies
        given = None if layout.experts is None else layout.experts.chunk(ranks)[rank]
        self.tokens = weights.chunk(ranks)[rank], given

    @contextmanager
    def learning(self, factors: RouterCoefficients) -> Iterator[None]:
        """Within this context forwards have backwards, and the gradient of the routers' losses is added."""
        self.factors = factors
        self.again.clear()
        try:
            yield
        finally:
            self.factors = None

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks: no two of them have the same token in the same layer."""
        values = values.clone()
        dist.all_reduce(values)
        return values

    def _route(
        self, layer: int, routing: Callable[..., Any], logits: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        training, first = self.factors is not None, not torch.is_grad_enabled()
        weights, given = self.tokens
        if training and first:  # backward computes the layer again, in the order of the micro-batches
            self.again[layer].append(self.tokens)
        elif training and self.again[layer]:
            weights, given = self.again[layer].popleft()
        experts = self.shape[1]
        choice = ExpertChoice(experts, None if given is None else given[:, layer].long())
        with choice:
            probabilities, chosen = routing(logits, padding_mask)
        [indices] = choice.choices
        if not (training and first):
            self.counts[layer] += count_choices(indices, weights.to(indices.device), experts).cpu()
        if self.factors and not first:
            flat = logits.view(-1, experts)
            loss = self.totals.compute_loss(flat, weights, self.global_counts[layer], self.factors)
            probabilities = _AddLoss.apply(probabilities, loss)
        return probabilities, chosen


# The format of the optimizer's state in a checkpoint that other layouts of ranks can read.
BY_PARAMETER = "fully_reshardable"


class MegatronPipeline:
    """Holds this rank's chunks of a model and runs micro-batches through the chunks of all ranks.

    rows: how each row is sharded over ranks. adapted: the names of all weights of the model that have adapters, which
    alone are trained then. trained: gradients are kept, and summed over data-parallel ranks.
    """

    def __init__(
        self,
        chunks: Sequence[PackedGPT],
        rows: RowSharding,
        adapted: Sequence[str],
        *,
        trained: bool,
        distributed_optimizer: bool,
    ) -> None:
        self.models, self.rows, self.adapted, self.config = list(chunks), rows, list(adapted), chunks[0].config
        self.chunks: list[Any] = self.models
        if trained:
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
            )
            self.chunks = [DistributedDataParallel(self.config, settings, model) for model in self.models]
        described = chunks[0].described
        self.routers = MegatronRouters(chunks, described.moe_layer_freq, described.num_moe_experts or 0)
        self.group = cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())
        self.last = parallel_state.get_pipeline_model_parallel_last_rank()

    def run(
        self, micros: Sequence[Batch], loss: Measure | None, *, needs: Sequence[str], share_prefix: bool, idle: Batch
    ) -> list[Outputs]:
        """Return the outputs of each micro-batch, on every rank; with ``loss``, add its gradient.

        The last stage computes the loss with its gradient. The other stages receive the outputs and compute the loss
        once more, without gradient. Virtual stages need a multiple of the stages as number of micro-batches: ``idle``
        ones fill up.
        """
        for model in self.chunks:
            model.train(loss is not None)
        stages = self.group.size()
        rest = -len(micros) % stages if len(self.models) > 1 else 0
        seen = self.models[0].seen
        arrange = pack if seen is None else partial(pack_with_images, seen.embedder)
        layouts = (arrange(micro, share_prefix=share_prefix) for micro in (*micros, *[idle] * rest))
        shards = [self.rows.cut(layout) for layout in layouts]
        results: list[Outputs] = []

        def step(
            numbers: Iterator[int], model: nn.Module
        ) -> tuple[Any, Callable[[Outputs], tuple[Tensor, Tensor, Any]]]:
            number = next(numbers)
            shard = shards[number]
            layout = shard.layout.to(next(model.parameters()).device)
            self.routers.set_tokens(layout, idle=number >= len(micros) or micros[number] is idle)

            def finish(shard_outputs: Outputs) -> tuple[Tensor, Tensor, Any]:
                outputs = self.rows.gather(shard_outputs, shard)
                results.append({name: out.detach() for name, out in outputs.items()})
                value = next(iter(outputs.values())).sum() * 0.0
                if loss is not None and number < len(micros):
                    value = loss(micros[number], outputs)
                return value, torch.zeros((), dtype=torch.int), {}

            return model(layout, heads=self.rows.heads, needs=needs), finish

        with torch.set_grad_enabled(loss is not None):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(range(len(shards))) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(shards),
                seq_length=1,  # ignored: stages send each other the shapes
                micro_batch_size=1,
                forward_only=loss is None,
            )
        if stages == 1:
            return results
        return self._broadcast(micros, results[: len(micros)], loss)

    def _broadcast(self, micros: Sequence[Batch], results: list[Outputs], loss: Measure | None) -> list[Outputs]:
        is_last = dist.get_rank() == self.last
        message: list[Any] = [None]
        if is_last:
            message = [[{name: out.cpu() for name, out in outputs.items()} for outputs in results]]
        dist.broadcast_object_list(message, src=self.last, group=self.group)
        if is_last:
            return results
        [received] = message
        if loss is not None:
            with torch.no_grad():
                for micro, outputs in zip(micros, received, strict=True):
                    loss(micro, outputs)
        return received

    def finish_gradients(self) -> None:
        """Sum gradients over ranks with different rows, different shards of a layer, or the same weights."""
        sum_partial_gradients(self.models)
        finalize_model_grads(self.chunks)

    @property
    def titles(self) -> list[str]:
        """Megatron's name of each chunk in a state dict."""
        count = len(self.models)
        return [f"model{number}" for number in range(count)] if count > 1 else ["model"]

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield parameters by `<chunk>/<name in the chunk>`."""
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{number}/{name}", parameter

    def trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield those of them that are trained: all, or adapters."""
        return ((name, parameter) for name, parameter in self.named() if parameter.requires_grad)


class PipelineOptimizer:
    """AdamW on float32 copies of a pipeline's parameters."""

    def __init__(
        self, pipeline: MegatronPipeline, settings: Mapping[str, Any], *, clip: float | None, distributed: bool
    ) -> None:
        dtype = next((parameter.dtype for _, parameter in pipeline.trained()), torch.float32)
        low = dtype == torch.bfloat16
        config = OptimizerConfig(
            optimizer="adam",
            **settings,
            clip_grad=clip or 0.0,
            bf16=low,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        self.pipeline, self.limit, self.distributed = pipeline, clip, distributed
        chained: list[Any] = cast(Any, get_megatron_optimizer(config, pipeline.chunks)).chained_optimizers
        self.optimizers = [o for o in chained if o.optimizer is not None]  # one has none if only experts are trained
        self.inner = ChainedOptimizer(self.optimizers)
        for group in self.groups():  # Megatron leaves this to its scheduler
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        for optimizer in self.optimizers:  # at once, so that every checkpoint has the same entries
            optimizer.init_state_fn(optimizer.optimizer, config)
            for state in () if HAVE_APEX_OR_TE else optimizer.optimizer.state.values():
                state["step"] = torch.zeros((), dtype=torch.float32)

    def start_from(self, exact: Mapping[str, Tensor]) -> None:
        """Start from these unrounded weights, by the names of `MegatronPipeline.named`."""
        chunks: dict[str, dict[str, Tensor]] = {title: {} for title in self.pipeline.titles}
        for name, tensor in exact.items():
            number, chunk_name = name.split("/")
            chunks[self.pipeline.titles[int(number)]][chunk_name] = tensor
        for optimizer in self.optimizers:
            optimizer.reload_model_params(chunks)

    def step(self, lr: float) -> float:
        """Update with summed gradients; return their norm before clipping. If it is not finite, nothing changes."""
        self.pipeline.finish_gradients()
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if norm < float("inf"):
            for group in self.groups():
                group["lr"] = lr
            for optimizer in self.optimizers:
                if self.limit is not None and (parameters := optimizer.get_parameters()):
                    clip_grad_by_total_norm_fp32(parameters, self.limit, norm)
            self.inner.step_with_ready_grads()
        self.inner.zero_grad()
        for chunk in self.pipeline.chunks:
            chunk.zero_grad_buffer()
        return norm

    @torch.no_grad()
    def collect_exact(self) -> dict[str, Tensor]:
        """Return the float32 weights, by the names of `MegatronPipeline.named` (a collective)."""
        return {name: self._exact(parameter) for name, parameter in self.pipeline.trained()}

    def _exact(self, parameter: torch.nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        if not self.distributed:
            pairs = (zip(o.float16_groups, o.fp32_from_float16_groups, strict=True) for o in self.optimizers)
            return next(
                exact
                for low_and_exact in chain.from_iterable(pairs)
                for rounded, exact in zip(*low_and_exact, strict=True)
                if rounded is parameter
            )
        exact = torch.zeros(parameter.numel(), device=parameter.device)
        for optimizer in self.optimizers:
            if parameter in optimizer.model_param_gbuf_map:  # this rank has some of it
                span = optimizer._get_model_param_range_map(parameter)["param"]
                exact[span.start : span.end] = cast(Any, parameter).main_param
        expert = not getattr(parameter, "allreduce", True)
        group = (
            parallel_state.get_expert_data_parallel_group()
            if expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(exact, group=group)
        return exact.view_as(parameter)

    @property
    def steps(self) -> int:
        """Updates so far, for a checkpoint."""
        if not self.distributed:
            return 0  # the saved state has them
        return int(self.optimizers[0].state_dict()["optimizer"]["param_groups"][0]["step"])

    def load(self, state: Any, steps: int) -> None:
        """Load moments and steps; learning rate and the like stay those of the configuration.

        megatron-core keeps experts in a separate optimizer for some layouts only, so their number may differ from the
        saved one. Moments are stored by the names of parameters, so only they are loaded.
        """
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self.groups()]
        if self.distributed:
            for number, optimizer in enumerate(self.optimizers):
                saved = state[number] if len(self.optimizers) > 1 else state
                current = optimizer.state_dict()
                for group in current["optimizer"]["param_groups"]:
                    group["step"] = steps
                moments = {"param_state": saved["param_state"], "param_state_sharding_type": BY_PARAMETER}
                with nullcontext() if HAVE_APEX_OR_TE else patch.object(optimizer, *_add_steps(optimizer)):
                    optimizer.load_state_dict(current | moments)
        else:
            self.inner.load_state_dict(state)
        for group, values in zip(self.groups(), settings, strict=True):
            group.update(values)
        for optimizer in self.optimizers:  # megatron-core shares one step counter, which every parameter would count up
            for entries in () if HAVE_APEX_OR_TE else optimizer.optimizer.state.values():
                entries["step"] = entries["step"].clone()

    def groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def state(self) -> Iterator[Tensor]:
        """Yield this rank's float32 weights and moments."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    yield from (v for v in optimizer.optimizer.state[parameter].values() if isinstance(v, Tensor))


def _add_steps(optimizer: Any) -> tuple[str, Callable[[Any, dict[str, Tensor]], None]]:
    """Patch megatron-core 0.16.1, which does not store the step count that torch's Adam keeps for each parameter."""
    name = "_set_main_param_and_optimizer_states"
    original = getattr(optimizer, name)

    def complete(parameter: Any, tensors: dict[str, Tensor]) -> None:
        group, index = optimizer.model_param_group_index_map[parameter]
        key = optimizer.optimizer.param_groups[group]["params"][index]
        original(parameter, {**tensors, "step": optimizer.optimizer.state[key]["step"].clone()})

    return name, complete


# Passed as copies: megatron-core adds process groups to them.
METADATA: dict[str, Any] = {"distrib_optim_sharding_type": BY_PARAMETER, "chained_optim_avoid_prefix": True}


class _CheckpointWriter(SaveShardedStrategy):
    def __init__(self, background: BackgroundWriter | None) -> None:
        super().__init__("torch_dist", 1)
        self.background = background

    can_handle_sharded_objects = True  # pyright: ignore[reportAssignmentType]  # a property of the base class

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        if self.background is not None:
            tensors = [shard for shard in nested_values(sharded_state_dict) if isinstance(shard, ShardedTensor)]
            copies = copy_to_host({str(number): shard.data for number, shard in enumerate(tensors)})
            for shard, data in zip(tensors, copies.values(), strict=True):
                shard.data = data
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = FileSystemWriter(checkpoint_dir, thread_count=1)
        write = partial(
            state_dict_saver.save, mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner
        )
        if self.background is None:
            write()
        else:
            group = self.background.group
            report = dist.get_rank() == 0
            self.background.submit(checkpoint_dir, {}, lambda _: write(process_group=group), report)


class _CheckpointPlanner(MCoreLoadPlanner):
    load_bytes = DistributedCheckpointPlanner.load_bytes


class _CheckpointReader(TorchDistLoadShardedStrategy):
    """megatron-core's reader, which runs no code of the checkpoint."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        state, layout, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        torch_state = mcore_to_pyt_state_dict(state, True)
        tensors = [shard for shard in nested_values(sharded_state_dict) if isinstance(shard, ShardedTensor)]
        planner = _CheckpointPlanner(
            shapes_validation_sharded_tensors=[shard for shard in tensors if not shard.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in tensors if shard.allow_shape_mismatch},
        )
        DistributedCheckpointReader(checkpoint_dir).fill(torch_state, planner)
        loaded: Any = {key: _unwrap_pyt_sharded_tensor(value) for key, value in torch_state.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(loaded, layout, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


def save_checkpoint(
    dir: str | Path,
    pipeline: MegatronPipeline,
    optimizer: PipelineOptimizer,
    progress: Mapping[str, int],
    background: BackgroundWriter | None = None,
) -> None:
    """Save the state of all ranks (a collective), or copy it and let ``background`` write it."""
    Path(dir).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _checkpoint_state(pipeline, optimizer, loading=False) | {
        "progress": dict(progress),
        "steps": optimizer.steps,
        "adapted": pipeline.adapted,
    }
    dist_checkpointing.save(state, str(dir), _CheckpointWriter(background), content_metadata=dict(METADATA))


def load_checkpoint(dir: str | Path, pipeline: MegatronPipeline, optimizer: PipelineOptimizer) -> dict[str, int]:
    """Load the state and return the progress (a collective).

    Raises FileNotFoundError without a checkpoint, and ValueError for one of adapters of other weights.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(dir)):
        raise FileNotFoundError(f"{dir} holds no checkpoint of a Megatron model (no metadata.json there)")
    there = cast(dict[str, Any], dist_checkpointing.load_common_state_dict(str(dir))).get("adapted", [])
    sides = [(there, pipeline.adapted, "only there"), (pipeline.adapted, there, "not there")]
    if differences := [f"{name} is {side}" for mine, theirs, side in sides for name in sorted({*mine} - {*theirs})[:3]]:
        raise ValueError(f"lora.target is not that of the checkpoint {dir}: of the adapters, {', '.join(differences)}")
    state = cast(
        dict[str, Any],
        dist_checkpointing.load(_checkpoint_state(pipeline, optimizer, loading=True), str(dir), _CheckpointReader()),
    )
    for title, model in zip(pipeline.titles, pipeline.models, strict=True):
        model.load_state_dict(state[title], strict=not pipeline.adapted)  # without what is frozen
    optimizer.load(state["optimizer"], state["steps"])
    return state["progress"]


def _checkpoint_state(pipeline: MegatronPipeline, optimizer: PipelineOptimizer, *, loading: bool) -> dict[str, Any]:
    state = {}
    # Tensors of all layers are stacked in one, unless some layers may lack an adapter that others have.
    metadata = METADATA | ({"non_homogeneous_layers": True} if pipeline.adapted else {})
    for title, model in zip(pipeline.titles, pipeline.models, strict=True):
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        entries = model.sharded_state_dict(metadata=dict(metadata))
        state[title] = {name: entry for name, entry in entries.items() if name not in frozen}
    return state | {"optimizer": optimizer.inner.sharded_state_dict(state, is_loading=loading, metadata=dict(METADATA))}
