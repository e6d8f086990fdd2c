"""`coalign agent-test`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def agent_test(
    command: Annotated[
        list[str], typer.Argument(help="The agent's command, after `--`; {url} is the address of the model's API.")
    ],
    answers: Annotated[
        Path | None,
        typer.Option(help='What the model says: a JSON text a line, or {"name": …, "arguments": …}; default: "Done."'),
    ] = None,
    sandbox: Annotated[
        str, typer.Option(help="Where the agent runs, as in YAML: `{type: bwrap}`; default: on this machine.")
    ] = "{type: 'coalign_agents.host_box:HostBox'}",
    seconds: Annotated[float, typer.Option(min=1.0, help="Wall-clock time of the agent.")] = 300.0,
) -> None:
    """Run an agent against a scripted model, and say which of its calls could be trained, and in how many rows."""
    import asyncio

    import yaml

    from coalign_agents.trial import read_answers, report, try_agent
    from coalign_graders.boxes import SandboxConfig

    episode, session, result = asyncio.run(
        try_agent(command, read_answers(answers), SandboxConfig.model_validate(yaml.safe_load(sandbox)), seconds)
    )
    ended = f"was stopped after {seconds:g} s" if result.timed_out else f"ended with exit code {result.code}"
    typer.echo(f"the agent {ended}")
    for line in report(episode, session):
        typer.echo(line)
    if result.code != 0 or not episode.tree.turns:
        for name, text in (("output", result.out), ("errors", result.err)):
            if text.strip():
                typer.echo(f"\nits {name} end with:\n{text.strip()[-2000:]}", err=True)
        raise typer.Exit(1)
