"""What commands say of an error: to people in a few lines, and with `--json` as one object on stdout."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from coalign.report.error_text import describe_briefly

if TYPE_CHECKING:
    from coalign.config.errors import KeyLocations

_KEY = re.compile(r"[a-z_]+(?:\.\w+|\[\d+\])+(?=[: ])")  # with which a message begins that names its key


def find_user_error(error: BaseException) -> BaseException | None:
    """Return the error if the user can fix it, else None. A worker's error counts if a model's setup or a person's
    reward raised it."""
    problem: BaseException | None = error
    if isinstance(error, RuntimeError):
        from coalign.cluster.future import WorkerError  # slow to import
        from coalign.rewards.calls import RewardBug

        if isinstance(error, WorkerError):
            problem = error.cause if error.call.method == "setup" or isinstance(error.cause, RewardBug) else None
        if isinstance(problem, RewardBug):
            return problem
    # A module that is missing inside of other code is a problem of that code's author.
    fixable = isinstance(problem, (ValueError, OSError, ImportError, NotImplementedError))
    return problem if fixable and not isinstance(problem, ModuleNotFoundError) else None


def describe_error(error: BaseException) -> str:
    """Return the message of an error, with where people's own code raised it if no setting is wrong."""
    if (problem := find_user_error(error)) is None:
        return describe_briefly(error, "".join(traceback.format_exception(error)))
    return "\n".join([_describe(problem), *getattr(error, "__notes__", ())])


def _describe(problem: BaseException) -> str:
    """Return the message; settings given as options are described like those of a YAML file."""
    from pydantic import ValidationError

    from coalign.config.errors import describe_error as describe_value
    from coalign.config.errors import format_key

    if not isinstance(problem, ValidationError):
        return str(problem)
    return "\n".join(": ".join(filter(None, (format_key(e["loc"]), describe_value(e)))) for e in problem.errors())


@contextmanager
def report_as_json(facts: dict[str, Any]) -> Iterator[None]:
    """Print ``facts`` and the problems raised inside as one JSON object; exit code 1 if there are any.

    What other code prints meanwhile goes to stderr. `places` among the facts tells where keys were written.
    """
    problems: list[dict[str, Any]] = []
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        problems = _list_problems(error, facts.get("places"))
    from coalign.config.secrets import hide_secrets

    shown = {key: value for key, value in facts.items() if key != "places"} | {"problems": problems}
    typer.echo(hide_secrets(json.dumps(shown, indent=1, ensure_ascii=False, default=str)))
    if problems:
        raise typer.Exit(1)


def _list_problems(error: Exception, locations: KeyLocations | None = None) -> list[dict[str, Any]]:
    """Return the problems that an error tells of: `key`, `file` and `line` (null if not known), and `message`."""
    from coalign.config.errors import ConfigError, ConfigProblem, format_key, parse_key

    if isinstance(error, ConfigError):
        problems = error.problems
    else:
        message = describe_error(error)
        named = _KEY.match(message)
        problems = [ConfigProblem(parse_key(named[0]) if named else (), message)]
    located = [locations.on(problem) if locations is not None else problem for problem in problems]
    return [
        {
            "key": format_key(problem.key) or None,
            "file": problem.location.source if problem.location else None,
            "line": problem.location.line if problem.location else None,
            "message": problem.message,
        }
        for problem in located
    ]
