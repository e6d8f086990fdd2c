"""Jobs of a Ray cluster: submitted with their code, followed by their log, ended with their exit code.

It needs `ray[default]`, whose dashboard takes jobs; models and their calls do not (coalign.cluster.ray).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

CONNECT_SECONDS = 10.0  # how long the dashboard may take to answer
POLL_SECONDS = 0.5
AGENT_SECONDS = 120.0  # how long the nodes of a cluster that has just started may take until one of them starts jobs
STOPPED = 143  # as of a process that SIGTERM ended


class RayJobClient:
    """Submits jobs to the Ray cluster whose dashboard is at ``address`` (`http://HOST:8265`)."""

    def __init__(self, address: str) -> None:
        """Raises ImportError without `ray[default]`, ValueError if nothing answers there or the token is wrong."""
        self.address = address if "://" in address else f"http://{address}"
        _check_answer(self.address)
        try:
            self._client = JobSubmissionClient(self.address)
            self._client.list_jobs()  # Ray tells its version to everybody
        except AuthenticationError as refusal:
            raise ValueError(describe_refusal(self.address, refusal)) from None
        except ConnectionError as problem:
            raise ValueError(f"no Ray dashboard answers at {self.address}: {problem}") from None
        except RuntimeError as problem:
            if "ray[default]" in str(problem):
                raise ImportError("jobs of Ray need its dashboard: pip install 'coalign[jobs]'") from None
            raise ValueError(f"{self.address} is no dashboard of Ray: {_first_line(problem)}") from None

    def submit(self, name: str, entrypoint: str, archive: Path | str, variables: Mapping[str, str]) -> str:
        """Start the command in the ``archive``, a zip that is uploaded, or its URI; returns the job's id.

        Waits for a node that starts jobs; ValueError if there is none.
        """
        environment = {"working_dir": str(archive), "env_vars": dict(variables)}
        deadline = time.monotonic() + AGENT_SECONDS
        while True:
            try:
                return self._client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata={"name": name})
            except RuntimeError as problem:
                if "No available agent" not in str(problem):
                    raise
                if time.monotonic() > deadline:
                    raise ValueError(f"no node of {self.address} starts jobs: {_first_line(problem)}") from None
            time.sleep(POLL_SECONDS)

    def follow(self, job: str, write: Callable[[str], object]) -> None:
        """Pass the log of a job on until it ends."""

        async def pass_on() -> None:
            async for lines in self._client.tail_job_logs(job):
                write(lines)

        try:
            asyncio.run(pass_on())
        except RuntimeError as problem:
            write(f"coalign: the log breaks off ({_first_line(problem)}); the job goes on\n")

    def wait(self, job: str) -> int:
        """Wait for the end of a job; returns its exit code, 128 + the signal that ended it."""
        while not (details := self._client.get_job_info(job)).status.is_terminal():
            time.sleep(POLL_SECONDS)
        return _find_exit_code(details)


def _find_exit_code(details: JobDetails) -> int:
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        return STOPPED
    code = details.driver_exit_code
    return 1 if code is None else code if code >= 0 else 128 - code


def describe_refusal(address: str, refusal: Exception) -> str:
    """Describe a cluster that refuses the token, or the lack of one."""
    token_path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    source = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else token_path
    return (
        f"the Ray cluster at {address} refuses the token of {source} ({_first_line(refusal)}): it has to be the one "
        "with which its nodes were started (docs/ports.md)"
    )


def _check_answer(address: str) -> None:
    """Refuse (ValueError) an address at which nothing listens: Ray's client would wait for minutes."""
    parsed = urlsplit(address)
    try:
        host, port = parsed.hostname, parsed.port or (443 if parsed.scheme == "https" else 80)
        if parsed.scheme not in ("http", "https") or host is None:
            raise ValueError(f"'{address}' is no address of Ray's dashboard, which has the form http://HOST:8265")
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as problem:
        raise ValueError(
            f"no Ray dashboard answers at {address}: {problem}. It listens on port 8265 of the head node, and on other "
            "machines only if Ray was started with --dashboard-host=0.0.0.0"
        ) from None


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0]
