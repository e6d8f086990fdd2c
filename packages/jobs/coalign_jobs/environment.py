"""The environment of a job's processes: each variable with its value and with why it is set.

Secrets are never values here. A target passes them by reference: a Kubernetes secret, the environment of the shell that
submits, SkyPilot's secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coalign.config.secrets import is_secret

REFERENCE = re.compile(r"\$\{(?:oc\.)?env:\s*([A-Za-z_]\w*)")


@dataclass(frozen=True)
class JobVariable:
    """An environment variable of a job: its value, and why it is set."""

    name: str
    value: str
    reason: str


def list_variables(
    caches: str, interface: str | None = None, hub: str | None = None, *, starts_ray: bool = False
) -> list[JobVariable]:
    """List what every process of a job has in its environment.

    ``caches``: a directory on each node's own disk. ``hub``: the directory of models and data of the hub (None: each
    node has its own). ``interface``: the network between the nodes (None: each library chooses). ``starts_ray``: the
    job has a Ray cluster of its own.
    """
    variables = [
        JobVariable("PYTHONUNBUFFERED", "1", "log lines appear when they are written"),
        JobVariable("TORCHINDUCTOR_CACHE_DIR", f"{caches}/inductor", "compiled kernels, on the node's own disk"),
        JobVariable("TRITON_CACHE_DIR", f"{caches}/triton", "the same for Triton: a network disk would be locked"),
        JobVariable("NCCL_DEBUG", os.environ.get("NCCL_DEBUG", "WARN"), "NCCL says what failed, and nothing else"),
    ]
    if starts_ray:
        variables += [
            JobVariable("RAY_USAGE_STATS_ENABLED", "0", "Ray reports nothing to its makers"),
            JobVariable("RAY_worker_niceness", "0", "Ray would lower the priority of the processes that compute"),
        ]
    if hub:
        variables.append(JobVariable("HF_HOME", hub, "models and data of the hub, fetched once for all nodes"))
    if interface:
        variables += [
            JobVariable("NCCL_SOCKET_IFNAME", interface, "the network between the nodes, for NCCL's first contact"),
            JobVariable("GLOO_SOCKET_IFNAME", interface, "the same network for gloo"),
        ]
    return variables


def list_references(files: Iterable[Path], overrides: Sequence[str]) -> list[str]:
    """List the variables that configuration files and overrides refer to (`${env:NAME}`), and that are set here."""
    texts = [*overrides, *(file.read_text(encoding="utf-8") for file in files)]
    names = dict.fromkeys(name for text in texts for name in REFERENCE.findall(text))
    return [name for name in names if name in os.environ]


def split_secrets(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Split variables of this shell into those with a value that may be written, and the names of secrets."""
    names = list(names)
    return {name: os.environ[name] for name in names if not is_secret(name)}, [n for n in names if is_secret(n)]


def name_references(values: Mapping[str, str]) -> list[JobVariable]:
    """Return the variables that the configuration reads, with their values of the submitting shell."""
    return [JobVariable(name, value, "the configuration refers to it") for name, value in values.items()]
