"""The tail of a step whose responses have heavy-tailed lengths, with and without partial rollout.

    python benchmarks/partial_rollout.py [--steps 12 --prompts 16 --samples 4 --median 32 --sigma 1.0 --longest 512
                                          --round 64]

Response lengths are lognormal (every sample's own, the same in all runs); a small random model really generates them.
The tail of a step is the time from when half of the samples that end in it have ended until the last work of its
rollout is done. Prints its mean over the steps (without the first quarter, in which nothing is carried on yet), in
seconds and in decoding steps of the engine, and the samples trained on per second of rollout.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import make_model

from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.engines.request import begin_samples
from coalign.cluster.local import LocalCluster
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.engine.environment import Environment
from coalign.engine.rollouts.selection import build_group_selection
from coalign.engine.rollouts.unfinished import CompleteGroups, UnfinishedGroups
from coalign.launch.plan import Plan, find_recipe
from coalign.roles import Context

ENDED: list[tuple[float, int]] = []  # (time, decoding step) at which a sample ended, of the step under way
CLOCK = {"decoded": 0}


class HeavyTailed(NativeModule):
    """Gives every sample a length of its own: lognormal, drawn by (group, index)."""

    def generate(self, prompts: Batch, **options: Any) -> Batch:
        begun = prompts if "index" in prompts else begin_samples(prompts, self.context.samples_per_prompt)
        pairs = zip(begun["group"].tolist(), begun["index"].tolist(), strict=True)
        limits = {pair: length(pair, **self.config.sampling.model_dump(include={"max_new_tokens"})) for pair in pairs}
        grown = (begun.lengths - begun["prompt_length"]).tolist()
        left = {pair: limits[pair] - have for pair, have in zip(limits, grown, strict=True)}

        def on_token(group: int, index: int, token: int, logprob: float) -> None:
            left[group, index] -= 1
            if not left[group, index]:
                ENDED.append((time.perf_counter(), CLOCK["decoded"]))

        def progress(*_: int) -> None:
            CLOCK["decoded"] += 1

        own = torch.tensor(list(limits.values()), dtype=torch.int32)
        out = super().generate(begun.with_(max_new_tokens=own), on_token=on_token, progress=progress, **options)
        return out.without("max_new_tokens")


class Prompts:
    """Prompts of 16 tokens without end."""

    batch_size, drawn, sources = 0, 0, ("",)

    def next(self, rows: int) -> Batch:
        group = torch.arange(self.drawn, self.drawn + rows)
        self.drawn += rows
        tokens = torch.randint(10, 200, (16 * rows,), generator=torch.Generator().manual_seed(self.drawn))
        return Batch(torch.full((rows,), 16), {"tokens": tokens.int()}, {"group": group, "rows": [{}] * rows})

    def stats(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}


SHAPE = {"median": 32.0, "sigma": 1.0}


def length(pair: tuple[int, int], max_new_tokens: int) -> int:
    """Tokens of one sample's response."""
    random = torch.Generator().manual_seed(pair[0] * 1009 + pair[1])
    drawn = SHAPE["median"] * math.exp(SHAPE["sigma"] * float(torch.randn(1, generator=random)))
    return max(1, min(max_new_tokens, round(drawn)))


def at_version(module: NativeModule, store: Any, version: int) -> None:
    """As if the trainer had sent new weights."""
    module.generate(Prompts().next(1).slice(0, 0))  # they are loaded at the first call
    module.engine.version = version


def measure(args: argparse.Namespace, model: Path, rollout: dict[str, Any]) -> dict[str, float]:
    sampling = {"max_new_tokens": args.longest}
    policy = ModelConfig(load=str(model), module="partial_rollout:HeavyTailed", sampling=sampling)
    runtime = {"prompts_per_step": args.prompts, "samples_per_prompt": args.samples, "threads": args.threads}
    config = RunConfig(algorithm="grpo", runtime=runtime, rollout=rollout, models={"policy": policy})
    tails, decoded, seconds, samples = [], [], 0.0, 0
    with LocalCluster(config) as cluster:
        context = Context(samples_per_prompt=args.samples, tokenizer=str(model), threads=args.threads)
        running = cluster.spawn("policy", policy, context)
        is_partial = config.rollout.round_tokens is not None or config.rollout.oversample > 1
        rollouts = UnfinishedGroups if is_partial else CompleteGroups
        loader, unfinished = Prompts(), rollouts(cluster, config.rollout, args.samples)
        flow = lambda prompts: unfinished.generate(running, prompts)  # noqa: E731
        selection = build_group_selection(Plan(config, find_recipe("grpo"), {}, {}), cluster, loader)
        options = {"max_staleness": 0, "last": args.steps, "on_wait": lambda: None}
        environment = Environment(cluster, flow, loader, unfinished, selection, **options)
        if selection.groups is None:
            loader.next = lambda rows=None, draw=loader.next: draw(args.prompts)
        for step in range(args.steps):
            running.run(at_version, step).result()
            ENDED.clear()
            begun = time.perf_counter()
            batch, _ = environment.next(step, step)
            end, now = time.perf_counter(), CLOCK["decoded"]
            if step >= args.steps // 4:
                tails.append(end - statistics.median(moment for moment, _ in ENDED))
                decoded.append(now - statistics.median(count for _, count in ENDED))
                seconds, samples = seconds + end - begun, samples + len(batch)
    return {"tail": statistics.mean(tails), "decoded": statistics.mean(decoded), "rate": samples / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = {"steps": 12, "prompts": 16, "samples": 4, "longest": 512, "round": 64, "threads": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--median", type=float, default=SHAPE["median"])
    parser.add_argument("--sigma", type=float, default=SHAPE["sigma"])
    args = parser.parse_args()
    SHAPE.update(median=args.median, sigma=args.sigma)
    kinds = {
        "whole responses": {},
        f"rounds of {args.round} tokens": {"round_tokens": args.round},
        "oversampled by 1.5, cut, carried on": {"round_tokens": args.longest, "oversample": 1.5},
    }
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        make_model(model, hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=1024)
        results = {name: measure(args, model, rollout) for name, rollout in kinds.items()}
    base = results["whole responses"]
    for name, found in results.items():
        shrunk = 1 - found["tail"] / base["tail"], 1 - found["decoded"] / base["decoded"]
        print(
            f"{name:36s} tail {found['tail']:6.3f} s ({shrunk[0]:+4.0%} shorter), {found['decoded']:6.1f} decoding "
            f"steps ({shrunk[1]:+4.0%} shorter), {found['rate']:6.1f} samples/s"
        )


if __name__ == "__main__":
    from partial_rollout import main  # so that the module with the policy's class is there once

    main()
