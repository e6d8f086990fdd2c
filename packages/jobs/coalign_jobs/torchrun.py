"""The torchrun target: recipes that learn from data, as processes that torchrun starts on this machine. No Ray.

On several machines each is told its number, and all of them the address of the first.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from typing import NoReturn

from coalign.cluster.torchrun import TOKEN
from coalign.config.errors import ConfigError, ConfigProblem
from coalign.launch.plan import find_recipe
from coalign_jobs.environment import JobVariable, list_variables
from coalign_jobs.job import TrainingJob

PORT = 29500  # torchrun's on the first machine; the port after it is Coalign's


@dataclass(frozen=True)
class TorchrunOptions:
    """This machine's number ``rank`` of several, and the ``address`` of the first (`HOST` or `HOST:PORT`)."""

    rank: int = 0
    address: str | None = None
    interface: str | None = None


def render_torchrun(job: TrainingJob, options: TorchrunOptions) -> str:
    """Render the shell script of one machine. ConfigError for a run whose processes it cannot be; ValueError for
    several machines without an address."""
    return _write_script(job, _build_command(job, options), list_variables("/tmp/coalign", options.interface))


def run_torchrun(job: TrainingJob, options: TorchrunOptions) -> NoReturn:
    """Become torchrun, which starts this machine's processes: signals reach it, and its exit code is that of all."""
    if job.size.nodes > 1 and not os.environ.get(TOKEN):
        raise ValueError(
            f"{TOKEN} is not set: the processes of several machines know each other by it, so it is the same secret "
            f"on all: export {TOKEN}=$(openssl rand -hex 32)"
        )
    command = _build_command(job, options)
    variables = {variable.name: variable.value for variable in list_variables("/tmp/coalign", options.interface)}
    os.execve(command[0], command, {**os.environ, **variables})


def _build_command(job: TrainingJob, options: TorchrunOptions) -> list[str]:
    size = job.size
    processes = _count_processes(job)
    if processes % size.nodes:
        raise ValueError(f"--nodes: {processes} processes do not divide over {size.nodes} machines")
    rendezvous = ["--standalone"]
    if size.nodes > 1:
        if options.address is None or not 0 <= options.rank < size.nodes:
            raise ValueError(
                f"{size.nodes} machines: call this on each, with --address HOST of the first and --node-rank from 0 to "
                f"{size.nodes - 1}"
            )
        host, _, port = options.address.partition(":")
        rendezvous = [f"--nnodes={size.nodes}", f"--node-rank={options.rank}"]
        rendezvous += [f"--master-addr={host}", f"--master-port={port or PORT}"]
    rendezvous += [f"--nproc-per-node={processes // size.nodes}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    settings = [*job.overrides, "runtime.cluster=torchrun"]
    return [*launcher, "-m", "coalign.cli", "train", job.file, *settings]


def _count_processes(job: TrainingJob) -> int:
    """Count the processes: each model has one of them, or all. ConfigError for other numbers, and for rollouts."""
    if find_recipe(job.config.algorithm).sync:
        message = f"`{job.config.algorithm}` samples while it trains; torchrun is for recipes that learn from data"
        raise ConfigError([job.config.locations.on(ConfigProblem(("algorithm",), message))])
    everywhere = max(job.size.nodes * job.size.devices, 1)
    counts = {
        name: everywhere if model.num_gpu == "auto" and not model.num_process else model.processes
        for name, model in job.config.models.items()
    }
    total = max(counts.values())
    for name, count in counts.items():
        if count not in (1, total):
            message = f"has {count} processes, and others have {total}: under torchrun a model has one of them, or all"
            raise ConfigError([job.config.locations.on(ConfigProblem(("models", name), message))])
    return total


def _write_script(job: TrainingJob, command: list[str], variables: list[JobVariable]) -> str:
    lines = [
        "#!/bin/bash",
        f"# coalign launch torchrun {job.file}: this machine's processes, each with a rank of the trained model",
        f"cd {shlex.quote(str(job.directory))} || exit 1",
        *(f"export {variable.name}={shlex.quote(variable.value)}  # {variable.reason}" for variable in variables),
    ]
    if job.size.nodes > 1:
        lines.append(f': "${{{TOKEN}:?a secret, the same on all machines: the processes know each other by it}}"')
    return "\n".join([*lines, f"exec {shlex.join(command)}"]) + "\n"
