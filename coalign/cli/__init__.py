"""The command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import sys

import typer

from coalign.cli import indexed, inference, models, training
from coalign.cli import inference as serving
from coalign.cli import models as converting

app = typer.Typer(
    name="coalign",
    help="Alignment training of language models: SFT, PPO, GRPO and relatives, from a laptop to a Ray cluster.\n\n"
    "Begin with `coalign init grpo > run.yaml`, look at it with `coalign check run.yaml`, "
    "start it with `coalign train run.yaml`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

COMMANDS = {
    "train": training.train,
    "check": training.check,
    "check-sync": models.check_sync,
    "convert": converting.convert,
    "pipeline": training.pipeline,
    "eval": training.evaluate,
    "generate": inference.generate,
    "score": inference.score,
    "chat": inference.chat,
    "serve-reward": serving.serve_reward,
    "inspect-data": training.inspect_data,
    "init": training.init,
    "extend-vocab": models.extend_vocab,
    "merge": models.merge,
    "schema": training.schema,
}
for name, command in COMMANDS.items():
    app.command(name=name)(command)
app.add_typer(indexed.app, name="indexed")


def main() -> None:
    """Entry point. What a person can mend is told in one line; anything else keeps its traceback."""
    sys.path.insert(0, "")  # `my.pkg:fn` in a YAML means a module of the current directory
    try:
        app()
    except Exception as error:
        problem = _refusal(error)
        if problem is None:
            raise
        typer.secho(f"error: {told(problem)}", fg="red", err=True)
        raise SystemExit(2) from error


def _refusal(error: Exception) -> Exception | None:
    """What a person can mend: of a failure in a worker, what a model refuses before it serves."""
    if isinstance(error, RuntimeError):
        from coalign.cluster.future import WorkerError  # slow to import

        if isinstance(error, WorkerError):
            error = error.cause if error.label.endswith(".setup") else None
    # A module that is missing inside of other code is for whoever wrote that.
    mendable = isinstance(error, (ValueError, OSError, ImportError, NotImplementedError))
    return error if mendable and not isinstance(error, ModuleNotFoundError) else None


def told(problem: Exception) -> str:
    """The problem in our words: settings that came from options are validated as those of a YAML are."""
    from pydantic import ValidationError

    from coalign.config.errors import describe_error, format_key

    if not isinstance(problem, ValidationError):
        return str(problem)
    return "\n".join(": ".join(filter(None, (format_key(e["loc"]), describe_error(e)))) for e in problem.errors())
