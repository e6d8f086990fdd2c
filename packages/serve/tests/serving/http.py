"""Servers in a thread of this process, and requests to them."""

import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager


@contextmanager
def running(server):
    """The address of a server, which runs within the context."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def call(url, body=None, **headers):
    """(status, JSON, headers) of a GET, or of a POST of ``body`` (bytes as they are)."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
            return response.status, json.load(response), response.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers
