"""The SkyPilot target: a task YAML for machines of any cloud, which Sky starts, restarts and ends.

SkyPilot copies the working directory to every machine. Run folders lie on a bucket that all machines mount, or on the
disk of the only machine, with copies of checkpoints in an object store (`runtime.save_copies_to`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from secrets import token_hex
from tempfile import NamedTemporaryFile
from typing import Any

import yaml

from coalign_jobs.environment import list_variables, name_references, split_secrets
from coalign_jobs.job import TrainingJob, place_output, refuse_unshipped
from coalign_jobs.ray_script import raise_ray
from coalign_jobs.yaml_text import write_yaml

RUNS = "/coalign-runs"  # where machines mount the bucket
SEVERAL_NODES = """\
# SkyPilot has a Ray of its own on these machines; this one has other ports and files, and is ended by its process.
export RAY_HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n1) RAY_PORT=6399 RAY_FILES=/tmp/ray_coalign
# `sky jobs launch --secret RAY_AUTH_TOKEN` hands over the token.
{functions}
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  (start_ray worker)
  exit 0  # it ends with the head, whose exit code counts
fi
(start_ray head) &
head=$!
wait_for_nodes && {command}
code=$?
kill "$head" 2>/dev/null
exit "$code"
"""


@dataclass(frozen=True)
class SkyPilotOptions:
    """What a machine is: ``gpu`` (`H100`), ``cloud``, ``cores`` (`8+`), an ``image``; ``bucket`` for run folders.

    ``spot``: machines that can be taken away, at a lower price. ``setup``: how Coalign is installed there.
    """

    gpu: str | None = None
    cloud: str | None = None
    cores: str | None = None
    image: str | None = None
    bucket: str | None = None
    spot: bool = False
    interface: str | None = None
    setup: str = "pip install 'coalign[ray,math,vllm,plots]'"


def render_task(job: TrainingJob, options: SkyPilotOptions) -> str:
    """Render the task YAML. ValueError for devices without a name, and for runs whose folder would be lost."""
    size, several = job.size, job.size.nodes > 1
    if size.devices and not options.gpu:
        raise ValueError(f"--gpu: the run needs {size.devices} per machine, and a cloud wants to know which, e.g. H100")
    if several and not options.bucket:
        raise ValueError(f"--bucket: {size.nodes} machines share a run folder; name a bucket, e.g. s3://my-runs")
    if options.spot and not (options.bucket or job.config.runtime.save_copies_to):
        raise ValueError(
            "--spot: a machine that is taken away takes its disk along; name a --bucket for the run folder, or set "
            "runtime.save_copies_to"
        )
    refuse_unshipped(job, "name a URL, a data set of the hub, or a path in the bucket")
    values, secrets = split_secrets(job.references)
    settings = [place_output(job, RUNS)] if options.bucket else []
    if several:
        secrets = [*secrets, "RAY_AUTH_TOKEN"]
        settings.append("runtime.ray_address=auto")
    if options.spot and job.config.runtime.preemption_notice is None:
        settings.append("runtime.preemption_notice=25")  # clouds warn 30 s before, AWS 120 s
    variables = [*list_variables("/tmp/coalign", options.interface, starts_ray=several), *name_references(values)]
    command = job.command("python", *settings)
    if several:
        command = f"RAY_ADDRESS=$RAY_HEAD:$RAY_PORT {command}"
    resources: dict[str, Any] = {
        "accelerators": f"{options.gpu}:{size.devices}" if size.devices else None,
        "cloud": options.cloud,
        "cpus": options.cores,
        "image_id": f"docker:{options.image}" if options.image else None,
        "use_spot": True if options.spot else None,
        "job_recovery": {"strategy": "EAGER_NEXT_REGION"} if options.spot else None,
    }
    task: dict[str, Any] = {
        "name": job.name,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "num_nodes": size.nodes,
        "workdir": ".",
        "envs": {variable.name: variable.value for variable in variables},
        "secrets": dict.fromkeys(secrets),
        "file_mounts": {RUNS: {"source": options.bucket, "mode": "MOUNT_CACHED"}} if options.bucket else {},
        "setup": f"{options.setup}\n",
        "run": SEVERAL_NODES.format(functions=raise_ray(size, "ray"), command=command) if several else f"{command}\n",
    }
    task = {name: value for name, value in task.items() if value not in ({}, [])}
    travels = job.shipment.describe() if job.shipment else ""
    head = [
        f"coalign launch skypilot {job.file}: {size.nodes} machine(s)",
        f"workdir: {travels}; .skyignore leaves out more",
    ]
    return write_yaml(task, head, variables)


def launch_task(job: TrainingJob, task: str) -> int:
    """Start the task as a managed job, which SkyPilot restarts; shows its log, and returns Sky's exit code.

    A token for Ray is made where the environment has none.
    """
    if shutil.which("sky") is None:
        raise ValueError("SkyPilot's `sky` is not installed: pip install 'skypilot[CLOUD]', or look at --dry-run")
    secrets = [word for name in yaml.safe_load(task).get("secrets", {}) for word in ("--secret", name)]
    environment = {"RAY_AUTH_TOKEN": token_hex(32), **os.environ}
    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(task)
        file.flush()
        command = ["sky", "jobs", "launch", "--yes", *secrets, file.name]
        return subprocess.run(command, cwd=job.directory, env=environment).returncode
