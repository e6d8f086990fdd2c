"""A driver's claim on the processes of a run, what they say of themselves, and the file by which drivers find them.

Drivers of a run are counted: the number of each is its epoch. Processes refuse the calls of an older epoch, so of two
drivers only one is obeyed, whatever a lock says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coalign.cluster.placement.nodes import ProcessPlacement
from coalign.files import read_json_object, write_text_atomically

NAME = ".workers"
BEAT_SECONDS = 5.0  # between two signs of life that a driver sends to each process
LEASE_SECONDS = 20.0  # a driver that processes have not heard for so long has ended
ORPHAN_SECONDS = 180.0  # without a driver, processes wait so long for the next one, and then end


@dataclass(frozen=True, slots=True)
class RunClaim:
    """A driver's request for the processes of a run.

    ``epoch`` counts the drivers of the run in ``folder``. Drivers of one ``fingerprint`` need the same processes.
    ``begins``: there is no checkpoint to go on from, so none can be used. ``waits``: the previous driver may still
    run (it was on another machine), which its processes know.
    """

    folder: Path
    epoch: int
    fingerprint: str
    begins: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process's report: the driver it obeys, the seconds since it heard of that one, and what it is doing.

    ``calls`` is the number of calls that it has begun. ``failed``: one of them raised. ``changed``: a source file that
    it has loaded and that has changed since.
    """

    epoch: int
    silence: float
    calls: int
    busy: bool
    failed: bool
    changed: str | None = None

    @property
    def fits(self) -> bool:
        """Whether a new driver can use the process, once it is not ``busy``."""
        return not self.failed and self.changed is None


@dataclass(frozen=True, slots=True)
class WorkersRecord:
    """Where the processes of a run are; their names begin with ``name``.

    ``nodes`` are Ray's ids, to whose positions ``placements`` refer, by model and rank. Without placements (a run that
    has been scaled) the processes are of no use to another driver.
    """

    name: str
    folder: str
    epoch: int
    fingerprint: str
    nodes: Sequence[str] = ()
    placements: Mapping[str, Sequence[ProcessPlacement]] = field(default_factory=dict)

    def write(self) -> None:
        write_text_atomically(Path(self.folder) / NAME, json.dumps(asdict(self), indent=1))


def read_workers(folder: Path) -> WorkersRecord | None:
    """Return the record of the run in this folder; None if it is missing, damaged, or from a copied folder."""
    try:
        stored = read_json_object(folder / NAME)
        placements = {
            name: [ProcessPlacement(rank["node"], tuple(rank["devices"])) for rank in ranks]
            for name, ranks in stored["placements"].items()
        }
        record = WorkersRecord(**{**stored, "placements": placements})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if record.folder == str(folder.absolute()) else None


def forget_workers(folder: Path) -> None:
    """Delete the record of the run in this folder: it has no processes any more."""
    (folder / NAME).unlink(missing_ok=True)


class LoadedSources:
    """The source files of this process's modules, as they were when it loaded them."""

    def __init__(self) -> None:
        self._versions: dict[str, tuple[int, int] | None] = {}

    def note(self) -> None:
        """Take note of the modules that are loaded now."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.endswith(".py") and file not in self._versions:
                self._versions[file] = _measure(file)

    def find_changed(self) -> str | None:
        """Return a file that has changed since it was noted."""
        return next((file for file, version in self._versions.items() if _measure(file) != version), None)


def _measure(file: str) -> tuple[int, int] | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
