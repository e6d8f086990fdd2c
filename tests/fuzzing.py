"""Random input for whatever reads files, bodies and requests of strangers.

A reader or a server gets 25 cases (100 and more in the whole fast suite), and 10,000 in the slow suite.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = pytest.mark.parametrize(
    "cases", [25, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
SIZES = st.integers(1, 30_000)
GROWTH = 32 * 2**20  # bytes of memory that a server may keep of all requests, those of its start left out
LIMIT = timedelta(seconds=5)  # of a case, on a machine that does other things as well


def try_cases(strategy: st.SearchStrategy[Any], check: Callable[[Any], object], cases: int) -> None:
    """Call ``check`` with ``cases`` values of the strategy; what it raises, or takes longer than LIMIT, is reported."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings(max_examples=cases, deadline=LIMIT, derandomize=True, database=None, suppress_health_check=quiet)(
        given(strategy)(lambda value: check(value) and None)
    )()


def damage(good: bytes, fragments: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """The bytes ``good`` after up to eight changes: cut, overwritten, repeated, or with fragments put in."""
    return st.integers(0, 2**32).map(lambda seed: _change(good, Random(seed), fragments))


def _change(good: bytes, random: Random, fragments: Sequence[bytes]) -> bytes:
    data = bytearray(good)
    for _ in range(random.randint(1, 8)):
        at, few = random.randint(0, len(data)), random.randint(1, 16)
        match random.choice(("cut", "write", "insert", "remove", "repeat")):
            case "cut":
                del data[at:]
            case "write":
                data[at : at + few] = random.randbytes(few)
            case "insert":
                data[at:at] = random.choice(fragments) if fragments else random.randbytes(few)
            case "remove":
                del data[at : at + few]
            case "repeat":
                data[at:at] = data[max(0, at - 4 * few) : at]
    return bytes(data)


ODD = st.sampled_from(["\ud800", "\x00", "9" * 5000, "[" * 5000, "<|im_end|>", "{{ x }}", "${a}", "../x", "\u2028"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**310)
    | st.floats()
    | st.text(max_size=20)
    | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def send_raw(port: int, data: bytes, patience: float = 0.02) -> bytes:
    """Send bytes to a server of this machine and return what it answers until it hangs up.

    After ``patience`` seconds without an answer the sending half is closed, which ends the wait for half a request.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as client:
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
            with contextlib.suppress(TimeoutError):
                while piece := client.recv(65536):
                    answer += piece
            client.settimeout(10.0)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65536):
                answer += piece
        return bytes(answer)


def make_requests(head: bytes, bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Requests with ``head`` (line and headers) and a body whose length is told rightly, wrongly, or by chunks."""
    nested = st.builds(
        lambda piece, count: piece * count, st.sampled_from([b"[", b'{"a":', b"9", b"[]", b"\xff"]), SIZES
    )
    return st.builds(_frame, st.just(head), bodies | nested, st.integers(0, 2**32))


def _frame(head: bytes, body: bytes, seed: int) -> bytes:
    random = Random(seed)
    lengths = [len(body)] * 4 + [len(body) + 1, max(0, len(body) - 1), -1, 0, 10**30, "x", "+5", f"{len(body)}, 7"]
    told = b"Content-Length: %s\r\n" % str(random.choice(lengths)).encode()
    chunks, at = bytearray(), 0
    while at < len(body):
        piece = body[at : at + random.randint(1, 1 + len(body))]
        size = len(piece) if random.random() < 0.9 else random.choice([0, 1, 2**31, 2**80])
        chunks += b"%x\r\n" % size + piece + b"\r\n"
        at += len(piece)
    chunked = b"Transfer-Encoding: chunked\r\n"
    data = random.choice(
        [
            *[head + told + b"\r\n" + body] * 4,
            *[head + chunked + b"\r\n" + chunks + b"0\r\n\r\n"] * 2,
            head + chunked + b"\r\n" + chunks,
            head + chunked + told + b"\r\n" + body,
            head + told + told + b"\r\n" + body,
            head + b"\r\n" + body,
        ]
    )
    return bytes(data if random.random() < 0.8 else data[: random.randint(0, len(data))])


def try_requests(port: int, requests: st.SearchStrategy[bytes], cases: int) -> None:
    """Send requests to the server in this process: no answer may be of an error of its own, nor may its memory grow.

    Another process draws and sends them, as drawing takes memory, too.
    """

    def check(data: bytes) -> None:
        answer = send_raw(port, data)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
        assert b"HTTP/1.1 500" not in answer, answer[:2000]

    def send(count: int) -> None:
        client = multiprocessing.get_context("fork").Process(target=try_cases, args=(requests, check, count))
        client.start()
        client.join()
        assert client.exitcode == 0, "the process that sends requests failed: see what it wrote"

    send(max(10, cases // 10))
    before = psutil.Process().memory_info().rss
    send(cases)
    assert psutil.Process().memory_info().rss - before < GROWTH
