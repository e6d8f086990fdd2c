"""The Ray target: a job of a running Ray cluster, submitted to its dashboard with the code of the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from coalign.cluster.ray.space import check_ray
from coalign_jobs.environment import JobVariable, list_variables, name_references, split_secrets
from coalign_jobs.job import TrainingJob, list_unshipped, place_inputs, place_output
from coalign_jobs.yaml_text import write_yaml

MAX_CODE_BYTES = 100 * 2**20  # Ray keeps it in the memory of the head node
ADDRESS = "http://127.0.0.1:8265"


@dataclass(frozen=True)
class RayOptions:
    """``address`` of the dashboard, the ``token_file`` (None: what Ray finds by itself), the network ``interface``."""

    address: str
    token_file: Path | None = None
    interface: str | None = None


def render_submission(job: TrainingJob, options: RayOptions) -> str:
    """Render what is submitted, as YAML. Values of secrets are left out."""
    assert job.shipment is not None, "a job of Ray has a working directory of its own"
    variables, secrets = _list_variables(job, options)
    submission = {
        "address": options.address,
        "entrypoint": _build_entrypoint(job),
        "runtime_env": {
            "working_dir": str(job.directory),
            "env_vars": {variable.name: variable.value for variable in variables}
            | {name: f"${{{name}}}" for name in secrets},
        },
    }
    head = [f"coalign launch ray {job.file}", f"working_dir: {job.shipment.describe()}"]
    head += [f"{path} does not travel: every node has to have it there" for _, path in list_unshipped(job)]
    head += [f"{name}: its value goes to the cluster, and whoever has Ray's token can read it" for name in secrets]
    return write_yaml(submission, head, variables)


def submit_job(job: TrainingJob, options: RayOptions) -> int:
    """Submit the job, show its log, and return its exit code. Ctrl-C leaves the job alone, and returns 130.

    Raises ImportError without `ray[default]`, ValueError for an address that does not answer and a token that is wrong.
    """
    assert job.shipment is not None, "a job of Ray has a working directory of its own"
    check_ray()
    if find_spec("aiohttp") is None or find_spec("requests") is None:
        raise ImportError("jobs of Ray need its dashboard, which is not installed: pip install 'coalign[jobs]'")
    if options.token_file is not None:
        if not options.token_file.is_file():
            raise ValueError(f"--token-file: there is no file {options.token_file}")
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(options.token_file)}
        os.environ.pop("RAY_AUTH_TOKEN", None)
    packed = job.shipment.pack(MAX_CODE_BYTES)
    from coalign_jobs.ray_client import RayJobClient  # imports Ray

    client = RayJobClient(options.address)
    variables, secrets = _list_variables(job, options)
    values = {variable.name: variable.value for variable in variables} | {name: os.environ[name] for name in secrets}
    with TemporaryDirectory() as folder:
        archive = Path(folder, f"{job.name}.zip")
        archive.write_bytes(packed)
        number = client.submit(job.name, _build_entrypoint(job), archive, values)
    stop = f"ray job stop {number} --address {client.address}"
    sys.stderr.write(f"job {number} at {client.address}; end it: {stop}\n")
    try:
        client.follow(number, _write)
        return client.wait(number)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"\nthe job goes on; its log: ray job logs -f {number} --address {client.address}; end it: {stop}\n"
        )
        return 130


def _build_entrypoint(job: TrainingJob) -> str:
    """The command. The working directory of a job is Ray's, and goes: the run folder is where it would be here."""
    settings = ["runtime.ray_address=auto", place_output(job, str(job.directory)), *place_inputs(job)]
    return job.command("python", *settings)


def _list_variables(job: TrainingJob, options: RayOptions) -> tuple[Sequence[JobVariable], Sequence[str]]:
    """The variables of a job, and the names of secrets."""
    values, secrets = split_secrets(job.references)
    return [*list_variables("/tmp/coalign", options.interface), *name_references(values)], secrets


def _write(lines: str) -> None:
    sys.stdout.write(lines)
    sys.stdout.flush()
