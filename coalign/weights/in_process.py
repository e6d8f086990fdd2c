"""Transports within one process: the target computes with the source's live tensors, or with a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from coalign.weights.transport import Sent, Transport, Weights, check_names, installing, once


class Adopt(Transport):
    """Hand over the tensors; nothing is moved. Only where the two never compute at once: training works in place."""

    adopt = True

    def move(self, version: int, changing: bool, expected: frozenset[str] | None) -> list[Sent]:
        [weights] = self.source.run(live_weights, changing, fatal=False).result()
        sent = self.target.run(load_weights, weights, version, self.adopt, fatal=False, beside=[self.source]).result()
        check_names(sent, expected)
        return [Sent(dict.fromkeys(part.sizes, 0)) for part in sent] if self.adopt else sent


class Copy(Adopt):
    """Copy the tensors. The target keeps this version while the source trains on."""

    adopt = False


def live_weights(module: Any, store: Any, changing: bool) -> Weights:
    """The module's own tensors under their Hugging Face names; a merged one is made when the target takes it."""
    return once(module.export_weights(changing=changing))


def load_weights(module: Any, store: Any, weights: Weights, version: int, adopt: bool) -> Sent:
    """Compute with these tensors, or with their present values, from now on."""
    sizes: dict[str, int] = {}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            sizes[name] = tensor.nbytes
            yield name, tensor

    with installing(module, version):
        module.load_weights(noted(), version=version, adopt=adopt)
    return Sent(sizes)
