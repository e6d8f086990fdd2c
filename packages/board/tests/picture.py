"""Takes the picture of docs/board.md, of a run below a directory.

`python -m packages.board.tests.picture RUNS RUN FILE.png`
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import sync_playwright

from packages.board.tests.conftest import CHROMIUM


def take_picture(root: str, run: str, file: Path) -> None:
    """Write a picture of the run's curves, as a screen of 1280 by 800 points shows them."""
    command = [sys.executable, "-m", "coalign.cli", "board", root, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as board, sync_playwright() as driver:
        assert board.stderr is not None
        url = board.stderr.readline().split(" at ")[1].strip()
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, locale="en-GB", color_scheme="light")
        page.goto(f"{url}/#/run/{quote(run, safe='')}/overview?smoothing=0.9")
        page.locator("canvas").first.wait_for()
        page.wait_for_load_state("networkidle")
        page.screenshot(path=file)
        browser.close()
        board.terminate()


if __name__ == "__main__":
    take_picture(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
