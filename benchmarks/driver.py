"""What the driver itself costs: GRPO's loop on stand-in workers that answer at once, at a scale beyond small machines:
`python benchmarks/driver.py --replicas 1000 --samples 100000 --steps 6`.

The flows, the environment with its filter and pool, the cutting into shares, the calls and their answers are those of a
run; only the workers and the data are made up. Workers know lengths, groups and rewards of their rows, and no tokens.
Prints what a step takes of this process (the stand-ins' own time apart), and its memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from coalign.algorithms.advantages import group
from coalign.backends.base import Module
from coalign.cluster.batch_ref import Meta, WorkerRows
from coalign.cluster.dist import DistActor
from coalign.cluster.future import WorkerTask
from coalign.cluster.local import LocalCluster, LocalReference
from coalign.cluster.placement.slots import Slot
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.engine.engine import RunData
from coalign.engine.hooks.timeline import Timeline
from coalign.engine.rollouts.selection import filter_groups
from coalign.launch.plan import Plan, PlannedModel
from coalign.recipes.grpo import GRPO
from coalign.roles import Context
from coalign.types import Stat, Stats, Total, merge_stats

SAMPLES = 8  # of a prompt
PROMPT, RESPONSE = 100, 600  # tokens; a response has half of that or more


class Replica(Module):
    """Processes that need not agree on anything."""


class Group(Module):
    """Processes that are called together."""

    spmd = True


class StandIn:
    """A worker that answers every call at once. ``seconds``: the CPU time that all of them took."""

    seconds = 0.0
    counting = threading.Lock()

    def __init__(self, name: str, store: Any) -> None:
        self.name, self.store = name, store

    def execute(self, verb: str, *arguments: Any) -> WorkerTask:
        begun, clock = time.thread_time(), time.time()
        answer, cell = concurrent.futures.Future(), LocalReference()
        batch, stats = getattr(self, verb)(*arguments)
        meta = Meta(stats=stats) if batch is None else Meta.of(batch, stats)
        answer.set_result(replace(meta, stats=stats, verb=verb, start=clock, seconds=1e-3, memory=2**30))
        cell.value = batch
        with self.counting:
            StandIn.seconds += time.thread_time() - begun
        return WorkerTask(self.name, answer, cell)

    def setup(self, *_: Any) -> tuple[None, Stats]:
        return None, {}

    close = setup

    def call(
        self, method: str, arguments: tuple[WorkerRows], keywords: Mapping[str, Any]
    ) -> tuple[Batch | None, Stats]:
        rows = arguments[0].gather(self.store)
        stats: Stats = {f"{method}/{i}": Stat(1.0, float(len(rows))) for i in range(20)}
        if method == "generate":
            return responses(rows), {"engine/tokens": Total(1.0)}
        if method == "forward_step":
            return Batch(rows.lengths, {}, {"scored": torch.zeros(len(rows))}), stats
        return None, stats

    def apply(self, function: Callable[..., Any], given: WorkerRows, keywords: Any) -> tuple[None, Stats]:
        given.gather(self.store)
        return None, {f"{function.__name__}/count": Total(1.0)}

    def transform(self, function: Callable[..., Any], inputs: list[WorkerRows], keywords: Any) -> tuple[Batch, Stats]:
        batch, stats = inputs[0].gather(self.store), {f"{function.__name__}/count": Total(1.0)}
        if function is not filter_groups:
            return batch, stats
        kept = batch["group"] % 10 > 0
        groups = int(kept.sum()) // SAMPLES, int((~kept).sum()) // SAMPLES
        return batch.select(kept), {"filter/kept": Total(groups[0]), "filter/dropped": Total(groups[1])}


def responses(prompts: Batch) -> Batch:
    group = prompts["group"].repeat_interleave(SAMPLES)
    noise = torch.randint(RESPONSE // 2, RESPONSE, (len(group),))
    return Batch(prompts.lengths.repeat_interleave(SAMPLES) + noise, {}, {"group": group})


class StandInCluster(LocalCluster):
    """As many workers as the configuration asks for."""

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        count = slot.footprints[name].processes
        ranks = [StandIn(f"{name}, {'rank' if spmd else 'replica'} {i}", self.store) for i in range(count)]
        return [DistActor(ranks, "cpu")] if spmd else [DistActor([rank], "cpu") for rank in ranks]

    def _function_worker(self) -> StandIn:
        return StandIn("functions", self.store)


class Prompts:
    """A loader whose rows cost nothing."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.sources = ["prompts"]
        self._drawn = 0
        self._tokens = torch.zeros(2 * batch_size * PROMPT, dtype=torch.int32)

    def next(self, rows: int | None = None) -> Batch:
        count = self.batch_size if rows is None else rows
        group = torch.arange(self._drawn, self._drawn + count)
        self._drawn += count
        lengths = torch.full((count,), PROMPT)
        return Batch(lengths, {"tokens": self._tokens[: count * PROMPT]}, {"group": group})

    def stats(self) -> Stats:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}


def engine_of(replicas: int, samples: int) -> GRPO:
    models = {
        name: ModelConfig(module=f"{__name__}:{'Group' if name == 'trainer' else 'Replica'}", num_process=replicas)
        for name in ("policy", "reference", "reward", "trainer")
    }
    config = RunConfig(
        algorithm="grpo",
        advantage={"fn": "group"},
        loss={"fn": "policy_gradient", "kl_coef": 0.01},
        runtime=RuntimeConfig(samples_per_prompt=SAMPLES, prompts_per_step=samples // SAMPLES),
        models=models,
    )
    planned = {
        name: PlannedModel(name, GRPO.models[name], model, Group if name == "trainer" else Replica, Context(model=name))
        for name, model in models.items()
    }
    plan = Plan(config, GRPO, GRPO.models, planned, advantage=group, filter=partial(nine_of_ten))
    engine = GRPO(plan, StandInCluster(config), RunData(None, Prompts(samples // SAMPLES), steps=10**6))
    # Stand-ins compute no function, so there are no response lengths to expect.
    engine.environment.selection = replace(engine.environment.selection, lengths=None)
    return engine


def nine_of_ten(reward: torch.Tensor) -> torch.Tensor:
    """Named in the flow, and computed by no stand-in."""
    raise NotImplementedError


def step(engine: GRPO, timeline: Timeline) -> Stats:
    """What Engine.learn does for a step."""
    timeline.phase("rollout")
    batch, rollout = engine.environment.next(engine.step, engine.step)
    timeline.phase("train")
    stats = merge_stats([rollout, engine.training.step(batch)[0]])
    engine.progress.count_step(0, [])
    timeline.after_step(engine, stats, batch)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = engine_of(arguments.replicas, arguments.samples)
    timeline = Timeline(Path("/nowhere"), every=0)
    engine.cluster.on_end = timeline.note
    process = psutil.Process()
    print(f"{arguments.replicas} replicas of four models, {arguments.samples} samples a step")
    print("step  wall s  driver CPU s  µs/sample  stand-ins CPU s  RSS MiB")
    for number in range(arguments.steps):
        own, others, wall = time.process_time(), StandIn.seconds, time.perf_counter()
        step(engine, timeline)
        wall, others = time.perf_counter() - wall, StandIn.seconds - others
        own = time.process_time() - own - others
        each, memory = 1e6 * own / arguments.samples, process.memory_info().rss / 2**20
        print(f"{number + 1:>4}  {wall:6.2f}  {own:12.2f}  {each:9.1f}  {others:15.2f}  {memory:7.0f}", flush=True)
    engine.cluster.shutdown()


if __name__ == "__main__":
    main()
