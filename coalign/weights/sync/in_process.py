"""Transports within one process: the target computes with the source's live tensors, or with a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from coalign.weights.sync.transport import Sent, Transport, Weights, check_names, installing, once


class Adopt(Transport):
    """Hand over the tensors; nothing is moved. Only where the two never compute at once: training works in place."""

    adopt = True

    def move(self, version: int, changing: bool, expected: frozenset[str] | None) -> list[Sent]:
        [weights] = self.source.run(live_weights, changing, fatal=False).result()
        sent = self.target.run(load_weights, weights, version, self.adopt, fatal=False, beside=[self.source]).result()
        check_names(sent, expected)
        return [Sent(dict.fromkeys(part.sizes, 0)) for part in sent] if self.adopt else sent


class Copy(Adopt):
    """Copy the tensors. The target keeps this version while the source trains on.

    Of models that take turns only one needs to be on the device: the copy waits on the host for the other.
    """

    adopt = False

    def move(self, version: int, changing: bool, expected: frozenset[str] | None) -> list[Sent]:
        if not self.source.takes_turns_with(self.target):
            return super().move(version, changing, expected)
        [weights] = self.source.run(host_weights, changing, fatal=False).result()
        sent = self.target.run(load_weights, weights, version, False, fatal=False).result()
        check_names(sent, expected)
        return sent


def live_weights(module: Any, store: Any, changing: bool) -> Weights:
    """The module's own tensors under their Hugging Face names; a merged one is made when the target takes it."""
    return once(module.export_weights(changing=changing))


def host_weights(module: Any, store: Any, changing: bool) -> Weights:
    """A copy of the module's weights that needs none of its device."""
    return [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in live_weights(module, store, changing)]


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
