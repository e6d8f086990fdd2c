"""A process whose interpreter is held is ended, with a message that says where; one that is only stopped is not."""

import signal
import subprocess
import sys
import time

HOLDS = """
import re, threading, time
from coalign import interpreter_watch

def backtracks():
    re.fullmatch(r"(a+)+b", "a" * 60)

watch = interpreter_watch.InterpreterWatch("function 'backtracks'", lambda: 2.0)
print("begun", flush=True)
time.sleep({seconds})
threading.Thread(target={target}).start()
"""


def start(seconds, target):
    code = HOLDS.format(seconds=seconds, target=target)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    return process


def test_who_holds_the_interpreter_is_named_with_the_stack():
    _, text = (process := start(0.0, "backtracks")).communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "function 'backtracks', or a function that it calls, has held the interpreter" in text
    assert "in fullmatch" in text and "in backtracks" in text


def test_a_process_that_is_stopped_for_a_while_goes_on():
    process = start(4.0, "watch.close")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    process.send_signal(signal.SIGCONT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 0 and not text
