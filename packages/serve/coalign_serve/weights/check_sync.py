"""`coalign check-sync`: compare the weights of two directories, or of a run's models after a weight sync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from rich.table import Table

from coalign.cluster.choice import start_cluster
from coalign.config.schema import RunConfig
from coalign.engine.engine import Engine
from coalign.launch.data_load import load_data
from coalign.launch.fetch import fetch_sources
from coalign.launch.plan import find_recipe, prepare
from coalign.report.display import Display
from coalign.roles import Rollout
from coalign.types import Stat
from coalign_serve.weights.compare import Difference, TensorDigest, WeightSet, find_differences, open_saved_weights

if TYPE_CHECKING:
    from coalign.backends.base import Module, TrainableModule
    from coalign.cluster.batch_ref import Store
    from coalign.cluster.dist import DistModel

PROMPTS, TOKENS = 4, 32  # samples whose log-probs are compared, and tokens of each
# Mean |Δ log-prob| up to which two engines may differ, by the coarser of their dtypes: beyond it one of them computes
# with other weights than it reports.
LIMITS = {"float32": 1e-3, "bfloat16": 5e-2}


def check_saved(first: Path, second: Path, display: Display) -> bool:
    """Compare the weights of two directories; return whether they are the same."""
    sides = open_saved_weights(first), open_saved_weights(second)
    return _report(f"{first} and {second}", list(find_differences(*sides)), len(sides[0].digests), display)


def check_run(config: RunConfig, display: Display) -> bool:
    """Start the models that a weight sync connects, sync, and compare their tensors and log-probs.

    Returns whether all of them agree. Raises ValueError for a recipe without a weight sync.
    """
    pairs = find_recipe(config.algorithm).sync
    if not pairs:
        raise ValueError(f"algorithm: in `{config.algorithm}` no weights travel from one model to another")
    config = fetch_sources(config, rows=False)
    plan = prepare(config).restrict([name for pair in pairs for name in pair])
    with start_cluster(plan.config, plan.started) as cluster:
        engine = plan.recipe(plan, cluster, load_data(plan))
        engine.training.sync(0)
        good = True
        for sync in engine.training.syncs:
            source, target = (engine.running[model.name] for model in (sync.source, sync.target))
            good &= _check_tensors(source, target, display)
            if plan.roles[target.name] is Rollout:
                good &= _check_logprobs(engine, source, target, display)
        return good


# ---- tensors


def _check_tensors(source: DistModel, target: DistModel, display: Display) -> bool:
    title = f"{source.name} and {target.name}"
    replicas = target.run(_digest_weights, None).result()
    if replicas[0] is None:
        display.show(f"{title}: {target.config.module} does not export its weights; see the log-probs\n")
        return True
    dtypes = {name: digest.dtype for name, digest in replicas[0].items()}
    shards = source.run(_digest_weights, dtypes).result()
    digests = {name: digest for shard in shards for name, digest in (shard or {}).items()}

    def fetch(model: DistModel, name: str, rank: int | None = None) -> torch.Tensor:
        """Fetch a tensor from a rank, or from the first one that has it."""
        tensors = model.run(_fetch_tensor, name, dtypes).result()
        return next(tensor for tensor in tensors if tensor is not None) if rank is None else tensors[rank]

    good = True
    for rank, held in enumerate(replicas):
        of_source = WeightSet(source.name, digests, partial(fetch, source))
        of_target = WeightSet(target.name, held, partial(fetch, target, rank=rank))
        label = title if len(replicas) == 1 else f"{title}, replica {rank}"
        good &= _report(label, list(find_differences(of_source, of_target)), len(digests), display)
    return good


def _digest_weights(module: Module, store: Store, dtypes: Mapping[str, str] | None) -> dict[str, TensorDigest] | None:
    """Return digests of this rank's weights, cast to the ``dtypes`` of the other side; None without an export."""
    if not hasattr(module, "export_weights"):
        return None
    return {name: TensorDigest.of(tensor) for name, tensor in _export(module, dtypes or {})}


def _fetch_tensor(module: Module, store: Store, name: str, dtypes: Mapping[str, str]) -> torch.Tensor | None:
    """Return one tensor, if this rank has it."""
    matches = [tensor.cpu() for tensor_name, tensor in _export(module, dtypes) if tensor_name == name]
    return matches[0] if matches else None


def _export(module: Module, dtypes: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in cast("TrainableModule", module).export_weights():
        yield name, tensor.detach().to(getattr(torch, dtypes[name])) if name in dtypes else tensor.detach()


# ---- log-probs


def _check_logprobs(engine: Engine, source: DistModel, target: DistModel, display: Display) -> bool:
    """Compare the log-probs that the target and the source compute for tokens that the target samples."""
    prompts = engine.cluster.put(engine.environment.loader.next(PROMPTS))
    samples = target.generate(prompts, samples=1, max_new_tokens=TOKENS)
    scored = source.forward_step(samples, into="ref_logprobs")
    comparison = engine.cluster.apply(_compare_logprobs, samples, scored)
    comparison.result()
    dtypes = {model.config.compute_dtype or model.config.dtype for model in (source, target)}
    limit = LIMITS["bfloat16" if "bfloat16" in dtypes else "float32"]
    difference = comparison.stats["logprobs/difference"]
    assert isinstance(difference, Stat)
    good = difference.value <= limit
    display.show(
        f"{source.name} and {target.name}, log-probs of {int(difference.count)} sampled tokens: "
        f"mean |Δ| {difference.value:.2g}, {'fine' if good else f'above the limit of {limit:g}'}\n"
    )
    return good


def _compare_logprobs(
    rollout_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> dict[str, Stat]:
    """Return the mean |Δ| over the sampled tokens."""
    return {"logprobs/difference": Stat.of((rollout_logprobs - ref_logprobs).abs(), loss_mask)}


def _report(title: str, differences: list[Difference], count: int, display: Display) -> bool:
    if not differences:
        display.show(f"{title}: all {count} tensors are the same\n")
        return True
    table = Table(
        box=None, pad_edge=False, title=f"{title}: {len(differences)} of {count} tensors differ", title_justify="left"
    )
    table.add_column("tensor", no_wrap=True)
    table.add_column("what", overflow="fold")
    for column in ("largest |Δ|", "values"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in differences:
        largest = "" if row.largest is None else f"{row.largest:.3g}"
        table.add_row(row.name, row.what, largest, f"{row.count:,} of {row.numel:,}" if row.numel else "")
    display.show(table)
    return False
