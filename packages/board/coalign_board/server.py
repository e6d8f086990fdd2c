"""The server of the board: the page's files, and JSON of run folders. The table `make_readers` is what to open first.

It holds nothing that a run needs, and reads files only while somebody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import math
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from coalign.http_server import (
    Request,
    Response,
    Starlette,
    build_application,
    build_server,
    open_listener,
    read_body,
)
from coalign.http_types import HttpRefusal
from coalign.run_files.control import ControlRequest, read_answer, submit
from coalign_board.access import RequestGuard, list_own_names, read_token
from coalign_board.catalog import RunCatalog
from coalign_board.readers import Reader, read_list
from coalign_board.readers.cause import CauseReader
from coalign_board.readers.checkpoints import read_checkpoints, read_verification
from coalign_board.readers.configuration import compare_configurations, read_configuration
from coalign_board.readers.flow import read_flow
from coalign_board.readers.log import read_log, read_stalls
from coalign_board.readers.metrics import CurveReader
from coalign_board.readers.placement import read_placement
from coalign_board.readers.sample_lists import SampleReader, read_image, read_newest_samples
from coalign_board.readers.timeline import read_timeline, read_trace
from coalign_board.status import RunSummaries

STATIC = Path(__file__).parent / "static"
_MAX_REQUEST_BYTES = 1 << 16
_MAX_COMPARED_RUNS = 12  # there are no more colours that can be told apart
_THREADS = 2
# A path is no regular file, or leads to none, has too long a name, is a loop of links, or a socket.
_PATH_FAULTS = (errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO)
_CONNECTIONS = 200
_TIMEOUT = 60.0  # seconds that a client may take to send a request, or to take its answer
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def make_readers() -> dict[str, Reader]:
    """Return what answers `/api/runs/RUN/NAME`, by name: functions of the run's folder and the request's parameters."""
    samples = SampleReader()
    return {
        "cause": CauseReader().read,
        "checkpoints": read_checkpoints,
        "configuration": read_configuration,
        "flow": read_flow,
        "image": samples.read_image,
        "log": read_log,
        "metrics": CurveReader().read,
        "placement": read_placement,
        "sample": samples.read_sample,
        "sample_groups": samples.read_groups,
        "sample_page": samples.read_page,
        "sample_steps": samples.read_steps,
        "samples": read_newest_samples,
        "stalls": read_stalls,
        "timeline": read_timeline,
        "trace": read_trace,
        "verification": read_verification,
    }


def serve_board(root: Path, host: str, port: int, token_file: Path | None) -> None:
    """Serve the board of the runs below ``root`` until SIGINT or SIGTERM.

    Raises ValueError for an address that other machines reach without a token, FileNotFoundError without the directory,
    and OSError if the port is taken.
    """
    token = read_token(token_file) if token_file is not None else None
    application = build_board(root, token, list_own_names(host))
    refusal = f"--host: other machines reach {host}, and whoever does could read the runs; give --token-file"
    listener, address = open_listener(host, port, refusal if token is None else None)
    listener.listen()
    note = "" if token is None else f"; open it once with ?token=… (the text in {token_file})"
    sys.stderr.write(f"board of {root} at {address}{note}\n")
    build_server(application, timeout=_TIMEOUT, connections=_CONNECTIONS, grace=1.0).run(sockets=[listener])


def build_board(root: Path, token: str | None = None, names: tuple[str, ...] = ()) -> Starlette:
    """Return the application. With a ``token``, requests must bring it, and may ask runs to save, stop or scale."""
    board = BoardEndpoints(RunCatalog(root), can_control=token is not None)
    handlers = {
        ("GET", "/"): board.get_page,
        ("GET", "/static/{name:path}"): board.get_static,
        ("GET", "/api/runs"): board.list_runs,
        ("GET", "/api/compare"): board.compare,
        ("GET", "/api/runs/{run:path}/{reader}"): board.read_run,
        ("POST", "/api/runs/{run:path}/control"): board.ask_run,
    }
    application = build_application(
        handlers, lambda path, status, message: {"error": message}, compress=True, lifespan=_limit_threads
    )
    application.add_middleware(RequestGuard, names=names, token=token)
    return application


@contextlib.asynccontextmanager
async def _limit_threads(_: object) -> AsyncIterator[None]:
    """Read in few threads: each keeps memory of its own."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "board"))
    yield


