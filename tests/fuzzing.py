"""Random input for whatever reads files, bodies and requests of strangers.

A reader gets 100 cases (500 and more in the whole fast suite), and 10,000 in the slow suite.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = pytest.mark.parametrize(
    "cases", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**310) | st.floats() | st.text(max_size=20),
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
