"""The environment for tasksets of verifiers (0.4), and through them of Harbor, NeMo Gym, OpenEnv and TextArena.

verifiers runs in an interpreter of its own, since it pins versions of packages that Coalign uses, too. One process
plays all episodes; it reaches the policy through the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import PositiveInt

from coalign.environments.episode import Episode
from coalign_agents.gateway import join_gateway
from coalign_agents.session import LOOPBACK, EpisodeSession, GatewayConfig
from coalign_serve.formats import check_format

_WORKER = Path(__file__).with_name("verifiers_worker.py")
_MAX_LINE = 64 * 2**20  # bytes
_workers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[HubWorker]]] = WeakKeyDictionary()


class VerifiersError(RuntimeError):
    """The hub, or what it needs, has failed: that says nothing about the policy."""


class HubWorker:
    """A process of the hub's interpreter, which plays many episodes at once. ``tasks``: how many it has."""

    def __init__(self, process: asyncio.subprocess.Process, tasks: int) -> None:
        assert process.stdin and process.stdout  # both are pipes
        self.process, self.tasks = process, tasks
        self._stdin, self._stdout, self._numbers = process.stdin, process.stdout, count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, python: str, env: Mapping[str, Any]) -> HubWorker:
        """Start ``python`` with verifiers, and load its environment. VerifiersError if that ends it."""
        pipe = asyncio.subprocess.PIPE
        path = Path(python).expanduser()
        if not path.is_file():
            raise VerifiersError(f"rollout.python: no file {path}; expected the interpreter that has verifiers")
        # -P: this folder, whose modules have names that hubs have, too, is not searched.
        process = await asyncio.create_subprocess_exec(
            str(path), "-P", str(_WORKER), stdin=pipe, stdout=pipe, limit=_MAX_LINE, start_new_session=True
        )
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps({"env": env}).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            code = await process.wait()
            raise VerifiersError(f"verifiers ended with exit code {code} at its start; see its errors above")
        return cls(process, json.loads(line)["ready"])

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    async def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; a caller that is cancelled stops it.

        Raises VerifiersError if the worker dies.
        """
        if self.has_ended:
            raise VerifiersError("verifiers' process has ended")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write({"id": number, **request})
        try:
            return await answer
        except asyncio.CancelledError:
            self._write({"id": number, "do": "stop"})
            raise
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Let the worker end."""
        self._stdin.close()

    def _write(self, record: Any) -> None:
        self._stdin.write(json.dumps(record).encode() + b"\n")

    async def _read(self) -> None:
        while line := await self._stdout.readline():
            record = json.loads(line)
            if (answer := self._waiting.get(record["id"])) and not answer.done():
                answer.set_result(record)
        code = await self.process.wait()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(VerifiersError(f"verifiers' process has ended with exit code {code}"))


async def _share_worker(python: str, env: Mapping[str, Any]) -> HubWorker:
    """Return the worker of this event loop: importing verifiers takes seconds. One that has died is started again."""
    shared = _workers.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps([python, env], sort_keys=True)
    task = shared.get(key)
    if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().has_ended)):
        task = shared[key] = asyncio.create_task(HubWorker.start(python, env))
    return await asyncio.shield(task)


async def verifiers(
    episode: Episode,
    *,
    env: dict[str, Any],
    python: str,
    parser: str = "hermes",
    max_turns: PositiveInt = 500,
    gateway: GatewayConfig = LOOPBACK,
) -> None:
    """Play the row's ``task`` of a verifiers environment; its reward is that of the traces that verifiers trains.

    ``env`` is verifiers' EnvConfig: `{taskset: {id: gsm8k-v1}, agent: {harness: {id: bash}}}`. ``python``: the
    interpreter that has verifiers and the taskset's package. `python -m coalign_agents.verifiers PYTHON ENV` writes the
    rows of data. Traces of judges and users are not trained on, nor are tries that verifiers gave up. Rewards and
    metrics of traces are counted in `episode/verifiers/<name>`. A task that fails is dropped, unless the policy had no
    room left: then it is a truncated sample, of reward 0 if nobody scored it.
    """
    worker = await _share_worker(python, env)
    session = EpisodeSession(episode, parser, max_turns=max_turns)
    async with join_gateway(gateway) as server:
        with server.admit(session) as key:
            base_url = f"{server.address}/{key}/v1"
            result = await worker.ask(do="play", data=episode.row["task"], model="policy", base_url=base_url)
    if result["error"] and not episode.is_cut:
        raise VerifiersError(f"verifiers: {result['error']}")
    traces = {trace["id"]: trace for trace in result["traces"]}
    for turn in episode.tree.turns:
        turn.trained &= traces[turn.label]["trained"] if turn.label in traces else not traces
    for trace in traces.values():
        for name, value in trace["values"].items():
            episode.count(f"verifiers/{name}", value or 0.0)
    if any(turn.trained for turn in episode.tree.turns):
        episode.reward(sum(trace["reward"] or 0.0 for trace in traces.values() if trace["trained"]))


def _check_verifiers(samples: Mapping[str, int], *, python: str, parser: str, **_: Any) -> None:
    if not os.access(Path(python).expanduser(), os.X_OK):
        raise ValueError(f"rollout.python: {python!r} is no program; expected the interpreter that has verifiers")
    check_format(parser)


verifiers.check = _check_verifiers


async def _export(python: str, env: str) -> None:
    """Write a row for each task of a taskset."""
    worker = await HubWorker.start(python, json.loads(env))
    for index in range(worker.tasks):
        data = (await worker.ask(do="task", index=index))["data"]
        prompt = data.get("prompt")
        row = {"prompt": prompt if isinstance(prompt, str) else json.dumps(prompt), "task": data}
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    worker.close()


if __name__ == "__main__":
    asyncio.run(_export(*sys.argv[1:]))
