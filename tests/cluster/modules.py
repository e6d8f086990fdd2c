"""Modules that do arithmetic: real subclasses of Module whose results can be worked out by hand."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coalign.backends.base import Module
from coalign.data.batch import Batch
from coalign.types import Max, Stat, Total


class EchoModule(Module):
    """Repeats each prompt n times, adding one to every token."""

    parallel = ("tensor_parallel", "pipeline_parallel")

    def generate(self, prompts: Batch, *, samples: int = 2) -> Batch:
        rows = torch.arange(len(prompts)).repeat_interleave(samples)
        out = prompts.select(rows)
        return out.with_(
            tokens=out["tokens"] + 1,
            index=torch.arange(samples, dtype=torch.int32).repeat(len(prompts)),
            status=torch.zeros(len(rows), dtype=torch.uint8),
        )


class SumModule(EchoModule):
    """Scores a sequence with the sum of its tokens; an independent replica in each process."""

    awake = threading.Event()  # ends `sleep` in this process

    def forward_step(self, batch: Batch, *, into: str = "reward") -> dict[str, torch.Tensor]:
        sums = torch.zeros(len(batch)).index_add_(0, batch.segment, batch["tokens"].float())
        return {into: sums, "handled": Total(len(batch))}

    def whole(self, batch: Batch) -> int:
        """Tokens that this process saw."""
        return batch.tokens_total

    def process(self) -> int:
        return os.getpid()

    def threads(self) -> int:
        return torch.get_num_threads()

    def hand_back(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Writes to what it received, as no module should."""
        batch["tokens"].zero_()
        return {"values": torch.zeros(batch.tokens_total)}

    def fail(self, batch: Batch | None = None) -> None:
        raise ValueError("as asked")

    def sleep(self, seconds: float) -> float:
        self.awake.wait(seconds)
        return seconds

    def save(self, directory: str) -> None:
        raise OSError(28, "No space left on device", directory)


class RewardLikeModule(SumModule):
    """Mostly waits: does not need its devices to itself."""

    exclusive = False


class GroupModule(Module):
    """A process group: every rank is called each time, and says what it got."""

    spmd = True
    parallel = ("tensor_parallel",)

    def setup(self) -> None:
        self.weight = torch.full((4,), 1.0 + self.context.seed)

    def train_step(self, batch: Batch) -> dict[str, object]:
        self.weight += 1
        return {
            "tokens": Total(batch.tokens_total),
            "ranks": Total(1),
            "largest": Max(float(batch["tokens"].max()) if len(batch) else 0.0),
            "mean": Stat(float(batch["tokens"].sum()), batch.tokens_total),
        }

    def beside(self, batch: Batch, *, other: Batch) -> dict[str, Total]:
        """Two batches of different sequences; each rank's share of the second counts its own way."""
        return {"tokens": Total(batch.tokens_total), f"other_{self.context.rank}": Total(len(other))}

    def forward_step(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"values": batch["tokens"].float() * self.weight[0]}


class SleepyModule(Module):
    """Takes as many milliseconds for a batch as the largest of its tokens says; refuses negative ones."""

    def generate(self, prompts: Batch) -> Batch:
        if bool((prompts["tokens"] < 0).any()):
            raise ValueError("nobody sleeps for less than no time")
        time.sleep(float(prompts["tokens"].max()) / 1000)
        return prompts.with_(index=torch.zeros(len(prompts), dtype=torch.int32))

    def forward_step(self, batch: Batch, *, into: str = "reward") -> dict[str, torch.Tensor]:
        return {into: batch["tokens"].float(), "handled": Total(len(batch))}


class PartsModule(EchoModule):
    """Hands over what it repeats in parts; those after the first only when somebody has begun to score (``begun``)."""

    begun = threading.Event()

    def generate_in_parts(self, parts: int, prompts: Batch, *, samples: int = 2, fails: bool = False):
        for number, some in enumerate(self.generate(prompts, samples=samples).split(parts, keep="group")):
            if number and not self.begun.wait(timeout=30.0):
                raise TimeoutError("nobody has begun to score")
            if number and fails:
                raise ValueError("as asked")
            yield some

    def forward_step(self, batch: Batch, *, into: str = "reward") -> dict[str, torch.Tensor]:
        self.begun.set()
        return {into: batch["tokens"][batch.offsets[:-1]].float(), "calls": Total(1)}


class MeetModule(Module):
    """Scores only while two others of its kind do: each waits for them, and fails if they do not come."""

    meeting = threading.Barrier(3)

    def forward_step(self, batch: Batch) -> dict[str, torch.Tensor]:
        self.meeting.wait(timeout=30.0)
        return {f"reward/{self.context.model}": batch["tokens"].float()}


class MarkModule(Module):
    """_Leaves a file when it is closed."""

    def close(self) -> None:
        Path(self.config.load or "").touch()


class UnloadableModule(Module):
    """Cannot be set up."""

    def setup(self) -> None:
        raise FileNotFoundError("no weights here")


class OwnModule(Module):
    """Says what it adds."""

    @classmethod
    def columns(cls, config, context):
        return ("quality", "style")

    def judge(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"verdict": torch.zeros(batch.tokens_total)}

    judge.produces = ("verdict",)


class UnevenModule(Module):
    """Scores a row in 10 ms, but in 40 ms on the first replica; says how many rows which replica had."""

    def forward_step(self, batch: Batch, *, into: str = "reward") -> dict[str, torch.Tensor]:
        time.sleep(len(batch) * (0.04 if self.context.replica == 0 else 0.01))
        return {into: batch["tokens"][batch.offsets[:-1]].float(), f"replica_{self.context.replica}": Total(len(batch))}


class SlicedModule(EchoModule):
    """Generates in slices: a sequence takes as many ticks as its first token says, all of them side by side."""

    exclusive = False
    tick = 0.01

    def setup(self) -> None:
        self.version = -1
        self.slow = 4 if self.context.replica else 1  # of several replicas the first is four times as fast
        self.rows: dict[int, tuple[Batch, int]] = {}  # by number, with the ticks that are left

    def install(self, version: int) -> None:
        self.version = version

    def roll(
        self, new: Sequence[tuple[int, Batch, Mapping[str, Any]]], seconds: float
    ) -> tuple[int | None, Batch | None, dict[str, Any], int]:
        for number, prompts, options in new:
            if options.get("broken"):
                raise ValueError("as asked")
            out = self.generate(prompts, samples=options.get("samples", 1))
            out = out.with_(versions=torch.full((out.tokens_total,), self.version, dtype=torch.int32))
            self.rows[number] = out, int(prompts["tokens"].max())
        until = time.monotonic() + seconds
        while self.rows:
            done = next((number for number, (_, left) in self.rows.items() if left <= 0), None)
            if done is not None:
                return done, self.rows.pop(done)[0], {"handled": Total(1.0)}, 0
            if time.monotonic() > until:
                break
            time.sleep(self.tick * self.slow)
            self.rows = {number: (batch, left - 1) for number, (batch, left) in self.rows.items()}
        return None, None, {}, 0
