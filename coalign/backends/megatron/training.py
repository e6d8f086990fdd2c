"""A Megatron model over its ranks: chunks of layers, micro-batches through the stages of a pipeline, steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from coalign.backends.hf.rows import RowSharding
from coalign.backends.layout import pack
from coalign.backends.megatron.model import PackedGPT
from coalign.backends.megatron.weights import held
from coalign.data.batch import Batch

# How a checkpoint has the optimizer's state, so that it can be dealt out to other ranks.
BY_PARAMETER = "fully_reshardable"

Outputs = dict[str, Tensor]
Loss = Callable[[Batch, Outputs], Tensor]


class Pipeline:
    """The chunks that this rank has of a model, and the way of micro-batches through those of all ranks.

    ``rows``: how each row is cut over ranks. ``trained``: gradients are kept, and shared among data-parallel ranks.
    """

    def __init__(
        self, chunks: Sequence[PackedGPT], rows: RowSharding, *, trained: bool, distributed_optimizer: bool
    ) -> None:
        self.models, self.rows, self.config = list(chunks), rows, chunks[0].config
        self.chunks: list[Any] = self.models
        if trained:
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
            )
            self.chunks = [DistributedDataParallel(self.config, settings, model) for model in self.models]
        self.pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.last = parallel_state.get_pipeline_model_parallel_last_rank()

    def run(
        self, micros: Sequence[Batch], loss: Loss | None, *, needs: Sequence[str], share_prefix: bool, idle: Batch
    ) -> list[Outputs]:
        """The outputs of each micro-batch, on every rank; with ``loss``, its gradient is added. The loss is computed
        where the outputs are, and once more, without gradient, where they are told.

        Chunks that take turns need as many micro-batches as a multiple of the stages: ``idle`` fills up.
        """
        for model in self.chunks:
            model.train(loss is not None)
        stages = self.pipeline.size()
        rest = -len(micros) % stages if len(self.models) > 1 else 0
        parts = [self.rows.cut(pack(micro, share_prefix=share_prefix)) for micro in (*micros, *[idle] * rest)]
        told: list[Outputs] = []

        def step(numbers: Iterator[int], model: Any) -> tuple[Any, Callable[[Outputs], tuple[Tensor, Tensor, Any]]]:
            number = next(numbers)
            part = parts[number]
            layout = part.layout.to(next(model.parameters()).device)

            def finish(own: Outputs) -> tuple[Tensor, Tensor, Any]:
                outputs = self.rows.gather(own, part)
                told.append({name: out.detach() for name, out in outputs.items()})
                value = next(iter(outputs.values())).sum() * 0.0
                if loss is not None and number < len(micros):
                    value = loss(micros[number], outputs)
                return value, torch.zeros((), dtype=torch.int), {}

            return model(layout, heads=self.rows.heads, needs=needs), finish

        with torch.set_grad_enabled(loss is not None):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(range(len(parts))) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(parts),
                seq_length=1,  # of no matter: stages tell each other the shapes
                micro_batch_size=1,
                forward_only=loss is None,
            )
        if stages == 1:
            return told
        return self._tell(micros, told[: len(micros)], loss)

    def _tell(self, micros: Sequence[Batch], told: list[Outputs], loss: Loss | None) -> list[Outputs]:
        """From the last stage to the others."""
        here = dist.get_rank() == self.last
        box = [[{name: out.cpu() for name, out in outputs.items()} for outputs in told] if here else None]
        dist.broadcast_object_list(box, src=self.last, group=self.pipeline)
        if here:
            return told
        if loss is not None:
            with torch.no_grad():
                for micro, outputs in zip(micros, box[0], strict=True):
                    loss(micro, outputs)
        return box[0]

    def finish_gradients(self) -> None:
        """Sum them over all ranks that have other rows, or the same weights."""
        finalize_model_grads(self.chunks)

    def clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    @property
    def titles(self) -> list[str]:
        """What Megatron calls each chunk in a state dict."""
        count = len(self.models)
        return [f"model{number}" for number in range(count)] if count > 1 else ["model"]

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters as coalign.backends.megatron.weights names them."""
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{number}/{name}", parameter

    def held(self) -> dict[str, Tensor]:
        """The same, and buffers that belong to the weights (an expert's bias)."""
        return held(self.models)


