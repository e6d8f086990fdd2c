"""The address that a server listens on, and the key that its requests must bring."""

from __future__ import annotations

import hmac
import os
import socket

from coalign.config.schema import ServerConfig
from coalign.http_server import HttpRefusal, Request, open_listener


def read_key(config: ServerConfig) -> str | None:
    """Return the key in the environment variable ``api_key_env``. ValueError if that is named and not set."""
    key = os.environ.get(config.api_key_env) if config.api_key_env is not None else None
    if config.api_key_env is not None and not key:
        raise ValueError(f"api_key_env: there is no environment variable {config.api_key_env!r}")
    return key


def open_guarded_listener(config: ServerConfig, port: int, key: str | None) -> tuple[socket.socket, str]:
    """Return a bound socket and its address, as `open_listener` does.

    Raises ValueError for an address that other machines reach without a key, and OSError if the port is taken.
    """
    refusal = (
        f"host: other machines reach {config.host}, and whoever does could use the server; name the environment "
        "variable with a key: `api_key_env`"
    )
    return open_listener(config.host, port, refusal if key is None else None)


class ApiKey:
    """The key that requests must bring, if there is one."""

    def __init__(self, key: str | None) -> None:
        self._expected = None if key is None else f"Bearer {key}".encode()

    def check(self, request: Request) -> None:
        """Raise HttpRefusal (401) for a request without the key."""
        sent = request.headers.get("Authorization", "").encode()
        if self._expected is not None and not hmac.compare_digest(sent, self._expected):
            raise HttpRefusal(401, "a key is needed: Authorization: Bearer …", {"WWW-Authenticate": "Bearer"})
