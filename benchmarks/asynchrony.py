"""Synchronous and asynchronous training on models that sleep: what the loop, the slices and the syncs themselves cost.

    python benchmarks/asynchrony.py             # one replica and a trainer that take 1 s a step each
    python benchmarks/asynchrony.py --fleet     # four replicas, one four times slower, lognormal response lengths
    python -m benchmarks.asynchrony --ray       # in processes of Ray, not in threads
    python benchmarks/asynchrony.py --picture docs/pictures/asynchrony.png    # timelines of three modes

Everything but the arithmetic is that of a run: the loop, bundles, slices, engine sessions, weight syncs. A step of an
engine sleeps, and adds a token to every response; a training step sleeps. So two cores can show what happens on many.
Beside each figure stands its floor: the slower of the two sides, had it never to wait.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coalign.backends.base import Module
from coalign.backends.engines.contract import GenerationSession, InferenceEngine
from coalign.backends.engines.request import PartialResponse
from coalign.backends.engines.rollout_module import RolloutModule
from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.choice import start_cluster
from coalign.cluster.dist import DistActor
from coalign.cluster.future import Future, Outcome, Span
from coalign.cluster.local import LocalCluster, LocalWorker
from coalign.cluster.placement.slots import Slot
from coalign.cluster.worker import Worker
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.engine.engine import Engine, Hook, RunData
from coalign.launch.plan import Plan, PlannedModel
from coalign.roles import Context, Rollout, Trainable
from coalign.types import Stats, Total

TICK = 0.005  # seconds of a decoding step of a fast replica
SLOWER = 4  # times, the first of several replicas


class SleepingSession(GenerationSession):
    engine: SleepingEngine
    active: list[PartialResponse] = []

    def take_active(self) -> list[PartialResponse]:
        active, self.active = self.active, []
        return active

    def step(self) -> None:
        time.sleep(self.engine.tick)
        self.waiting += self.arrived
        self.arrived.clear()
        started = [PartialResponse(each, place, None) for each in self.waiting for place in range(each.request.samples)]
        self.waiting.clear()
        statuses = [(response, self.record(response, 1, 0.0)) for response in [*self.active, *started]]
        self.active = [response for response, status in statuses if status is None]
        for response, status in statuses:
            if status is not None:
                self.finish(response, status)


class SleepingEngine(InferenceEngine):
    """Takes ``tick`` seconds for a token of every sequence."""

    session_class = SleepingSession
    vocabulary, context = 10, None

    def __init__(self, tick: float) -> None:
        super().__init__()
        self.tick = tick

    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        for _ in weights:
            pass


class SleepingPolicy(RolloutModule):
    exclusive = False

    def setup(self) -> None:
        first = self.context.replica == 0 and self.config.num_process > 1
        self.engine = SleepingEngine(TICK * (SLOWER if first else 1))
        self.engine.recomputes_kv = self.context.recompute_kv


class SleepingTrainer(Module):
    exclusive = False

    def setup(self) -> None:
        self.weight = torch.zeros(16)

    def train_step(self, batch: Batch, *, seconds: float) -> Stats:
        time.sleep(seconds)
        self.weight += 1
        return {"tokens/trained": Total(float(batch["loss_mask"].sum()))}

    def export_weights(self, *, changing: bool = False) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight


class ThreadCluster(LocalCluster):
    """As many workers as the configuration asks for, a thread each: they only sleep."""

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        actors = []
        for i in range(slot.footprints[name].processes):
            calls = self.call_queue(f"{name}-{i}")
            actors.append(DistActor([LocalWorker(f"{name}, replica {i}", Worker(self.store, 1), calls)], "cpu"))
        return actors


class Lengths:
    """A loader of prompts whose responses have known lengths."""

    sources = ("prompts",)

    def __init__(self, batch_size: int, sigma: float, median: float, longest: int) -> None:
        self.batch_size, self.sigma, self.median, self.longest = batch_size, sigma, median, longest
        self.generator = torch.Generator().manual_seed(0)
        self.drawn = 0

    def next(self, rows: int | None = None) -> Batch:
        count = self.batch_size if rows is None else rows
        noise = torch.randn(count, generator=self.generator)
        lengths = (self.median * torch.exp(self.sigma * noise)).round().clamp(1, self.longest).int()
        group = torch.arange(self.drawn, self.drawn + count)
        self.drawn += count
        columns = {"group": group, "max_new_tokens": lengths, "rows": [{} for _ in range(count)]}
        return Batch(torch.ones(count), {"tokens": torch.ones(count, dtype=torch.int32)}, columns)

    def stats(self) -> Stats:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}


class Flow(Engine):
    seconds = 1.0
    models = {"policy": Rollout, "trainer": Trainable}
    sync = [("trainer", "policy")]

    def env_flow(self, prompts: BatchRef) -> Any:
        return self.policy.generate(prompts)

    def train_flow(self, batch: BatchRef) -> Any:
        return self.trainer.train_step(batch, seconds=self.seconds)


class Notes(Hook):
    """Notes what each step cost, which groups it trained on, and how old their tokens were."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.times: list[tuple[float, float, float]] = []  # of the step, of waiting for samples, of the sync
        self.groups: Counter[int] = Counter()
        self.oldest = 0.0
        self.spans: list[Span] = []
        self.synced: list[float] = []  # when weights were sent, in seconds since the epoch

    def note(self, future: Future, outcome: Outcome) -> None:
        """Take note of a call that has ended."""
        self.spans += future.spans

    def phase(self, name: str) -> None:
        if name == "sync":
            self.synced.append(time.time())

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        self.times.append(tuple(stats[f"time/{what}"].value for what in ("step", "rollout", "sync")))
        self.groups.update(batch.group.tolist())
        self.oldest = max(self.oldest, stats["samples/staleness_max"].value)
        assert self.oldest <= self.bound, f"a token is {self.oldest} versions old, the bound is {self.bound}"


