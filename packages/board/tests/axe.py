"""axe-core, which finds what keeps people from using a page.

`python -m packages.board.tests.axe` fetches it from npm.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import urllib.request
from pathlib import Path

import pytest

from coalign.files import write_text_atomically

VERSION = "4.10.3"
DIGEST = "Xm7bpRXnDSX2YE2YFfBk2FnF0ep6tmG7xPh8iHee8MIcrgq762Nkce856dYtJYLkuIoYZvGfTs/PbZhideTcEg=="  # npm's, SHA-512
FILE = Path(f"~/.cache/coalign-tests/axe-{VERSION}.min.js").expanduser()


def fetch_axe() -> None:
    """Put the script into the cache, unless it is there. ValueError if it is not the one that npm had."""
    if FILE.exists():
        return
    url = f"https://registry.npmjs.org/axe-core/-/axe-core-{VERSION}.tgz"
    with urllib.request.urlopen(url, timeout=60) as response:
        data = response.read()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != DIGEST:
        raise ValueError(f"{url} is not the file that was expected")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        FILE.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(FILE, script.read().decode())


def find_barriers(page) -> list[str]:
    """Return a line for each serious or critical finding on a page. Skips a test without the script."""
    if not FILE.exists():
        pytest.skip(f"axe-core is not in {FILE.parent}; `python -m packages.board.tests.axe` fetches it")
    page.evaluate(FILE.read_text())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}" for each in serious]


if __name__ == "__main__":
    fetch_axe()
