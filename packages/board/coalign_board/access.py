"""Decides which requests the board answers: those for its own address, with the token if there is one."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SHORTEST_TOKEN = 16  # characters
# All of a Host header, in small letters: an address of version 6 in brackets, one of version 4, or a name; and a port.
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9a-f.]*:[0-9a-f:.]*)\]|(?P<v4>[0-9]+(?:\.[0-9]+){3})|(?P<name>[a-z0-9_.-]+))(?::(?P<port>[0-9]{1,5}))?"
)
_LARGEST_PORT = 65535
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def read_token(file: Path) -> str:
    """Read the token that requests must bring. ValueError for one that is short or has spaces within."""
    if not file.is_file():
        raise FileNotFoundError(f"--token-file: there is no file {file}; `openssl rand -hex 16 > {file}` makes one")
    token = file.read_text(encoding="utf-8", errors="replace").strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"--token-file: {file} holds no token of {SHORTEST_TOKEN} or more ASCII characters without spaces; "
            f"`openssl rand -hex 16 > {file}` makes one"
        )
    return token


class RequestGuard:
    """Refuses requests for other host names, those without the token, and posts of other sites' pages.

    A page of another site can have its own name resolve to this address (DNS rebinding), so the Host header must name
    this machine: an address, `localhost`, or one of ``names``. With a ``token``, the first request brings it as
    `?token=`, and gets a cookie instead; scripts may send `Authorization: Bearer TOKEN`. Every answer has ``HEADERS``.
    """

    def __init__(self, application: Application, names: tuple[str, ...] = (), token: str | None = None) -> None:
        self.application = application
        self._names = {name.lower() for name in ("localhost", *names)}
        self._token = None if token is None else token.encode()
        # Cookies are shared between the ports of a host, so each token has a name of its own, which does not tell it.
        digest = hashlib.sha256(b"coalign board " + (self._token or b"")).hexdigest()
        self._cookie, self._proof = f"coalign_board_{digest[:8]}", digest[8:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.application(scope, receive, send)

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                security_headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *security_headers]
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_own_host(headers.get("host", "")):
            text = "the Host header names another machine: open the board by its address or its name"
            return await _answer(send_with_headers, 421, text)
        if scope["method"] not in ("GET", "HEAD") and not self._is_own_page(headers):
            return await _answer(send_with_headers, 403, "the request comes from a page of another site")
        if self._token is None or self._is_known(headers):
            return await self.application(scope, receive, send_with_headers)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if scope["method"] == "GET" and any(self._is_token(value) for name, value in query if name == "token"):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
            # `//other.example` would be another host
            target = "/" + path.lstrip("/") + (f"?{rest}" if rest else "")
            cookie = f"{self._cookie}={self._proof}; Path=/; HttpOnly; SameSite=Strict"
            return await _answer(send_with_headers, 303, "", {"Location": target, "Set-Cookie": cookie})
        await _answer(send_with_headers, 401, "a token is needed: open the board once with ?token=… behind its address")

    def _is_own_host(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None or int(match["port"] or 0) > _LARGEST_PORT:
            return False
        return match["name"] in self._names if match["name"] else _is_address(match["v4"] or match["v6"])

    @staticmethod
    def _is_own_page(headers: dict[str, str]) -> bool:
        """A script sends no Origin, a browser does for every request that may change something."""
        origin = headers.get("origin")
        return origin is None or origin.lower().partition("://")[2] == headers.get("host", "").lower()

    def _is_token(self, text: str) -> bool:
        return self._token is not None and hmac.compare_digest(text.encode(), self._token)

    def _is_known(self, headers: dict[str, str]) -> bool:
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(sent):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self._proof.encode())


def list_own_names(host: str) -> tuple[str, ...]:
    """Return the names under which this machine's board may be asked for: the one it is bound to, and its own."""
    is_loopback = host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
    return (host,) if is_loopback else (host, socket.gethostname(), socket.getfqdn())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _answer(send: Send, status: int, text: str, headers: dict[str, str] | None = None) -> None:
    fields = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store", **(headers or {})}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields.items()]
    body = text.encode()
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*encoded, length]})
    await send({"type": "http.response.body", "body": body})
