"""Requests to a running run: save now, stop, or change numbers of processes.

A client writes `control.json` into the run folder: an `id`, and `requests`. Between two steps the run serves them,
writes `control.done.json`, and deletes `control.json` (coalign.engine.hooks.run_control). So there is one request at a
time. It outlives the client, but not the run: a run that starts or ends refuses pending requests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from uuid import uuid4

from coalign.files import describe_problem, read_json_object, write_text_atomically
from coalign.run_files.lock import is_going

NAME, ANSWERS = "control.json", "control.done.json"
VERBS = ("save", "stop", "scale")
POLL_SECONDS = 0.2
_KEPT_ANSWERS = 20


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A request to `save`, `stop`, or `scale`, with the number of processes that each of ``models`` gets.

    Raises ValueError for anything else.
    """

    do: str
    models: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.do not in VERBS:
            nearest = get_close_matches(str(self.do), VERBS, 1)
            hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
            raise ValueError(f"a run cannot be asked to '{self.do}'; it can {', '.join(VERBS)}{hint}")
        if (self.do == "scale") != bool(self.models):
            raise ValueError("`scale` names models, and nothing else does: {'do': 'scale', 'models': {'policy': 4}}")
        for name, processes in self.models.items():
            if type(processes) is not int or processes < 1:
                raise ValueError(f"scale: {name} is {processes!r}; expected a number of processes, 1 or more")

    @classmethod
    def parse(cls, content: Any) -> ControlRequest:
        """Read a request of `control.json`. Raises ValueError for one that is none."""
        if not isinstance(content, dict) or not isinstance(content.get("models", {}), dict):
            raise ValueError(f"{content!r} is no request; expected {{'do': 'save'}}")
        if unknown := sorted(content.keys() - {"do", "models"}):
            raise ValueError(f"a request has no '{unknown[0]}'; it has do and models")
        return cls(content.get("do", ""), content.get("models", {}))


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The result of a request: whether it was ``done``, and a sentence about it."""

    do: str
    done: bool
    text: str

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> ControlResult:
        return cls(str(content.get("do", "")), content.get("done") is True, str(content.get("text", "")))


@dataclass(frozen=True, slots=True)
class _PendingControl:
    """The content of `control.json`: requests that are not parsed yet."""

    id: str
    requests: Sequence[Any]


# ---- clients -----------------------------------------------------------------------------------------------------


def submit(run: Path, *requests: ControlRequest) -> str:
    """Ask the run in this folder; return the request's id for `read_answer`.

    Raises ValueError if no run is going there, or if it has yet to answer an earlier request.
    """
    require_going(run)
    request_id = uuid4().hex
    aside = run / f".writing-{NAME}-{request_id}"
    try:
        encoded = [
            {"do": request.do} | ({"models": dict(request.models)} if request.models else {}) for request in requests
        ]
        aside.write_text(json.dumps({"id": request_id, "requests": encoded}))
        os.link(aside, run / NAME)  # unlike a rename it does not replace another request
    except FileExistsError:
        raise ValueError(f"{run} has another request to answer, after the step under way; ask again then") from None
    finally:
        aside.unlink(missing_ok=True)
    return request_id


def read_answer(run: Path, request_id: str) -> list[ControlResult] | None:
    """Return the results of a request, by its id; None if it is not answered yet."""
    for answer in _read_answers(run):
        if answer.get("id") == request_id and isinstance(results := answer.get("results"), list):
            return [ControlResult.parse(result) for result in results if isinstance(result, dict)]
    return None


def wait_for_answer(run: Path, request_id: str) -> list[ControlResult]:
    """Wait for the results of a request. Raises ValueError if the run ends without an answer."""
    while True:
        going = is_going(run)
        if (results := read_answer(run, request_id)) is not None:
            return results
        if not going:
            raise ValueError(f"the run in {run} has ended, and has not answered")
        time.sleep(POLL_SECONDS)


def require_going(run: Path) -> None:
    """Raise ValueError if no run is going in this folder."""
    if not (run / "config.yaml").exists() or not is_going(run):
        raise ValueError(f"no run is going in {run}; `coalign train` starts it")


# ---- the run -----------------------------------------------------------------------------------------------------


def read_request(run: Path) -> _PendingControl | None:
    """Return the pending requests; None without any. An unreadable file counts as one request, with the problem."""
    path = run / NAME
    if not path.exists():
        return None
    try:
        content = read_json_object(path)
    except ValueError as problem:
        return _PendingControl("", [describe_problem(problem)])
    requests = content.get("requests")
    return _PendingControl(str(content.get("id", "")), requests if isinstance(requests, list) else [requests])


def write_answer(run: Path, request_id: str, results: Sequence[ControlResult]) -> None:
    """Write the answer, and delete the request. Raises OSError."""
    answer = {"id": request_id, "at": round(time.time(), 3), "results": [asdict(result) for result in results]}
    answers = [answer, *_read_answers(run)][:_KEPT_ANSWERS]
    try:
        write_text_atomically(run / ANSWERS, json.dumps({"answers": answers}, ensure_ascii=False))
    finally:  # nothing is done twice because the disk is full
        (run / NAME).unlink(missing_ok=True)


def refuse_request(run: Path, why: str) -> None:
    """Refuse the pending requests, if there are any."""
    if (pending := read_request(run)) is not None:
        verbs = [request.get("do", "") if isinstance(request, dict) else "" for request in pending.requests]
        write_answer(run, pending.id, [ControlResult(str(verb), False, why) for verb in verbs])


def _read_answers(run: Path) -> list[dict[str, Any]]:
    """Return the newest answers of a run, the newest first; none from a file that is damaged."""
    try:
        answers = read_json_object(run / ANSWERS).get("answers")
    except (FileNotFoundError, ValueError):
        return []
    return [answer for answer in answers if isinstance(answer, dict)] if isinstance(answers, list) else []