class Optimizer:
    """AdamW on a pipeline's parameters, in float32, whatever these are."""

    def __init__(
        self, pipeline: Pipeline, settings: Mapping[str, Any], *, clip: float | None, distributed: bool
    ) -> None:
        low = pipeline.config.params_dtype == torch.bfloat16
        config = OptimizerConfig(
            optimizer="adam",
            **settings,
            clip_grad=clip or 0.0,
            bf16=low,
            params_dtype=pipeline.config.params_dtype,
            use_distributed_optimizer=distributed,
        )
        self.pipeline, self.limit, self.distributed = pipeline, clip, distributed
        self.inner = get_megatron_optimizer(config, pipeline.chunks)
        self.parts = self.inner.chained_optimizers
        for group in self.groups():  # which Megatron leaves to its scheduler
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        for part in self.parts:  # all of it from the start, so that a checkpoint of any age has the same entries
            part.init_state_fn(part.optimizer, config)
            for state in () if HAVE_APEX_OR_TE else part.optimizer.state.values():
                state["step"] = torch.zeros((), dtype=torch.float32)

    def start_from(self, exact: Mapping[str, Tensor]) -> None:
        """The weights to go on from, before they were rounded, by the names of `Pipeline.named`."""
        chunks: dict[str, dict[str, Tensor]] = {title: {} for title in self.pipeline.titles}
        for name, tensor in exact.items():
            number, own = name.split("/")
            chunks[self.pipeline.titles[int(number)]][own] = tensor
        for part in self.parts:
            part.reload_model_params(chunks)

    def step(self, lr: float) -> float:
        """One update, of summed gradients; their norm before clipping. One that is not finite changes nothing."""
        self.pipeline.finish_gradients()
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if norm < float("inf"):
            for group in self.groups():
                group["lr"] = lr
            for part in self.parts:
                if self.limit is not None and (parameters := part.get_parameters()):
                    clip_grad_by_total_norm_fp32(parameters, self.limit, norm)
            self.inner.step_with_ready_grads()
        self.inner.zero_grad()
        self.pipeline.clear_gradients()
        return norm

    @torch.no_grad()
    def exact(self) -> dict[str, Tensor]:
        """The weights in float32, as it steps on them, by the names of `Pipeline.named`. A collective."""
        return {name: self._exact(parameter) for name, parameter in self.pipeline.named()}

    def _exact(self, parameter: torch.nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        if not self.distributed:
            pairs = (zip(part.float16_groups, part.fp32_from_float16_groups, strict=True) for part in self.parts)
            return next(
                exact
                for low_and_exact in chain.from_iterable(pairs)
                for own, exact in zip(*low_and_exact, strict=True)
                if own is parameter
            )
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        for part in self.parts:
            if parameter in part.model_param_gbuf_map:  # this rank has some of it
                own = part._get_model_param_range_map(parameter)["param"]
                whole[own.start : own.end] = parameter.main_param
        expert = not getattr(parameter, "allreduce", True)
        group = (
            parallel_state.get_expert_data_parallel_group()
            if expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(whole, group=group)
        return whole.view_as(parameter)

    @property
    def steps(self) -> int:
        """Updates that it made."""
        if not self.distributed:
            return 0  # what it saves has them
        return int(self.parts[0].state_dict()["optimizer"]["param_groups"][0]["step"])

    def load(self, state: Any, steps: int) -> None:
        """What it did so far; how it goes on is said by the configuration.

        Where a checkpoint's layout has experts apart and this one has not, or the other way round, megatron-core has
        another number of parts than it saved: moments are known by the names of parameters, so only those are taken.
        """
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self.groups()]
        if self.distributed:
            for number, part in enumerate(self.parts):
                found = state[number] if len(self.parts) > 1 else state
                own = part.state_dict()
                for group in own["optimizer"]["param_groups"]:
                    group["step"] = steps
                moments = {"param_state": found["param_state"], "param_state_sharding_type": BY_PARAMETER}
                with nullcontext() if HAVE_APEX_OR_TE else patch.object(part, *_with_steps(part)):
                    part.load_state_dict(own | moments)
        else:
            self.inner.load_state_dict(state)
        for group, own in zip(self.groups(), settings, strict=True):
            group.update(own)
        for part in self.parts:  # megatron-core gives all parameters one count of steps, which each would count up
            for entries in () if HAVE_APEX_OR_TE else part.optimizer.state.values():
                entries["step"] = entries["step"].clone()

    def groups(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            yield from part.param_groups

    def state(self) -> Iterator[Tensor]:
        """Of this rank's share: weights in float32 and moments."""
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    yield from (v for v in part.optimizer.state[parameter].values() if isinstance(v, Tensor))


def _with_steps(part: Any) -> tuple[str, Callable[[Any, dict[str, Tensor]], None]]:
    """megatron-core 0.16.1 forgets that torch's Adam counts the steps of each parameter, and asks for them."""
    name = "_set_main_param_and_optimizer_states"
    given = getattr(part, name)

    def complete(parameter: Any, tensors: dict[str, Tensor]) -> None:
        group, place = part.model_param_group_index_map[parameter]
        own = part.optimizer.param_groups[group]["params"][place]
        given(parameter, {**tensors, "step": part.optimizer.state[own]["step"].clone()})

    return name, complete
