"""Three independent scorers on resources of their own, over Ray: how much longer than the slowest of them they take
together: `python benchmarks/scorers.py --output /tmp/scorers`.

A scorer is busy for so many milliseconds per thousand tokens. By default it waits, as a process does whose GPU
computes: a machine with two cores cannot show three that compute. With `--compute` each of them multiplies matrices on
a thread for as many tokens, which needs a core for each. Flow, placement, calls, object store and timeline are those of
a run. Prints the ratio for each step and writes `step_N.json` (Perfetto opens it) and `timeline.png`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from coalign.backends.base import Module
from coalign.cluster.choice import start_cluster
from coalign.cluster.cluster import Cluster
from coalign.cluster.future import Future
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.engine.hooks.timeline import Timeline
from coalign.recipes.grpo import GRPO
from coalign.report.plots import plot_timeline
from coalign.roles import Context

SCORERS = {"reference": 6.0, "reward": 8.0, "judge": 10.0}  # ms for a thousand tokens
PROMPTS, SAMPLES, PROMPT = 32, 8, 100
LARGE = 256  # side of the matrices


class Policy(Module):
    """Answers at once: it is not what is measured."""

    def generate(self, prompts: Batch) -> Batch:
        generator = torch.Generator().manual_seed(int(prompts["group"][0]))
        group = prompts["group"].repeat_interleave(SAMPLES)
        lengths = torch.randint(200, 700, (len(group),), generator=generator)
        tokens = torch.zeros(int(lengths.sum()), dtype=torch.int32)
        return Batch(lengths, {"tokens": tokens}, {"group": group, "index": torch.arange(len(group)).int() % SAMPLES})


class Scorer(Module):
    """Busy for ``pace`` ms for a thousand tokens; with ``products``, for as many matrix products instead."""

    def forward_step(self, batch: Batch, *, into: str, pace: float, products: float = 0.0) -> dict[str, torch.Tensor]:
        if products:
            square = torch.ones(LARGE, LARGE)
            for _ in range(round(products * pace * batch.tokens_total / 1000)):
                square @ square
        else:
            time.sleep(pace * batch.tokens_total / 1e6)
        return {into: torch.zeros(len(batch))}


def products_per_ms() -> float:
    """Matrix products that one thread does in a millisecond."""
    square = torch.ones(LARGE, LARGE)
    begun = time.perf_counter()
    for _ in range(200):
        square @ square
    return 200 / (1e3 * (time.perf_counter() - begun))


def step(cluster: Cluster, number: int, products: float) -> tuple[Future, list[Future]]:
    """The calls of a flow, of the policy and of three scorers; when it returns, they have ended."""
    prompts = Batch(torch.full((PROMPTS,), PROMPT)).with_(
        tokens=torch.zeros(PROMPTS * PROMPT, dtype=torch.int32), group=number * PROMPTS + torch.arange(PROMPTS)
    )
    out = cluster.models["policy"].generate(cluster.put(prompts))
    scored = [
        cluster.models[name].forward_step(out, into=f"reward/{name}", pace=pace, products=products)
        for name, pace in SCORERS.items()
    ]
    cluster.join(out, *scored).result()
    return out, scored


def over_the_slowest(out: Future, scored: list[Future]) -> float:
    """From the end of generation to the end of the last scorer, in times of what the slowest one computed."""
    generated, ended = (
        max(span.start + span.seconds for future in some for span in future.spans) for some in ([out], scored)
    )
    return (ended - generated) / max(future.seconds for future in scored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compute", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("scorers"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {"policy": ModelConfig(module="scorers:Policy")}
    models |= {name: ModelConfig(module="scorers:Scorer") for name in SCORERS}
    config = RunConfig(algorithm="grpo", models=models, runtime=RuntimeConfig(cluster="ray", threads=1))
    products = products_per_ms() if arguments.compute else 0.0
    arguments.output.mkdir(parents=True, exist_ok=True)
    ratios = []
    with start_cluster(config) as cluster:
        for name, model in models.items():
            cluster.spawn(name, model, Context(model=name, threads=1))
        engine, timeline = GRPO(config, cluster), Timeline(arguments.output, every=1)
        cluster.on_end = timeline.note
        step(cluster, 0, products)  # processes and their imports
        for number in range(1, arguments.steps + 1):
            timeline.phase("rollout")
            out, scored = step(cluster, number, products)
            engine.progress.return_to(number, 0)
            timeline.after_step(engine, {}, None)
            ratios.append(over_the_slowest(out, scored))
            own = ", ".join(f"{future.call} {future.seconds:.3f} s" for future in scored)
            print(f"step {number}: {own}; together {ratios[-1]:.3f} × the slowest", flush=True)
    print(f"median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}")
    print(plot_timeline(arguments.output / f"step_{arguments.steps}.json", arguments.output / "timeline.png"))


if __name__ == "__main__":
    main()
