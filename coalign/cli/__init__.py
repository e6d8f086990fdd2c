"""The command line. Each command imports what it needs when it runs, so that `--help` is fast.

`train.py` has the commands on a run or its YAML, `launch.py` those that start one as a job elsewhere, `generate.py`
those that compute with a model, `models.py` those on model directories, `indexed.py` those on tokenised datasets,
`board.py` the page over run folders.
"""

from __future__ import annotations

import gc
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

import coalign
from coalign.cli import board, generate, indexed, launch, models, train
from coalign.cli.messages import WITH_OPTIONS, describe_usage, name_options
from coalign.cli.problems import describe_error, find_user_error

app = typer.Typer(
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
def show_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    pass


COMMANDS = {
    "train": train.train,
    "check": train.check,
    "plan": train.plan,
    "watch": train.watch,
    "scale": train.scale,
    "save": train.save,
    "stop": train.stop,
    "doctor": train.doctor,
    "check-sync": models.check_sync,
    "convert": models.convert,
    "pipeline": train.pipeline,
    "sweep": train.sweep,
    "eval": train.evaluate,
    "generate": generate.generate,
    "score": generate.score,
    "chat": generate.chat,
    "serve": generate.serve,
    "serve-reward": generate.serve_reward,
    "board": board.board,
    "explain": train.explain,
    "diagnose": train.diagnose,
    "inspect-data": train.inspect_data,
    "init": train.init,
    "import-config": train.import_config,
    "recipes": train.recipes,
    "extend-vocab": models.extend_vocab,
    "merge": models.merge,
    "schema": train.schema,
}
# Their settings may be written with dashes by mistake: these reach the configuration, which says what is right.
TAKE_SETTINGS = ("train", "check", "plan", "doctor", "pipeline", "sweep", "eval", "inspect-data")
for name, command in COMMANDS.items():
    app.command(name=name, context_settings={"ignore_unknown_options": name in TAKE_SETTINGS})(command)
app.add_typer(launch.app, name="launch")
app.add_typer(indexed.app, name="indexed")


def main() -> None:
    """Run the command line. An error is printed in a few lines; with `--traceback` its traceback comes before them."""
    gc.set_threshold(50_000)  # Imports make a million objects that stay: to look for garbage among them takes a second.
    if "--no-code" in sys.argv:  # a module of this directory could stand in for one that Coalign imports
        sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path.cwd()]
    else:
        sys.path.insert(0, "")  # `my.pkg:fn` in a YAML means a module of the current directory
    whole = "--traceback" in sys.argv
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

        if whole:
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
        typer.secho(f"error: {describe_usage(error.format_message(), path, COMMANDS)}", fg="red", err=True)
    return error.exit_code
