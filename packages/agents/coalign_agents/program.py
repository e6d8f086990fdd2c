"""The environment for programs: a command that asks a model, in a box where it reaches the policy and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from coalign.environments.episode import Episode
from coalign_agents.gateway import join_gateway
from coalign_agents.session import LOOPBACK, EpisodeSession, GatewayConfig
from coalign_graders.boxes import BoxResult, SandboxConfig, open_sandbox
from coalign_serve.formats import check_format

_BUBBLEWRAP = SandboxConfig(type="bwrap")
_MISSING = (126, 127)  # exit codes of shells for a program that cannot be run


async def program(
    episode: Episode,
    *,
    command: list[str],
    sandbox: SandboxConfig = _BUBBLEWRAP,
    files: dict[str, str] = {},  # noqa: B006
    env: dict[str, str] = {},  # noqa: B006
    seconds: PositiveFloat = 600.0,
    grade: list[str] | None = None,
    grade_seconds: PositiveFloat = 60.0,
    parser: str = "hermes",
    untrained: list[str] = ["aux"],  # noqa: B006
    max_turns: PositiveInt = 500,
    gateway: GatewayConfig = LOOPBACK,
) -> None:
    """Run ``command`` in a box; its environment variables say where the policy is (see `list_variables`).

    ``{prompt}`` in the command, and in the texts of ``files`` and ``env``, is the row's prompt, any other ``{KEY}`` the
    value of that key of the row, and ``{url}`` the address of OpenAI's API. ``files`` are written before. ``sandbox``:
    see SandboxConfig of coalign_graders. After ``seconds`` of wall-clock time the program is stopped, and judged by
    what it has done (`episode/program_timeout`); other exit codes than 0 are counted (`episode/program_failed`).

    ``grade``: a command that then runs in the same box; the reward is 1 if its exit code is 0, else 0. It sees what the
    program has left there, and the program sees no file of it before. A box that fails, and a command that is not
    there, drop the episode (counted by the exception's name): they say nothing about the policy. Other arguments are
    those of `agent`.
    """
    session = EpisodeSession(episode, parser, untrained, max_turns)
    async with join_gateway(gateway) as server, open_sandbox(sandbox) as box:
        address = server.address if gateway.url else f"http://{await box.expose(server.port)}"
        with server.admit(session) as key:
            variables = list_variables(address, key)
            values = {**episode.row, "url": variables["OPENAI_BASE_URL"]}
            for path, text in files.items():
                await box.write(path, fill(text, values).encode())
            variables |= {name: fill(text, values) for name, text in env.items()}
            result = await box.run([fill(word, values) for word in command], seconds=seconds, env=variables)
        _check_started(command, result)
        episode.count("program_timeout", result.timed_out)
        episode.count("program_failed", result.code not in (0, None))
        if grade is not None:
            result = await box.run([fill(word, values) for word in grade], seconds=grade_seconds)
            _check_started(grade, result)
            episode.count("grade_timeout", result.timed_out)
            episode.count("grade_failed", result.code not in (0, None))
            episode.reward(float(result.code == 0))


def _check_started(command: list[str], result: BoxResult) -> None:
    if result.code in _MISSING:
        raise RuntimeError(f"{' '.join(command)[:80]}: exit code {result.code}: {result.err.strip()[-200:]}")


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Replace each ``{KEY}`` that the values have; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]) if match[1] in values else match[0], text)


def list_variables(address: str, key: str) -> dict[str, str]:
    """Return the environment variables by which agents find a model: OpenAI's and Anthropic's, and what they build on.

    ``address`` is that of the gateway, without a path. `policy` is trained, `aux` is for titles and the like.
    """
    base = f"{address}/{key}/v1"
    opencode = {
        "provider": {
            "coalign": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": base, "apiKey": key},
                "models": {"policy": {}, "aux": {}},
            }
        },
        "model": "coalign/policy",
        "small_model": "coalign/aux",
    }
    return {
        "COALIGN_BASE_URL": base,
        "OPENAI_BASE_URL": base,
        "OPENAI_API_BASE": base,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": "policy",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "ANTHROPIC_BASE_URL": f"{address}/{key}",
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": "policy",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "aux",
        "ANTHROPIC_SMALL_FAST_MODEL": "aux",
        "CLAUDE_CODE_SUBAGENT_MODEL": "policy",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENCODE_CONFIG_CONTENT": json.dumps(opencode),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def _check_program(samples: Mapping[str, int], *, parser: str, **_: Any) -> None:
    check_format(parser)


program.check = _check_program
