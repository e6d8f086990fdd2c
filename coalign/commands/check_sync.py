"""`coalign check-sync`: whether two sides have the same weights: directories, or the models of a run after a sync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from coalign.cluster.start import start
from coalign.config.schema import RunConfig
from coalign.engine.engine import Engine
from coalign.launch.build import build, prepare, recipe
from coalign.report.display import Display
from coalign.roles import Rollout
from coalign.types import Stat
from coalign.weights.compare import Difference, TensorDigest, WeightSet, find_differences, open_saved_weights
from coalign.weights.sync.sync import WeightSync

PROMPTS, TOKENS = 4, 32  # that the log-probs are compared on
# Mean |Δ log-prob| up to which two engines may differ, by the coarser of their dtypes: beyond it one of them computes
# with other weights than it says.
LIMITS = {"float32": 1e-3, "bfloat16": 5e-2}


def check_saved(one: Path, other: Path, display: Display) -> bool:
    """Compare two directories; whether they hold the same weights."""
    sides = open_saved_weights(one), open_saved_weights(other)
    return _report(f"{one} and {other}", list(find_differences(*sides)), len(sides[0].digests), display)


def check_run(config: RunConfig, display: Display) -> bool:
    """Start the models between which weights travel, sync, and compare what they hold and what they compute; whether
    all of it agrees. ValueError for a recipe in which none travel."""
    names = _travelling(config)
    cls, models = prepare(config)
    with start(config) as cluster:
        engine = build(cls, models, config, cluster, only=names)
        engine.trainers.sync(0)
        good = True
        for sync in engine.trainers.syncs:
            good &= _check_tensors(sync, display)
            if type(engine).roles(config)[sync.target.name] is Rollout:
                good &= _check_logprobs(engine, sync, display)
        return good


def _travelling(config: RunConfig) -> list[str]:
    pairs = recipe(config.algorithm).sync
    if not pairs:
        raise ValueError(f"algorithm: in `{config.algorithm}` no weights travel from one model to another")
    return [name for pair in pairs for name in pair]


# ---- tensors


def _check_tensors(sync: WeightSync, display: Display) -> bool:
    source, target = sync.source, sync.target
    title = f"{source.name} and {target.name}"
    replicas = target.run(describe, None).result()
    if replicas[0] is None:
        display.show(f"{title}: {target.config.module} does not tell its weights; see the log-probs\n")
        return True
    dtypes = {name: held.dtype for name, held in replicas[0].items()}
    ours = {name: held for part in source.run(describe, dtypes).result() for name, held in (part or {}).items()}
    good = True
    for rank, held in enumerate(replicas):
        of_target = WeightSet(target.name, held, lambda name, rank=rank: _fetched(target, name, dtypes)[rank])
        of_source = WeightSet(source.name, ours, lambda name: next(filter(_there, _fetched(source, name, dtypes))))
        label = title if len(replicas) == 1 else f"{title}, replica {rank}"
        good &= _report(label, list(find_differences(of_source, of_target)), len(ours), display)
    return good


def _there(tensor: Any) -> bool:
    return tensor is not None


def _fetched(model: Any, name: str, dtypes: Mapping[str, str]) -> list[Any]:
    return model.run(fetch, name, dtypes).result()


def describe(module: Any, store: Any, dtypes: Mapping[str, str] | None) -> dict[str, TensorDigest] | None:
    """What this rank holds, in the ``dtypes`` of the other side; None if the module does not tell."""
    if not hasattr(module, "export_weights"):
        return None
    return {name: TensorDigest.of(tensor) for name, tensor in _exported(module, dtypes or {})}


def fetch(module: Any, store: Any, name: str, dtypes: Mapping[str, str]) -> torch.Tensor | None:
    """One tensor, where this rank has it."""
    found = [tensor.cpu() for each, tensor in _exported(module, dtypes) if each == name]
    return found[0] if found else None


def _exported(module: Any, dtypes: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in module.export_weights():
        yield name, tensor.detach().to(getattr(torch, dtypes[name])) if name in dtypes else tensor.detach()


# ---- log-probs


def _check_logprobs(engine: Engine, sync: WeightSync, display: Display) -> bool:
    """What the target says of tokens that it samples, and what the source says of them."""
    prompts = engine.cluster.put(engine.environment.loader.next(PROMPTS))
    samples = sync.target.generate(prompts, samples=1, max_new_tokens=TOKENS)
    scored = sync.source.forward_step(samples, into="ref_logprobs")
    found = engine.cluster.apply(distance, samples, scored)
    found.result()
    configs = [model.config for model in (sync.source, sync.target)]
    kinds = {config.compute_dtype or config.dtype for config in configs}
    limit = LIMITS["bfloat16" if "bfloat16" in kinds else "float32"]
    mean = found.stats["logprobs/difference"].value
    good = mean <= limit
    display.show(
        f"{sync.source.name} and {sync.target.name}, log-probs of {int(found.stats['logprobs/difference'].count)} "
        f"sampled tokens: mean |Δ| {mean:.2g}, {'fine' if good else f'above the limit of {limit:g}'}\n"
    )
    return good


def distance(rollout_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, loss_mask: torch.Tensor) -> dict[str, Stat]:
    """Mean |Δ| over the chosen tokens."""
    return {"logprobs/difference": Stat.of((rollout_logprobs - ref_logprobs).abs(), loss_mask)}


def _report(title: str, found: list[Difference], count: int, display: Display) -> bool:
    if not found:
        display.show(f"{title}: all {count} tensors are the same\n")
        return True
    table = Table(
        box=None, pad_edge=False, title=f"{title}: {len(found)} of {count} tensors differ", title_justify="left"
    )
    table.add_column("tensor", no_wrap=True)
    table.add_column("what", overflow="fold")
    for column in ("largest |Δ|", "values"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in found:
        largest = "" if each.largest is None else f"{each.largest:.3g}"
        table.add_row(each.name, each.what, largest, f"{each.count:,} of {each.numel:,}" if each.numel else "")
    display.show(table)
    return False
