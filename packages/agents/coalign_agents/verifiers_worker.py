"""Plays tasks of a verifiers environment (0.4). It runs in verifiers' own interpreter and needs nothing of Coalign.

Standard input and output are lines of JSON. First {"env": verifiers' EnvConfig} -> {"ready": number of tasks}. Then
{"id", "do": "task", "index"} -> {"id", "data"}; {"id", "do": "play", "data", "model", "base_url"} -> {"id", "traces",
"error"}, in any order; {"do": "stop", "id"} ends a play.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # pyright: ignore[reportMissingImports]

_MAX_TASKS = 1_000_000
_MAX_LINE = 64 * 2**20  # bytes


async def play(env: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Play one task; return what its traces earned."""
    task_class = type(env.taskset).task_type()
    task = task_class(task_class.data_type().model_validate(request["data"]), env.config.taskset.task)
    # The address holds the key. verifiers reads one from a variable all the same.
    client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var="COALIGN_NO_KEY")
    [slot] = env.slots(task)
    episode = await env.run_slot(slot, vf.ModelContext(model=request["model"], client=client))
    traces = [
        {
            "id": trace.id,  # every request of it carries this as X-Session-ID
            "trained": trace.agent.trainable,
            "reward": trace.reward,
            "values": {
                **{name: reward.value for name, reward in trace.rewards.items() if reward is not None},
                **trace.metrics,
            },
        }
        for trace in episode.traces
    ]
    errors = [error for source in (episode, *episode.traces) for error in source.errors]
    error = f"{errors[-1].type}: {errors[-1].message}" if errors and not episode.ok else None
    return {"traces": traces, "error": error}


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an environment prints is no answer
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=_MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    env = load_environment(resolve_env_config(json.loads(await lines.readline())["env"]))
    tasks = list(itertools.islice(env.taskset, _MAX_TASKS)) if env.taskset.bounded else []
    running: dict[Any, asyncio.Task[None]] = {}

    def say(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record, default=str) + "\n")

    async def answer(request: dict[str, Any]) -> None:
        try:
            say({"id": request["id"], **await play(env, request)})
        except Exception as error:  # one episode's failure is not the worker's
            say({"id": request["id"], "traces": [], "error": f"{type(error).__name__}: {error}"})
        finally:
            running.pop(request["id"], None)

    async with env.serving():
        say({"ready": len(tasks)})
        while line := await lines.readline():
            request = json.loads(line)
            if request["do"] == "task":
                say({"id": request["id"], "data": tasks[request["index"]].data.model_dump(mode="json")})
            elif request["do"] == "play":
                running[request["id"]] = loop.create_task(answer(request))
            elif task := running.get(request["id"]):
                task.cancel()


if __name__ == "__main__":
    os.environ.setdefault("COALIGN_NO_KEY", "none")
    asyncio.run(main())