def measure(
    *, staleness: int, replicas: int, prompts: int, steps: int, loader: Lengths, seconds: float, cluster: str
) -> Notes:
    """Run the loop; the first steps, until the pipeline is full, do not count."""
    warm = staleness + 2
    models = {
        "policy": ModelConfig(module="benchmarks.asynchrony:SleepingPolicy", num_process=replicas),
        "trainer": ModelConfig(module="benchmarks.asynchrony:SleepingTrainer"),
    }
    runtime = RuntimeConfig(samples_per_prompt=1, prompts_per_step=prompts, max_staleness=staleness, cluster=cluster)
    config = RunConfig(algorithm="none", runtime=runtime, models=models)
    modules = {"policy": SleepingPolicy, "trainer": SleepingTrainer}
    planned = {n: PlannedModel(n, Flow.models[n], m, modules[n], Context(model=n)) for n, m in models.items()}
    plan = Plan(config, Flow, Flow.models, planned, syncs=Flow.sync)
    with ThreadCluster(config) if cluster == "local" else start_cluster(config) as started:
        engine = Flow(plan, started, RunData(None, loader, steps=warm + steps))
        engine.seconds = seconds
        notes = Notes(staleness)
        engine.hooks = [notes]
        engine.phase_listeners.append(notes.phase)
        started.on_end = notes.note
        engine.learn()
    assert notes.groups == Counter(range(prompts * (warm + steps))), "a group was lost, or trained on twice"
    notes.times = notes.times[warm:]
    return notes


def report(name: str, notes: Notes, prompts: int, floor: float) -> float:
    step, wait, sync = (sum(column) / len(notes.times) for column in zip(*notes.times, strict=True))
    print(
        f"{name:>12}  {step:7.3f}  {wait:7.3f}  {sync:7.4f} ({sync / step:5.1%})  {prompts / step:9.1f}  "
        f"{notes.oldest:9g}  {floor:7.3f}",
        flush=True,
    )
    return step


MODES = {0: "synchronous: max_staleness 0", 1: "one step ahead: max_staleness 1", 4: "asynchronous: max_staleness 4"}
SHOWN = 10.0  # seconds of each run in the picture


def draw(picture: Path) -> None:
    """Draw who computes when in three modes: 16 responses a step of 0.05 to 2 s, and a trainer that takes 1 s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(MODES), 1, figsize=(10, 4.6), sharex=True, layout="constrained")
    for axes, (staleness, title) in zip(panels, MODES.items(), strict=True):
        loader = Lengths(16, 1.0, 60, 400)
        options = {"staleness": staleness, "replicas": 1, "prompts": 16, "steps": 18, "seconds": 1.0}
        notes = measure(**options, loader=loader, cluster="local")
        warm, step = notes.synced[staleness + 2], sum(each[0] for each in notes.times) / len(notes.times)
        for row, (model, color) in enumerate((("policy", "#4477aa"), ("trainer", "#cc6677"))):
            own = [span for span in notes.spans if span.worker.startswith(model) and span.verb != "run"]
            bars = [(span.start - warm, span.seconds) for span in own if span.seconds > TICK]
            axes.broken_barh(bars, (row - 0.35, 0.7), color=color, edgecolor="white", linewidth=0.6)
        for when in notes.synced:
            axes.axvline(when - warm, color="#444444", linewidth=0.8, linestyle=":")
        axes.set(yticks=[0, 1], yticklabels=["policy", "trainer"], xlim=(0, SHOWN), ylim=(1.6, -0.6))
        axes.set_title(f"{title}, {step:.2f} s a step", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds; dotted: weights are sent")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fleet", action="store_true", help="four replicas, one of them slower; lognormal lengths")
    parser.add_argument("--ray", action="store_true", help="processes of Ray instead of threads")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=None, help="of a step")
    parser.add_argument("--picture", type=Path, help="draw timelines of three modes into this file instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.picture:
        draw(arguments.picture)
        return
    print("max_staleness   step s   wait s  sync s (share)   samples/s  staleness  floor s")
    base = None
    for staleness in arguments.staleness:
        if arguments.fleet:
            median, sigma, prompts = 20, 1.0, arguments.prompts or 64
            loader = Lengths(prompts, sigma, median, 20 * median)
            settings: dict[str, Any] = {"replicas": 4, "seconds": 0.0}
            # Decoding is as fast for one sequence as for many here, so the longest response is the floor of a step.
            floor = 20 * median * TICK
        else:
            prompts = arguments.prompts or 8
            loader = Lengths(prompts, 0.0, round(1.0 / TICK), math.ceil(1.0 / TICK))
            settings = {"replicas": 1, "seconds": 1.0}
            floor = 1.0 if staleness else 2.0
        settings["cluster"] = "ray" if arguments.ray else "local"
        notes = measure(staleness=staleness, prompts=prompts, steps=arguments.steps, loader=loader, **settings)
        step = report(str(staleness), notes, prompts, floor)
        base = base or step
        print(f"{'':>12}  {base / step:.2f} times the samples/s of the first row")


if __name__ == "__main__":
    main()
