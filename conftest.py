"""Tests run on one thread and without a network."""

import atexit
import gc
import os
import shutil
import tempfile

if "COALIGN_CACHE" not in os.environ:  # all processes of a test session, Ray's workers too, choose the same kernels
    os.environ["COALIGN_CACHE"] = tempfile.mkdtemp(prefix="coalign-tests-")
    atexit.register(shutil.rmtree, os.environ["COALIGN_CACHE"], ignore_errors=True)
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # after all other handlers: to free a million objects takes a worker ten seconds
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # the few tests with two threads leave the other core to the other worker
    "TOKENIZERS_PARALLELISM": "false",
}

import logging
import socket
import sys
from functools import cache

import pytest

logging.disable(logging.DEBUG)  # of which torch.distributed.checkpoint writes one for every tensor
gc.disable()  # until all tests are collected: imports make a million objects that stay
freeze, unfreeze = gc.freeze, gc.unfreeze
gc.freeze = gc.unfreeze = lambda: None  # an engine of vLLM freezes what there is, and thaws everything when it ends


def pytest_collection_finish():
    """Objects that exist now stay to the end: no garbage collection has to look at a million of them again."""
    freeze()
    gc.enable()
    gc.set_threshold(50_000)  # what a test imports stays, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """What the tests of a file have imported stays, too."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        freeze()


def pytest_unconfigure():
    unfreeze()  # else libraries say at the end that objects of theirs were never freed


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """A connection to anything but this machine is an error."""
    connect = socket.socket.connect

    def local_only(self, address):
        host = address[0] if isinstance(address, tuple) else "unix"
        if host not in ("unix", "localhost", "::1") and not host.startswith("127.") and host not in _own_addresses():
            raise OSError(f"a test tried to reach {address}: tests run offline")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(autouse=True)
def _no_run_left():
    """A test that fails leaves no run behind that would slow the others."""
    yield
    if runs := sys.modules.get("tests.runs"):
        runs.end_started_runs()


@cache
def _own_addresses() -> set[str]:
    return {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
