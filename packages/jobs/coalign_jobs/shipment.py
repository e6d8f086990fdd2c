"""The working directory that travels with a job: which files, which not, and whether they hold the code of the run.

Rewards, losses and recipes of one's own are modules of the directory in which `coalign launch` is called. Targets that
do not share a file system with it get these files as one zip archive.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from io import BytesIO
from pathlib import Path

from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.layering import walk
from coalign.config.schema import RunConfig

MAX_FILE_BYTES = 10 * 2**20  # a larger file is data or a model, and stays here
LEFT_OUT = ("runs", "__pycache__", "node_modules", "build", "dist")  # folders, beside hidden ones and environments
NAMES_CODE = ("fn", "module", "algorithm")  # keys whose values may be `my.module:name`


@dataclass(frozen=True)
class Shipment:
    """The files of ``directory`` that travel, relative to it, and the ``large`` ones that do not."""

    directory: Path
    files: Sequence[Path]
    large: Sequence[Path]

    @property
    def size(self) -> int:
        """Bytes, not compressed."""
        return sum((self.directory / file).stat().st_size for file in self.files)

    def pack(self, limit: int) -> bytes:
        """Pack the files into a zip archive, the same bytes for the same files. ValueError above ``limit`` bytes."""
        packed = BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in self.files:
                mode = (self.directory / file).stat().st_mode & 0o777
                entry = zipfile.ZipInfo(str(file), date_time=(1980, 1, 1, 0, 0, 0))
                entry.external_attr, entry.compress_type = mode << 16, zipfile.ZIP_DEFLATED
                archive.writestr(entry, (self.directory / file).read_bytes())
        if (size := packed.tell()) > limit:
            largest = sorted(self.files, key=lambda file: -(self.directory / file).stat().st_size)[:3]
            named = ", ".join(f"{file} {_mebibytes((self.directory / file).stat().st_size)}" for file in largest)
            raise ValueError(
                f"the working directory {self.directory} is {_mebibytes(size)} when packed, and {_mebibytes(limit)} "
                f"can travel with the job (largest: {named}); start it from a directory that holds the run's code alone"
            )
        return packed.getvalue()

    def describe(self) -> str:
        """Describe in one line what travels and what does not."""
        left = f"; not with it (over {_mebibytes(MAX_FILE_BYTES)}): {', '.join(map(str, self.large))}"
        return f"{len(self.files)} files of {self.directory}, {_mebibytes(self.size)}{left if self.large else ''}"


def list_shipment(directory: Path) -> Shipment:
    """List what travels of a directory: no hidden files, no runs, no environments, no large files, no links."""
    files, large = [], []
    for folder, names, file_names in os.walk(directory):
        here = Path(folder)
        names[:] = sorted(name for name in names if not _is_left_out(here / name))
        for name in sorted(file_names):
            path = here / name
            if name.startswith(".") or path.is_symlink() or not path.is_file():
                continue
            (large if path.stat().st_size > MAX_FILE_BYTES else files).append(path.relative_to(directory))
    return Shipment(directory, files, large)


def check_code(config: RunConfig, shipment: Shipment) -> None:
    """Refuse functions and classes whose modules neither travel nor are installed. ConfigError names each."""
    problems = []
    for key, name in walk(config.model_dump()):
        names_code = isinstance(name, str) and ":" in name and key[-1] in NAMES_CODE
        if names_code and (message := _find_lack(name.partition(":")[0], shipment)):
            problems.append(config.locations.on(ConfigProblem(key, f"{name}: {message}")))
    if problems:
        raise ConfigError(problems)


def _find_lack(module: str, shipment: Shipment) -> str:
    """Say why a job would lack a module; empty if it does not."""
    path = Path(*module.split("."))
    if {path.with_suffix(".py"), path / "__init__.py"} & {*shipment.files}:
        return ""
    top = module.partition(".")[0]
    search_path = [folder for folder in sys.path if folder and Path(folder).resolve() != shipment.directory]
    spec = PathFinder.find_spec(top, search_path)
    if spec is not None and not spec.origin and not any(map(_is_installed, spec.submodule_search_locations or ())):
        spec = None  # a folder of that name somewhere
    if top in sys.builtin_module_names or (spec is not None and _is_installed(spec.origin)):
        return ""
    lack = "no such module here" if spec is None else f"its module is {spec.origin}"
    return (
        f"{lack}, and only {shipment.directory} travels with the job; move it there, or install it as a package on "
        "the cluster and here"
    )


def _is_installed(origin: str | None) -> bool:
    """Whether a module comes with Python, with an installed package, or with Coalign. None: a package of several
    folders, one of which does."""
    if origin in (None, "built-in", "frozen"):
        return True
    folders = Path(str(origin)).parts
    return "site-packages" in folders or "dist-packages" in folders or str(origin).startswith(sys.base_prefix + os.sep)


def _is_left_out(folder: Path) -> bool:
    environment = (folder / "pyvenv.cfg").exists()
    return folder.name.startswith(".") or folder.name in LEFT_OUT or environment or folder.name.endswith(".egg-info")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
