"""Transport through files: a directory of safetensors on a file system that all hosts see.

``version_N`` is written aside and renamed when it is whole, so nobody ever reads half of it. Of what this module
wrote only the newest is kept.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from coalign.files import move_aside
from coalign.weights.sync.buckets import checksum, pack, tensor_bytes
from coalign.weights.sync.transport import ExportRequest, Sent, Staged, WeightError, exported, installing

log = logging.getLogger(__name__)

FILE = re.compile(r"rank_\d+-\d+\.safetensors")
Files = dict[str, dict[str, int]]  # of each file, the checksum of each tensor


class Disk(Staged):
    def stage(self, version: int, changing: bool) -> list[Sent]:
        folder = Path(self.config.directory)
        aside = folder / f".writing-version_{version}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            size = self.config.bucket_mib * 2**20
            sent = self.source.run(write, str(aside), self.wanted(changing), size, fatal=False).result()
            final = _folder(folder, version)
            if _is_version(final):
                shutil.rmtree(final)
            elif final.exists():
                log.warning("%s holds no weights of a sync; it is now %s", final, move_aside(final))
            os.replace(aside, final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self.target.run(verify, str(final), _files(sent), fatal=False).result()
        return sent

    def install(self, version: int, sent: list[Sent]) -> None:
        final = _folder(Path(self.config.directory), version)
        self.target.run(install, str(final), _files(sent), version, fatal=False).result()
        for other in final.parent.glob("version_*"):
            if other != final and _is_version(other):
                shutil.rmtree(other)


def _folder(directory: Path, version: int) -> Path:
    return directory / f"version_{version}"


def _is_version(folder: Path) -> bool:
    """Whether a folder holds only what ``write`` writes: a person may keep a `version_1` of their own there."""
    return folder.is_dir() and all(FILE.fullmatch(file.name) for file in folder.iterdir())


def _files(sent: list[Sent]) -> Files:
    return {name: checksums for part in sent for name, checksums in part.where.items()}


def write(module: Any, store: Any, directory: str, wanted: ExportRequest, size: int) -> Sent:
    """Write this rank's weights, one file for each bucket."""
    files: Files = {}
    sizes: dict[str, int] = {}
    with exported(module, wanted) as weights:
        for bucket in pack(weights, size):
            name = f"rank_{module.context.rank}-{len(files)}.safetensors"
            save_file({packed.name: packed.tensor().clone() for packed in bucket}, Path(directory) / name)
            files[name] = {packed.name: packed.checksum for packed in bucket}
            sizes |= {packed.name: len(packed.data) for packed in bucket}
    return Sent(sizes, files)


def read(directory: str, files: Files) -> Iterator[tuple[str, Tensor, int]]:
    """(name, tensor, checksum it was written with), file by file."""
    for file, checksums in files.items():
        with safe_open(Path(directory) / file, "pt") as tensors:
            for name, written in checksums.items():
                yield name, tensors.get_tensor(name), written


def verify(module: Any, store: Any, directory: str, files: Files) -> None:
    """Raises WeightError unless the files hold what was written."""
    for name, tensor, written in read(directory, files):
        if (found := checksum(tensor_bytes(tensor))) != written:
            raise WeightError(
                f"weight '{name}' in {directory} is damaged: checksum {found:016x}, written with {written:016x}"
            )


def install(module: Any, store: Any, directory: str, files: Files, version: int) -> None:
    """Serve what the files hold."""
    weights = ((name, tensor) for name, tensor, _ in read(directory, files))
    with installing(module, version):
        module.load_weights(weights, version=version, adopt=False)
