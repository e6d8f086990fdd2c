"""Python that somebody else wrote, parsed in several threads."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from coalign.threads import parse_python


@pytest.mark.slow
def test_threads_that_parse_python_at_once_do_not_disturb_each_other():
    """A tool's answer became an error, once in many runs: collecting garbage within a parse lets other threads run."""
    give_way = lambda *_: time.sleep(0)  # noqa: E731
    interval, threshold, end = sys.getswitchinterval(), gc.get_threshold(), time.monotonic() + 20
    errors: list[BaseException] = []

    def work():
        try:
            while time.monotonic() < end and not errors:
                parse_python("1+17*3", "eval")
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    gc.set_threshold(20, 2, 2)
    gc.callbacks.append(give_way)
    try:
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert not errors


def test_foreign_python_writes_no_warning_to_stderr():
    code = "from coalign.threads import parse_python; parse_python('1if 1else 0'); parse_python('1 is 1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
