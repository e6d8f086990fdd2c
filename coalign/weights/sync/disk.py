"""Transport through files: a directory of safetensors on a file system that all hosts see.

``version_N`` is written beside its final name and renamed when it is complete, so nobody reads half of it. Of the
versions that this module wrote only the newest is kept.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from coalign.cluster.future import Store
from coalign.files import move_aside, write_atomically
from coalign.weights.sync.buckets import pack
from coalign.weights.sync.checksums import checksum, tensor_bytes
from coalign.weights.sync.transport import (
    ExportRequest,
    SentWeights,
    SourceModule,
    StagedTransport,
    TargetModule,
    WeightError,
    guard_installation,
    open_export,
)

log = logging.getLogger(__name__)

FILE = re.compile(r"rank_\d+-\d+\.safetensors")
Files = dict[str, dict[str, int]]  # of each file, the checksum of each tensor


class DiskTransport(StagedTransport):
    def stage(self, version: int, changing: bool) -> list[SentWeights]:
        final = self._folder(version)
        with write_atomically(final) as aside:
            aside.mkdir(parents=True)
            request = self.request(changing)
            sent = self.source.run(write, str(aside), request, self.bucket_bytes, fatal=False).result()
            if _is_version(final):
                shutil.rmtree(final)
            elif final.exists():
                log.warning("%s holds no weights of a sync; it is now %s", final, move_aside(final))
        self.target.run(verify, str(final), _files(sent), fatal=False).result()
        return sent

    def install(self, version: int, sent: list[SentWeights]) -> None:
        final = self._folder(version)
        self.target.run(install, str(final), _files(sent), version, fatal=False).result()
        for other in final.parent.glob("version_*"):
            if other != final and _is_version(other):
                shutil.rmtree(other)

    def _folder(self, version: int) -> Path:
        assert self.config.directory is not None  # the run folder's, unless the user set one
        return Path(self.config.directory) / f"version_{version}"


def _is_version(folder: Path) -> bool:
    """Whether a folder holds only what ``write`` writes: users may keep a `version_1` of their own there."""
    return folder.is_dir() and all(FILE.fullmatch(file.name) for file in folder.iterdir())


def _files(sent: list[SentWeights]) -> Files:
    return {name: checksums for part in sent for name, checksums in part.where.items()}


def write(module: SourceModule, store: Store, directory: str, request: ExportRequest, size: int) -> SentWeights:
    """Write this rank's weights, one file for each bucket of up to ``size`` bytes."""
    files: Files = {}
    sizes: dict[str, int] = {}
    with open_export(module, request) as weights:
        for bucket in pack(weights, size):
            name = f"rank_{module.context.rank}-{len(files)}.safetensors"
            save_file({packed.name: packed.tensor().clone() for packed in bucket}, Path(directory) / name)
            files[name] = {packed.name: packed.checksum for packed in bucket}
            sizes |= {packed.name: len(packed.data) for packed in bucket}
    return SentWeights(sizes, files)


def read(directory: str, files: Files) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (name, tensor, checksum that it was written with), file by file."""
    for file, checksums in files.items():
        with safe_open(Path(directory) / file, "pt") as tensors:
            for name, written in checksums.items():
                yield name, tensors.get_tensor(name), written


def verify(module: TargetModule, store: Store, directory: str, files: Files) -> None:
    """Raise WeightError unless the files hold what was written."""
    for name, tensor, written in read(directory, files):
        if (found := checksum(tensor_bytes(tensor))) != written:
            raise WeightError(
                f"weight '{name}' in {directory} is damaged: checksum {found:016x}, written with {written:016x}"
            )


def install(module: TargetModule, store: Store, directory: str, files: Files, version: int) -> None:
    weights = ((name, tensor) for name, tensor, _ in read(directory, files))
    with guard_installation(module, version):
        module.load_weights(weights, version=version, adopt=False)
