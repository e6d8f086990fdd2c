"""Transports within one process: the target computes with the source's live tensors, or with a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from coalign.cluster.future import Store
from coalign.weights.sync.transport import (
    SentWeights,
    SourceModule,
    TargetModule,
    Transport,
    Weights,
    check_names,
    check_unique,
    guard_installation,
)


class LiveTensorTransport(Transport):
    """Hands over the live tensors; nothing is copied.

    For models that never compute at once, since training changes the tensors in place.
    """

    adopt = True

    def move(self, version: int, changing: bool, expected: frozenset[str] | None) -> list[SentWeights]:
        [weights] = self.source.run(open_live_weights, changing, fatal=False).result()
        sent = self.target.run(load_weights, weights, version, self.adopt, fatal=False, beside=[self.source]).result()
        check_names(sent, expected)
        return [SentWeights(dict.fromkeys(part.sizes, 0)) for part in sent] if self.adopt else sent


class TensorCopyTransport(LiveTensorTransport):
    """Copies the tensors, so that the target keeps this version while the source trains on.

    If the models take turns on their devices, the copy is made on the host: only one of them is on the device.
    """

    adopt = False

    def move(self, version: int, changing: bool, expected: frozenset[str] | None) -> list[SentWeights]:
        if not self.source.takes_turns_with(self.target):
            return super().move(version, changing, expected)
        [weights] = self.source.run(copy_to_host, changing, fatal=False).result()
        sent = self.target.run(load_weights, weights, version, False, fatal=False).result()
        check_names(sent, expected)
        return sent


def open_live_weights(module: SourceModule, store: Store, changing: bool) -> Weights:
    """Return the module's own tensors; a weight that is merged from several is made when the target takes it."""
    return check_unique(module.export_weights(changing=changing))


def copy_to_host(module: SourceModule, store: Store, changing: bool) -> Weights:
    return [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in open_live_weights(module, store, changing)]


def load_weights(module: TargetModule, store: Store, weights: Weights, version: int, adopt: bool) -> SentWeights:
    """Let the module serve these tensors, or their present values; return their sizes."""
    sizes: dict[str, int] = {}

    def note_sizes() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            sizes[name] = tensor.nbytes
            yield name, tensor

    with guard_installation(module, version):
        module.load_weights(note_sizes(), version=version, adopt=adopt)
    return SentWeights(sizes)
