"""The backends under test: a name, how many processes, the configuration, how closely it must agree."""

from __future__ import annotations

import multiprocessing
import random
import socket
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from coalign.backends.base import TrainableModule, build_objective
from coalign.config.functions import resolve_class
from coalign.config.schema import LossConfig, ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.types import merge_stats
from tests.conformance.reference import CLIP, HIGH, LOW, LR, Report

# Ranks are forks of a process that has imported what takes seconds. Where torch sees a CUDA device they cannot be.
START = "spawn" if torch.cuda.is_available() else "forkserver"
PRELOADED = ("tests.conformance.layouts", "coalign.backends.hf.fsdp", "coalign.backends.hf.parallel")
multiprocessing.set_forkserver_preload([*PRELOADED, "coalign.weights.metadata", "transformers.modeling_utils"])

MEGATRON = pytest.mark.skipif(find_spec("megatron") is None, reason="coalign[megatron] is not installed")
DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="coalign[deepspeed] is not installed")


@dataclass(frozen=True)
class Backend:
    name: str
    module: str
    ranks: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6  # relative, of gradient norms; weights and log-probs follow
    device: str = "cpu"


def zero(stage: int, low: bool = False) -> dict[str, Any]:
    """Of DeepSpeed; at stage 3 no weight is too small to be sharded."""
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    low_precision = {"compute_dtype": "bfloat16"} if low else {}
    return {"max_tokens_per_micro": 40, "deepspeed": {"stage": stage, "zero": zero}, **low_precision}


BACKENDS = [
    Backend("fsdp", "fsdp"),
    Backend("fsdp-unshared", "fsdp", config={"share_prefix": False}),
    Backend("fsdp-micro", "fsdp", config={"max_tokens_per_micro": 40}),
    Backend("fsdp-checkpointing", "fsdp", config={"activation_checkpointing": "full"}),
    Backend("fsdp-bf16", "fsdp", config={"compute_dtype": "bfloat16"}, tolerance=3e-2),
    Backend("fsdp-2ranks", "fsdp", ranks=2, config={"max_tokens_per_micro": 40}),
    Backend("fsdp-2ranks-bf16", "fsdp", ranks=2, config={"compute_dtype": "bfloat16"}, tolerance=3e-2),
    *(Backend(f"deepspeed-{stage}", "deepspeed", config=zero(stage)) for stage in (1, 2, 3)),
    *(Backend(f"deepspeed-{stage}-2ranks", "deepspeed", 2, zero(stage)) for stage in (1, 2, 3)),
    *(Backend(f"deepspeed-{stage}-2ranks-bf16", "deepspeed", 2, zero(stage, True), 3e-2) for stage in (1, 2, 3)),
    Backend("megatron", "megatron", config={"max_tokens_per_micro": 40}),
    Backend("megatron-unshared", "megatron", config={"share_prefix": False, "activation_checkpointing": "full"}),
    Backend("megatron-bf16", "megatron", config={"compute_dtype": "bfloat16"}, tolerance=3e-2),
    Backend("megatron-2ranks", "megatron", ranks=2, config={"max_tokens_per_micro": 40}),
    Backend("megatron-2ranks-bf16", "megatron", ranks=2, config={"compute_dtype": "bfloat16"}, tolerance=3e-2),
]


def build(backend: Backend, path: str, *, rank: int = 0, port: int = 0, **config: Any) -> TrainableModule:
    """The module of one rank, set up."""
    config = {**backend.config, **config}
    loss = config.pop("loss", {"fn": "policy_gradient", "clip_low": LOW, "clip_high": HIGH})
    optimizer = {"lr": LR, "weight_decay": 0.1, "clip_grad_norm": CLIP}
    model = ModelConfig(**{"module": backend.module, "load": path, "optimizer": optimizer, **config})
    context = Context(
        rank=rank,
        world_size=backend.ranks,
        device=backend.device,
        loss=build_objective(LossConfig(**loss)),
        rendezvous=f"127.0.0.1:{port}",
    )
    module = resolve_class(backend.module, "coalign.backends")(model, context)
    module.setup()
    return module


