"""What the gateway of coalign-agents costs: many episodes at once, each of several turns, with a scripted policy.

`python -m benchmarks.gateway [--episodes 512] [--turns 8] [--dialect messages]` prints the processor time that the
serving process takes for a turn (HTTP, dialect, rendering of the difference, tree), and its memory. The clients are
another process. Tokens are those of a byte tokenizer; answers have 64.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import time
from contextlib import ExitStack

from coalign.data.templates import load_template
from coalign.environments.episode import EnvironmentClock, Episode
from coalign.environments.rendering import Rendering
from coalign_agents.gateway import join_gateway
from coalign_agents.session import LOOPBACK, EpisodeSession
from coalign_agents.trial import ScriptedPolicy, build_tokenizer
from coalign_serve.dialects import DIALECTS

_TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "description": "Does something. " * 20,
                                            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
          for i in range(8)]  # fmt: skip
_SYSTEM = "You are a careful agent. " * 80
_ANSWER = "It is " + "a" * 57


def _begin(index: int, rendering: Rendering, policy: ScriptedPolicy) -> Episode:
    episode = Episode(row={"messages": []}, group=index, index=0, seed=0, prompt=[], max_new_tokens=10**6,
                      policy=policy, rendering=rendering)  # fmt: skip
    episode.clock = EnvironmentClock(1e6, lambda: None)
    return episode


def _write(dialect: str, history: list[dict[str, str]]) -> dict:
    if dialect == "messages":
        tools = [{"name": t["function"]["name"], "description": t["function"]["description"],
                  "input_schema": t["function"]["parameters"]} for t in _TOOLS]  # fmt: skip
        return {"model": "policy", "system": _SYSTEM, "messages": history, "tools": tools, "max_tokens": 256}
    if dialect == "responses":
        tools = [{"type": "function", **tool["function"]} for tool in _TOOLS]
        return {"model": "policy", "instructions": _SYSTEM, "input": history, "tools": tools}
    return {"model": "policy", "messages": [{"role": "system", "content": _SYSTEM}, *history], "tools": _TOOLS}


def _ask_all(keys: list[str], port: int, turns: int, dialect: str, path: str, pipe) -> None:
    async def play(key: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        history = [{"role": "user", "content": "What is 2+3? " * 20}]
        for turn in range(turns):
            body = json.dumps(_write(dialect, history)).encode()
            head = f"POST /{key}/v1{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            got = await reader.readuntil(b"\r\n\r\n")
            assert got.startswith(b"HTTP/1.1 200"), got
            length = int(got.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            assert _ANSWER.encode() in await reader.readexactly(length)
            more = {"role": "user", "content": f"And now {turn}? " * 10}
            history += [{"role": "assistant", "content": _ANSWER}, more]
        writer.close()

    async def main() -> None:
        await asyncio.gather(*map(play, keys))

    pipe.send("ready")
    pipe.recv()
    asyncio.run(main())
    pipe.send("done")


async def _measure(episodes: int, turns: int, dialect: str) -> None:
    tokenizer = build_tokenizer()
    rendering, policy = Rendering(load_template(tokenizer, "auto")), ScriptedPolicy(tokenizer, [_ANSWER])
    named = next(item for item in DIALECTS if item.__name__.lower().startswith(dialect))
    started = [_begin(index, rendering, policy) for index in range(episodes)]
    async with join_gateway(LOOPBACK) as gateway:
        with ExitStack() as stack:
            keys = [stack.enter_context(gateway.admit(EpisodeSession(one, "hermes"))) for one in started]
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            port = int(gateway.address.rsplit(":", 1)[1])
            client = multiprocessing.get_context("spawn").Process(
                target=_ask_all, args=(keys, port, turns, dialect, named.path, theirs)
            )
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            client.start()
            await asyncio.to_thread(ours.recv)
            ours.send("go")
            cpu, wall = time.process_time(), time.perf_counter()
            await asyncio.to_thread(ours.recv)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            client.join()
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    count = episodes * turns
    assert all(one.counts["turns"] == turns for one in started)
    for one in started:
        one.close()
    assert all(len(one.rows) == 1 for one in started)
    print(f"{dialect}: {count} turns, {1000 * cpu / count:.2f} ms of processor a turn, {count / wall:.0f} turns/s, "
          f"{memory:.0f} MiB more")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--dialect", choices=("chat", "responses", "messages"), default="chat")
    options = parser.parse_args()
    asyncio.run(_measure(options.episodes, options.turns, options.dialect))
