"""A reward service on this machine that answers as it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any, dict[str, str]]  # status, body (bytes as they are, else JSON), headers


def ones(body: dict[str, Any]) -> Answer:
    return 200, {"rewards": [1.0] * len(body["query"])}, {}


def lengths(body: dict[str, Any]) -> Answer:
    return 200, {"rewards": [float(len(query)) for query in body["query"]]}, {}


class Service:
    """``answer(body)`` is called for each request, or each of ``answers`` once before it."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer] = ones, answers: list[Any] | None = None) -> None:
        self.answer, self.answers = answer, list(answers or [])
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self._lock, service = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service._lock:
                    service.bodies.append(body)
                    service.headers.append(self.headers)
                    answer = service.answers.pop(0) if service.answers else service.answer
                status, said, headers = answer(body) if callable(answer) else answer
                said = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(said)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # a client that gave up is no news
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/get_reward"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
