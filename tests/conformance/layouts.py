"""Layouts of ranks under test: each does what one process does."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from coalign.backends.base import TrainableModule
from coalign.data.batch import Batch
from coalign.types import Stats, merge_stats
from tests.backends.batches import branched
from tests.conformance import reference
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.tiny import tiny_model_dir

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"family": "qwen2", "tied": True},
    "untied": {"family": "llama", "tied": False},
    "moe": {"family": "qwen3_moe", "tied": False, "norm_topk_prob": True} | EXPERTS,
    "shared": {"family": "qwen2_moe", "tied": False, "shared_expert_intermediate_size": 32} | EXPERTS,
    "deep": {"family": "qwen3", "tied": True, "layers": 4, "kv_heads": 1},
}


@dataclass(frozen=True)
class Layout:
    """``config`` cuts one of MODELS over the ranks."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    module: str = "fsdp"

    @property
    def shows_gradients(self) -> bool:
        """Not where each rank has a part of them alone."""
        return not self.config.get("megatron", {}).get("distributed_optimizer", False)

    def __str__(self) -> str:
        short = {"tensor_parallel": "tp", "context_parallel": "cp", "expert_parallel": "ep", "dp_replicate": "copies"}
        short |= {"pipeline_parallel": "pp", "virtual_pipeline": "vpp", "expert_tensor_parallel": "etp"}
        flat = {**self.config, **self.config.get("megatron", {})}
        return "-".join([self.model, *(f"{short.get(k, k)}{v}" for k, v in flat.items() if k != "megatron")])


TP, CP, EP = {"tensor_parallel": 2}, {"context_parallel": 2}, {"expert_parallel": 2}


def list_layouts(module: str = "fsdp", /, **models: list[dict[str, Any]]) -> list[Layout]:
    """A layout for each way to cut each model."""
    return [Layout(model, config, module) for model, configs in models.items() for config in configs]


@dataclass
class Result:
    """What the ranks of a layout did, or what the reference did. Gradients are those of the first step, unclipped."""

    before: dict[str, torch.Tensor]
    logprobs: torch.Tensor
    gradients: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]
    after: dict[str, torch.Tensor]


def models(folder: Path) -> dict[str, str]:
    return {name: str(tiny_model_dir(folder / name, **shape)) for name, shape in MODELS.items()}


def batch(path: str) -> Batch:
    """Groups of episodes, some of several rows, with anchors near the model's own log-probs."""
    rows = branched()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    old = 0.1 * torch.randn(rows.tokens_total, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        old[rows["loss_mask"]] += reference.logprobs(model, rows)
    return rows.with_(old_logprobs=old)


def expected(path: str, rows: Batch) -> Result:
    done = reference.train(path, rows)
    return Result(done.before, done.logprobs, done.gradients, done.losses, done.norms, done.after)


def train(
    ranks: int, layouts: list[Layout], paths: dict[str, str], batches: dict[str, Batch], folder: Path
) -> dict[str, Result]:
    """Three steps of each layout, by its name, all in one start of the processes."""
    told = on_ranks(ranks, _train, folder, ranks, layouts, paths, batches)
    results = {}
    for i, layout in enumerate(layouts):
        shares = list({each[i]["share"]: each[i] for each in reversed(told)}.values())[::-1]
        stats = [merge_stats(share["stats"][step] for share in shares) for step in range(3)]
        results[str(layout)] = Result(
            _whole(each[i]["before"] for each in told),
            torch.cat([share["logprobs"] for share in shares]),
            _whole(each[i]["gradients"] for each in told),
            [s["loss/value"].value for s in stats],
            [s["loss/grad_norm"].value for s in stats],
            _whole(each[i]["after"] for each in told),
        )
    return results


def _whole(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What each rank gave, together."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def _train(
    rank: int, port: int, ranks: int, layouts: list[Layout], paths: dict[str, str], batches: dict[str, Batch]
) -> list[dict[str, Any]]:
    results = []
    for i, layout in enumerate(layouts):
        backend = Backend(str(layout), layout.module, ranks=ranks, config={"max_tokens_per_micro": 60, **layout.config})
        module = build(backend, paths[layout.model], rank=rank, port=port + i)
        part = share(batches[layout.model], module)
        before = exported(module)
        logprobs = module.forward_step(part)["ref_logprobs"][part["loss_mask"]]
        gradients: dict[str, torch.Tensor] = {}
        stats = [_first_step(module, part, gradients), module.train_step(part), module.train_step(part)]
        results.append(
            {
                "share": module.config.shares(ranks)[rank],
                "before": before,
                "logprobs": logprobs,
                "gradients": gradients,
                "stats": stats,
                "after": exported(module),
            }
        )
        module.close()
    return results


def share(rows: Batch, module: TrainableModule) -> Batch:
    """Of a batch, what this rank is given."""
    shares = module.config.shares(module.context.world_size)
    return rows.split(max(shares) + 1, keep="group")[shares[module.context.rank]]


def _first_step(module: TrainableModule, part: Batch, gradients: dict[str, torch.Tensor]) -> Stats:
    noting = {"fsdp": _noting_fsdp, "megatron": _noting_megatron}.get(module.config.module)
    with noting(module, gradients) if noting else nullcontext():
        return module.train_step(part)


def _noting_fsdp(module: Any, gradients: dict[str, torch.Tensor]) -> AbstractContextManager[Any]:
    step = module.optimizer_step

    def noting() -> float:
        for name, p in module.model.model.named_parameters():
            if p.grad is not None:  # what one rank has whole is not copied before it is clipped
                gradients[name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        return step()

    return patch.object(module, "optimizer_step", noting)


def _noting_megatron(module: Any, gradients: dict[str, torch.Tensor]) -> AbstractContextManager[Any]:
    finish = module.pipeline.finish_gradients

    def noting() -> None:
        finish()
        if not module.config.megatron.distributed_optimizer:  # Layout.shows_gradients
            from coalign_megatron.backend.partition import collect_tensors

            own = collect_tensors(module.pipeline.models) | {name: p.main_grad for name, p in module.pipeline.named()}
            gradients.update({name: tensor.clone() for name, tensor in module._export.tensors(own)})

    return patch.object(module.pipeline, "finish_gradients", noting)
