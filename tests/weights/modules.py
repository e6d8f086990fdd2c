"""Models that hold a few weights: they send them, break off, stall, or serve what they were given."""

from __future__ import annotations

import multiprocessing
import os
import time

import torch

from coalign.backends.base import Module


class Sender(Module):
    """A process group in which each rank sends its own layer; the embedding is frozen, and the first rank's."""

    spmd = True
    exports = True
    fault = ""

    def setup(self) -> None:
        rank = self.context.rank
        self.weights = {f"layers.{rank}.weight": torch.full((3, 5), float(rank)), f"layers.{rank}.half": torch.ones(7)}
        self.weights[f"layers.{rank}.half"] = self.weights[f"layers.{rank}.half"].to(torch.bfloat16)
        self.frozen = {} if rank else {"embed": torch.arange(2.0**18), "empty": torch.zeros(0, 4)}

    def learn(self, amount: float = 1.0) -> None:
        for tensor in self.weights.values():
            tensor += amount

    def misbehave(self, fault: str) -> None:
        self.fault = fault

    def export_weights(self, *, changing: bool = False):
        yield from ({} if changing else self.frozen).items()
        for i, item in enumerate(self.weights.items()):
            if self.fault == "break" and i == 1 and self.context.rank == self.context.world_size - 1:
                raise RuntimeError("the export broke")
            if self.fault == "stall" and i == 1:
                time.sleep(2.5)
            if self.fault == "die" and i == 1:
                os._exit(1)
            if self.fault == "forget" and i == 1:
                return
            yield item
        if self.fault == "twice":
            yield from list(self.weights.items())[:1]
        if self.fault == "both" and self.context.rank:
            yield "layers.0.weight", torch.zeros(3, 5)


class Together(Sender):
    """Its two ranks make each weight whole together, as those of a sharded model do; nearly all are the second's."""

    meeting = multiprocessing.get_context("fork").Barrier(2)

    def export_weights(self, *, changing: bool = False):
        for i in range(12):
            self.meeting.wait(10.0)
            if self.context.rank == (0 < i < 11):
                yield f"layers.{i}.weight", torch.full((2**18,), float(i))


class Reader(Module):
    """Holds copies of what it was given."""

    fault = ""

    def setup(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.version = -1

    def misbehave(self, fault: str) -> None:
        self.fault = fault

    def load_weights(self, weights, *, version: int, adopt: bool = False) -> None:
        for i, (name, tensor) in enumerate(weights):
            if self.fault == "break" and i == 1:
                raise RuntimeError("the load broke")
            self.weights[name] = tensor if adopt and self.adopts else tensor.clone()
        self.version = version

    def condition(self) -> str | None:
        return self.unfit

    def serving(self) -> tuple[int, dict[str, torch.Tensor]]:
        return self.version, {name: tensor.clone() for name, tensor in self.weights.items()}


class Adopter(Reader):
    """Computes with the tensors that it was given."""

    adopts = True


class Narrow(Reader):
    """Computes in bfloat16, whatever it is given."""

    weights_dtype = torch.bfloat16

    def load_weights(self, weights, *, version: int, adopt: bool = False) -> None:
        super().load_weights(((name, tensor.to(torch.bfloat16)) for name, tensor in weights), version=version)
