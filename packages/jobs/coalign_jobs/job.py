"""A run that a scheduler will start: its configuration, its size, its command, and what travels with it.

``plan_job`` reads the configuration, and asks its recipe which models run. What only a run can see (its data, the
memory of its models) is checked where the job runs, before anything is loaded there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coalign.config import load
from coalign.config.errors import ConfigError, ConfigProblem, Key, format_key
from coalign.config.introspect import find_input
from coalign.config.layering import walk
from coalign.config.schema import RunConfig
from coalign.launch.plan import find_recipe
from coalign_jobs.cluster_size import ClusterSize, size_cluster
from coalign_jobs.environment import list_references
from coalign_jobs.shipment import Shipment, check_code, list_shipment


@dataclass(frozen=True)
class TrainingJob:
    """A run as a job: ``file`` and ``overrides`` as `coalign train` takes them, in ``directory``.

    ``references`` names the environment variables that the configuration reads. ``shipment`` is what travels (None: the
    job sees this file system).
    """

    name: str
    config: RunConfig
    file: str
    overrides: Sequence[str]
    directory: Path
    size: ClusterSize
    references: Sequence[str]
    shipment: Shipment | None = None

    def command(self, python: str, *more: str) -> str:
        """Return the shell command that trains; ``more`` settings come last, so they win."""
        return shlex.join([python, "-m", "coalign.cli", "train", self.file, *self.overrides, *more])


def plan_job(
    file: Path,
    overrides: Sequence[str],
    *,
    nodes: int | None = None,
    devices: int | None = None,
    sized: bool = True,
    stacked: bool = False,
    ships: bool,
) -> TrainingJob:
    """Plan the job of a configuration in the current directory.

    ``nodes`` and ``devices`` of each: see `size_cluster`; not ``sized``: the cluster is there already. ``stacked``: all
    models lie on the same devices. ``ships``: the job has a file system of its own, so the code of the run travels, and
    absolute paths are those of that machine. Raises ConfigError or ValueError for a configuration that is wrong, too
    large for the nodes, or whose code does not travel.
    """
    directory = Path.cwd()
    config = load(file, overrides, lambda algorithm: find_recipe(algorithm).defaults, planned=True, elsewhere=ships)
    shipment = list_shipment(directory) if ships else None
    written = [Path(source) for source in config.locations.sources if Path(source).is_file()]
    if shipment is not None:
        for source in written:
            if not source.resolve().is_relative_to(directory):
                raise ValueError(f"{source} is outside of {directory}, which is all that travels with the job")
            if source.resolve().relative_to(directory) not in shipment.files:
                raise ValueError(f"{source} is in a folder that does not travel with the job; move it out of there")
        check_code(config, shipment)
        file = file.resolve().relative_to(directory)
    groups = [[*config.models]] if stacked else config.runtime.colocation
    placed = config.model_copy(update={"runtime": config.runtime.model_copy(update={"colocation": groups})})
    size = size_cluster(placed, nodes, devices) if sized else ClusterSize(1, 0, config.runtime.accelerator)
    references = list_references(written, overrides)
    return TrainingJob(_name(config), config, str(file), overrides, directory, size, references, shipment)


def list_unshipped(job: TrainingJob) -> Iterator[tuple[Key, Path]]:
    """List the inputs that are files or directories here and do not travel whole: key and path."""
    assert job.shipment is not None, "a job that sees this file system ships nothing"
    travels = {job.directory / file for file in job.shipment.files}
    for key, text in walk(job.config.model_dump()):
        if not isinstance(text, str) or find_input(key, RunConfig) is None or Path(text).is_absolute():
            continue
        path = job.directory / text
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        if path.exists() and not travels.issuperset(files):
            yield key, path


def refuse_unshipped(job: TrainingJob, advice: str) -> None:
    """Refuse (ConfigError) inputs that are here and will not be where the job runs; ``advice`` says what to do."""
    problems = [
        job.config.locations.on(ConfigProblem(key, f"{path} is too large, or in a folder that stays here: {advice}"))
        for key, path in list_unshipped(job)
    ]
    if problems:
        raise ConfigError(problems)


def place_output(job: TrainingJob, root: str) -> str:
    """Return the setting that puts a relative run folder below ``root``."""
    output = job.config.output
    return f"output={output if output.startswith('/') else f'{root}/{output}'}"


def place_inputs(job: TrainingJob) -> list[str]:
    """Return settings that name inputs which do not travel by their absolute paths."""
    return [f"{format_key(key)}={path}" for key, path in list_unshipped(job)]


def _name(config: RunConfig) -> str:
    """A name that every scheduler takes: that of the run folder, as a DNS label with room for a suffix."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(config.output).name.lower()).strip("-")
    return (words if words[:1].isalpha() else f"run-{words}")[:40].strip("-")
