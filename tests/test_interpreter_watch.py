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


def test_who_holds_the_interpreter_is_named_with_the_stack_and_who_is_stopped_for_a_while_goes_on():
    stopped, holding = start(4.0, "watch.close"), start(0.0, "backtracks")
    stopped.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    _, text = holding.communicate(timeout=60)
    assert holding.returncode == -signal.SIGKILL
    assert "function 'backtracks', or a function that it calls, has held the interpreter" in text
    assert "in fullmatch" in text and "in backtracks" in text
    time.sleep(max(0.0, begun + 3.0 - time.monotonic()))
    stopped.send_signal(signal.SIGCONT)
    _, text = stopped.communicate(timeout=60)
    assert stopped.returncode == 0 and not text
