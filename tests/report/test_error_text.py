"""A failure of people's own code is shown on the screen by its place; the log file has the traceback."""

import io
import logging
import runpy

from rich.console import Console

from coalign.report.display import Display
from coalign.report.error_text import describe_place


def test_the_screen_shows_the_place_in_peoples_own_code_and_no_traceback(tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\njson.loads('[1')\n")
    log = logging.getLogger("coalign.test_own_code")
    display = Display(err=Console(file=io.StringIO(), width=200))
    handler = display.handler()
    log.addHandler(handler)
    try:
        runpy.run_path(str(tmp_path / "mine.py"))
    except ValueError:
        log.warning("it failed", exc_info=True)
    finally:
        log.removeHandler(handler)
    lines = display.err.file.getvalue().splitlines()
    assert lines[0] == "warning: it failed" and "Traceback" not in "".join(lines)
    assert lines[1].startswith("JSONDecodeError: ")
    assert lines[2:] == [f"  at {tmp_path}/mine.py:3, in <module>", "      json.loads('[1')"]


def test_without_own_code_the_last_frame_is_shown():
    assert describe_place('  File "/a/site-packages/x.py", line 4, in f\n    g()\n') == [
        "  at /a/site-packages/x.py:4, in f",
        "      g()",
    ]
    assert describe_place("no frames") == []