class BoardEndpoints:
    """Answers the requests of the page. Whatever reads files does so in a thread."""

    def __init__(self, catalog: RunCatalog, can_control: bool) -> None:
        self.catalog = catalog
        self.can_control = can_control
        self._summaries = RunSummaries()
        self._readers = make_readers() | {"state": self._read_state, "answer": _read_answer}
        self._static = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}

    async def get_page(self, request: Request) -> Response:
        return self._send_static(request, "index.html")

    async def get_static(self, request: Request) -> Response:
        return self._send_static(request, request.path_params["name"])

    async def list_runs(self, request: Request) -> Response:
        """Return the summaries of all runs, and whether they can be asked for something."""
        return await _run(lambda: _send_json(self._list_runs()))

    async def compare(self, request: Request) -> Response:
        """Return what is different between the runs in `runs`, a list in JSON."""

        def read() -> Response:
            names = read_list(request.query_params, "runs", _MAX_COMPARED_RUNS)
            return _send_json(compare_configurations([self.catalog.find(run) for run in names]))

        return await _run(read)

    async def read_run(self, request: Request) -> Response:
        """Return what a reader says of a run. A path that it returns is sent as a file."""
        run, name = request.path_params["run"], request.path_params["reader"]
        if name not in self._readers:
            raise HttpRefusal(404, f"nothing is called '{name[:80]}'; there are {', '.join(sorted(self._readers))}")

        def read() -> Response:
            content = self._readers[name](self.catalog.find(run), request.query_params)
            return _send_image(content) if isinstance(content, Path) else _send_json(content)

        return await _run(read)

    async def ask_run(self, request: Request) -> dict[str, Any]:
        """Ask a run for what the body says ({"do": "save"}), and return the request's `id`."""
        if not self.can_control:
            raise HttpRefusal(403, "the board only shows runs; start it with --token-file to ask them for something")
        body = await read_body(request, _MAX_REQUEST_BYTES)

        def ask() -> dict[str, Any]:
            folder = self.catalog.find(request.path_params["run"])
            return {"id": submit(folder, ControlRequest.parse(_parse_body(body)))}

        return await _run(ask)

    def _list_runs(self) -> dict[str, Any]:
        runs = []
        for run in self.catalog.list_ids():
            try:
                runs.append({"id": run, **self._summaries.summarise(self.catalog.find(run))})
            except (OSError, ValueError):  # deleted since the folders were searched
                continue
        return {"root": self.catalog.root.name, "can_control": self.can_control, "runs": runs}

    def _read_state(self, folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
        return self._summaries.summarise(folder) | {"can_control": self.can_control}

    def _send_static(self, request: Request, name: str) -> Response:
        if name not in self._static:
            raise HttpRefusal(404, f"there is no file {name[:80]}")
        path = self._static[name]
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, 200, headers, _TYPES.get(path.suffix, "text/plain"))


def _read_answer(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return what became of the request `id`: `results`, None until the run has answered."""
    results = read_answer(folder, params.get("id", ""))
    return {"results": None if results is None else [{"done": result.done, "text": result.text} for result in results]}


def _send_image(path: Path) -> Response:
    content, media_type = read_image(path)
    return Response(content, 200, {"Cache-Control": "private, max-age=3600"}, media_type)


def _send_json(content: Any) -> Response:
    """Return an answer in JSON, which has no NaN and no infinity: sums of a file's numbers may be such."""
    try:
        text = json.dumps(content, allow_nan=False)
    except ValueError:
        text = json.dumps(_replace_non_finite(content))
    except RecursionError:
        raise ValueError("what the file holds is nested too deeply to be sent") from None
    return Response(text.encode(), 200, None, "application/json")


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse_body(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError('the body is no JSON; expected {"do": "save"}') from None


async def _run(read: Callable[[], Any]) -> Any:
    """Run a reader in a thread, and turn what it raises into an answer."""
    try:
        return await asyncio.to_thread(read)
    except FileNotFoundError as problem:
        raise HttpRefusal(404, _describe(problem)) from problem
    except PermissionError as problem:
        raise HttpRefusal(403, _describe(problem)) from problem
    except ValueError as problem:
        raise HttpRefusal(400, _describe(problem)) from problem
    except OSError as problem:
        status = 400 if problem.errno in _PATH_FAULTS else 500  # a disk that is away
        raise HttpRefusal(status, _describe(problem)) from problem


def _describe(problem: Exception) -> str:
    """Return the message; the operating system's errors lose the folders of this machine."""
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{Path(problem.filename).name}: {problem.strerror}"
    return str(problem)
