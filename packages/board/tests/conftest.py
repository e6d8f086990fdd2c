"""A board in a process of its own, and a headless Chromium that looks at it. Without one, its tests are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class StartedBoard:
    """A board that runs: its address, and the process that serves it."""

    url: str
    process: subprocess.Popen[str]

    def read_status(self, name: str) -> int:
        """Return a number of /proc/PID/status, such as VmRSS in KiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:"))

    def read_cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def start_board() -> Iterator[Callable[..., StartedBoard]]:
    """Return a function that starts a board of a directory; all are stopped at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(root: Path, *options: str) -> StartedBoard:
        command = [sys.executable, "-m", "coalign.cli", "board", str(root), "--port", "0", *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert " at http://" in line, line
        return StartedBoard(line.split(" at ")[1].split(";")[0].strip(), process)

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode in (0, -15, 143), process.returncode


@pytest.fixture
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium, which looks at the board (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class WatchedPage:
    """A page of a board, whose errors and requests are noted: `problems`, and `requests`."""

    def __init__(self, browser, board: StartedBoard, **options) -> None:
        self.board = board
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "locale": "en-GB", **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("requestfailed", self._note_failure)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _note_console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _note_failure(self, request) -> None:
        if request.failure != "net::ERR_ABORTED":  # of a page that was left
            self.problems.append(f"{request.url}: {request.failure}")

    def show(self, address: str) -> None:
        """Open an address, such as `#/` on the board, and wait for its page."""
        self.page.goto(address if address.startswith("http") else f"{self.board.url}/{address}")
        shown = json.dumps(self.page.evaluate("location.hash"))
        self.page.locator(f"main[data-shown={shown}]").wait_for()
        self.page.wait_for_load_state("networkidle")

    def check(self) -> None:
        """Nothing went wrong, and nobody but the board was asked."""
        assert not self.problems, "\n".join(self.problems)
        assert all(url.startswith((self.board.url, "data:")) for url in self.requests), self.requests


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., WatchedPage]]:
    """``open_page(board, "#/…", **options)``: a page, which is checked at the end unless ``checked`` is False."""
    opened: list[tuple[WatchedPage, bool]] = []

    def open_one(board: StartedBoard, address: str | None = None, *, checked: bool = True, **options) -> WatchedPage:
        watched = WatchedPage(browser, board, **options)
        opened.append((watched, checked))
        if address is not None:
            watched.show(address)
        return watched

    yield open_one
    for watched, _ in opened:
        watched.context.close()
    for watched, checked in opened:
        if checked:
            watched.check()
