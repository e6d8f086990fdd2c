"""Transports through a store, in buckets: the cluster's object store, or files on a file system that all hosts see.

Senders put buckets there, and every target rank reads them. It works wherever the models are, also when they take turns
on their devices. Files: ``version_N`` is written beside its final name and renamed when it is complete, so nobody reads
half of it. Of the versions that this module wrote only the newest is kept.
"""

from __future__ import annotations

import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from coalign.cluster.batch_ref import Store
from coalign.files import move_aside, write_atomically
from coalign.weights.sync import transport
from coalign.weights.sync.checksums import checksum, tensor_bytes
from coalign.weights.sync.segment import pack
from coalign.weights.sync.transport import SentWeights, StagedTransport

if TYPE_CHECKING:
    from coalign.backends.base import TrainableModule
    from coalign.backends.engines.rollout_module import RolloutModule
    from coalign.weights.sync.transport import ExportRequest

log = logging.getLogger(__name__)
FILE = re.compile(r"rank_\d+-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    """One tensor as ``data`` u8[n], and the checksum of it when it was packed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray
    checksum: int

    @staticmethod
    def of(name: str, tensor: Tensor, written: int | None = None) -> _PackedTensor:
        """Pack a tensor, on the host without a copy. ``written``: the checksum that it was stored with."""
        data = tensor_bytes(tensor)
        written = checksum(data) if written is None else written
        return _PackedTensor(name, tensor.dtype, tuple(tensor.shape), data, written)

    def verify(self) -> None:
        """Raise WeightError if the bytes are not those that were packed."""
        transport.check_sum(self.name, checksum(self.data), self.checksum)

    def tensor(self) -> Tensor:
        """Return a view of the data. Do not write to it: other processes may share the data."""
        if not len(self.data):  # numpy has no strides for a view of nothing
            return torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.data).view(self.dtype).view(self.shape)


class ObjectStoreTransport(StagedTransport):
    """Buckets in the cluster's object store."""

    def stage(self, version: int, changing: bool, on_sent: transport.OnSent) -> list[SentWeights]:
        sent = self.export(version, changing)
        on_sent()
        self.target.run(_verify_buckets, _references(sent), self.folder(version), fatal=False).result()
        return sent

    def install(self, version: int, sent: list[SentWeights]) -> None:
        arguments = _references(sent), version, self.folder(version)
        self.target.run(_install_buckets, *arguments, fatal=False).result()

    def export(self, version: int, changing: bool, directory: str | None = None) -> list[SentWeights]:
        arguments = self.request(changing), self.bucket_bytes, directory
        return self.source.run(_export_buckets, *arguments, fatal=False).result()

    def folder(self, version: int) -> str | None:
        """The directory of the files; None: there are none."""


class DiskTransport(ObjectStoreTransport):
    """Buckets in safetensors files; each reference is a file's name, and the checksum of each tensor in it."""

    def export(self, version: int, changing: bool, directory: str | None = None) -> list[SentWeights]:
        final = Path(self.folder(version))
        with write_atomically(final) as aside:
            aside.mkdir(parents=True)
            sent = super().export(version, changing, str(aside))
            if _is_version(final):
                shutil.rmtree(final)
            elif final.exists():
                log.warning("%s holds no weights of a sync; it is now %s", final, move_aside(final))
        return sent

    def install(self, version: int, sent: list[SentWeights]) -> None:
        super().install(version, sent)
        final = Path(self.folder(version))
        for folder in final.parent.glob("version_*"):
            if folder != final and _is_version(folder):
                shutil.rmtree(folder)

    def folder(self, version: int) -> str:
        assert self.config.directory is not None  # the run folder's, unless the user set one
        return str(Path(self.config.directory) / f"version_{version}")


def _is_version(folder: Path) -> bool:
    """Whether a folder holds only what ``_export_buckets`` writes: users may keep a `version_1` of their own there."""
    return folder.is_dir() and all(FILE.fullmatch(file.name) for file in folder.iterdir())


def _references(sent: list[SentWeights]) -> list[Any]:
    return [reference for rank in sent for reference in rank.references]


# ---- in the workers; ``directory`` holds the files (None: the object store)


def _export_buckets(
    module: TrainableModule, store: Store, request: ExportRequest, size: int, directory: str | None = None
) -> SentWeights:
    """Store this rank's weights in buckets of up to ``size`` bytes."""
    references: list[Any] = []
    sizes: dict[str, int] = {}
    with transport.open_export(module, request) as weights:
        for entries in pack(weights, size):
            bucket = [_PackedTensor.of(entry.name, tensor) for entry, tensor in entries]
            if directory is None:
                references.append(store.put(bucket))
            else:
                name = f"rank_{module.context.rank}-{len(references)}.safetensors"
                save_file({packed.name: packed.tensor().clone() for packed in bucket}, Path(directory) / name)
                references.append((name, {packed.name: packed.checksum for packed in bucket}))
            sizes |= {packed.name: len(packed.data) for packed in bucket}
    return SentWeights(sizes, references)


def _read_buckets(store: Store, references: list[Any], directory: str | None) -> Iterator[_PackedTensor]:
    for reference in references:
        if directory is None:
            yield from store.get(reference)
            continue
        file, checksums = reference
        with safe_open(Path(directory) / file, "pt") as tensors:
            for name, written in checksums.items():
                yield _PackedTensor.of(name, tensors.get_tensor(name), written)


def _verify_buckets(module: RolloutModule, store: Store, references: list[Any], directory: str | None = None) -> None:
    """Raise WeightError unless everything arrived as it was sent."""
    for packed in _read_buckets(store, references, directory):
        packed.verify()


def _install_buckets(
    module: RolloutModule, store: Store, references: list[Any], version: int, directory: str | None = None
) -> None:
    weights = ((packed.name, packed.tensor()) for packed in _read_buckets(store, references, directory))
    with transport.guard_installation(module, version):
        module.load_weights(weights, version=version, adopt=False)
