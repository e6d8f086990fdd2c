"""The command line. Each command imports what it needs when it runs, so that `--help` is fast.

`train.py` has the commands on a run or its YAML. Others come from companions (`coalign/companions.py`).
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import coalign
from coalign.cli import train
from coalign.cli.problems import describe_error, find_user_error
from coalign.cli.usage import WITH_OPTIONS, describe_usage, name_options
from coalign.companions import COMMANDS as GROUP
from coalign.companions import list_entries, load


class _CommandLine(TyperGroup):
    """The commands of Coalign, and those of its companions, which are imported when they are called or listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        there = [*COMMANDS, *list_entries(GROUP)]
        return sorted(there, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None for a name that nobody knows. ImportError names a companion that is not installed."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        brought = load(GROUP, cmd_name, f"`coalign {cmd_name}`")
        return None if brought is None else _build_command(cmd_name, brought)


app = typer.Typer(
    cls=_CommandLine,
    name="coalign",
    help="Alignment training of language models: SFT, PPO, GRPO and relatives, from a laptop to a Ray cluster.\n\n"
    "Begin with `coalign init grpo run.yaml`, look at it with `coalign check run.yaml`, "
    "start it with `coalign train run.yaml`.\n\n"
    "With `--traceback` every command shows the whole traceback of an error.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coalign {coalign.__version__}")
        raise typer.Exit


@app.callback()
def _show_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    pass


COMMANDS = {"train": train.train, "check": train.check, "scale": train.scale, "save": train.save, "stop": train.stop}
# As `--help` lists them, with those of companions.
ORDER = (
    *("train", "check", "plan", "watch", "scale", "save", "stop", "doctor", "check-sync", "convert", "indexed"),
    *("pipeline", "sweep", "launch", "eval", "generate", "score", "chat", "serve", "serve-reward", "board"),
    *("explain", "diagnose", "inspect-data", "init", "import-config", "recipes", "extend-vocab", "merge", "schema"),
)
# Their settings may be written with dashes by mistake: these reach the configuration, which says what is right.
TAKE_SETTINGS = ("train", "check", "plan", "doctor", "pipeline", "sweep", "eval", "inspect-data")


def _add_command(to: typer.Typer, name: str, command: Callable[..., Any]) -> None:
    to.command(name=name, context_settings={"ignore_unknown_options": name in TAKE_SETTINGS})(command)


def _build_command(name: str, brought: Any) -> Any:
    """Build a command of a companion's function, or of its `typer.Typer`."""
    if not isinstance(brought, typer.Typer):
        single = typer.Typer(rich_markup_mode="markdown", add_completion=False)
        _add_command(single, name, brought)
        return get_command(single)
    group = get_command(brought)
    group.name = name
    return group


for name, command in COMMANDS.items():
    _add_command(app, name, command)


def main() -> None:
    """Run the command line. An error is printed in a few lines; with `--traceback` its traceback comes before them."""
    gc.set_threshold(50_000)  # Imports make a million objects that stay: to look for garbage among them takes a second.
    if "--no-code" in sys.argv:  # a module of this directory could stand in for one that Coalign imports
        sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path.cwd()]
    else:
        sys.path.insert(0, "")  # `my.pkg:fn` in a YAML means a module of the current directory
    shows_traceback = "--traceback" in sys.argv
    sys.argv[:] = [word for word in sys.argv if word != "--traceback"]
    try:
        code = app(prog_name="coalign", standalone_mode=False)
        raise SystemExit(code if isinstance(code, int) else 0)
    except typer.Abort:
        raise SystemExit(130) from None
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's classes for what it cannot read are its own
            raise SystemExit(_refuse_usage(error)) from None
        from coalign.config.secrets import hide_secrets

        if shows_traceback:
            sys.stderr.write(hide_secrets("".join(traceback.format_exception(error))))
        message = describe_error(error)
        message = name_options(message) if sys.argv[1:2] and sys.argv[1] in WITH_OPTIONS else message
        typer.secho(f"error: {hide_secrets(message)}", fg="red", err=True)
        raise SystemExit(1 if find_user_error(error) is None else 2) from None


def _refuse_usage(error: Any) -> int:
    """Say what is wrong with the command line; a command without anything shows its help. Returns the exit code."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message())
    else:
        path = context.command_path if context else "coalign"
        typer.secho(f"error: {describe_usage(error.format_message(), path, ORDER)}", fg="red", err=True)
    return error.exit_code