def train(runs: list[tuple[Backend, str, Batch]], scratch: Path) -> list[Report]:
    """Three steps of each (backend, model directory, batch), all in one start of as many processes as each asks for."""
    [ranks] = {backend.ranks for backend, _, _ in runs}
    told = on_ranks(ranks, _train, scratch, runs)
    return [_report(list(results)) for results in zip(*told, strict=True)]


def _report(results: list[dict[str, Any]]) -> Report:
    """Of what each rank did."""
    stats = [merge_stats(result["stats"][i] for result in results) for i in range(3)]
    return Report(
        before=results[0]["before"],
        logprobs=torch.cat([result["logprobs"] for result in results]),
        losses=[s["loss/value"].value for s in stats],
        norms=[s["loss/grad_norm"].value for s in stats],
        after=results[0]["after"],
    )


def _train(rank: int, port: int, runs: list[tuple[Backend, str, Batch]]) -> list[dict[str, Any]]:
    results = []
    for i, (backend, path, batch) in enumerate(runs):
        module = build(backend, path, rank=rank, port=port + i)
        part = batch.split(backend.ranks, keep="group")[rank]
        results.append(
            {
                "before": exported(module),
                "logprobs": module.forward_step(part)["ref_logprobs"][part["loss_mask"]],
                "stats": [module.train_step(part) for _ in range(3)],
                "after": exported(module),
            }
        )
        check_recorded_logprobs(module, part.without("old_logprobs"), backend.tolerance)
        module.close()
    return results


def check_recorded_logprobs(module: TrainableModule, batch: Batch, tolerance: float) -> None:
    """A training step returns, if it should, the log-probs that a forward pass before it computes."""
    module.context = replace(module.context, records_logprobs=True)
    expected = module.forward_step(batch, into="old_logprobs")["old_logprobs"]
    recorded = module.train_step(batch)["old_logprobs"]
    trained = batch["loss_mask"]
    torch.testing.assert_close(recorded[trained], expected[trained], atol=tolerance, rtol=1e-5)
    assert bool(recorded[~trained].isnan().all())


def exported(module: TrainableModule, **which: Any) -> dict[str, torch.Tensor]:
    """The weights by name, on every rank, from the share that each exports. A collective."""
    shares: list[Any] = [{name: tensor.to("cpu", copy=True) for name, tensor in module.export_weights(**which)}]
    if module.context.world_size > 1:
        own, shares = shares[0], [None] * module.context.world_size
        dist.all_gather_object(shares, own)
    weights = {name: tensor for share in shares for name, tensor in share.items()}
    assert len(weights) == sum(map(len, shares)), "two ranks export the same weight"
    return dict(sorted(weights.items()))


def on_ranks(ranks: int, function: Any, scratch: Path, *arguments: Any) -> list[Any]:
    """``function(rank, port, *arguments)`` on every rank; what each returned. In this process if there is only one."""
    if ranks == 1:
        return [function(0, 0, *arguments)]
    port = _free_ports()
    mp.start_processes(_worker, (port, function, scratch, arguments), nprocs=ranks, start_method=START)
    return [torch.load(scratch / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _free_ports(count: int = 40) -> int:
    """The first of so many ports that nobody listens on, below those that the system gives away by itself."""
    while True:
        first = random.randrange(10_000, 30_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as tried:
                    tried.bind(("", port))
            return first
        except OSError:
            continue


def _worker(rank: int, port: int, function: Any, scratch: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.save(function(rank, port, *arguments), scratch / f"{rank}.pt")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Whether they have the same names and bits."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def joined(tensors: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> torch.Tensor:
    """All in one row, in the order of ``like``."""
    assert tensors.keys() == like.keys()
    return torch.cat([tensors[name].flatten() for name in like])


def relative(a: Any, b: Any) -> float:
    """The distance of two tensors, or of all tensors of two dictionaries, relative to the second."""
    if isinstance(b, dict):
        a, b = joined(a, b), joined(b, b)
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
