"""Attacks that older kernels let through Landlock: signals before Linux 6.12, emptied files before 6.2, and the like.

Each attack hits something of the test's own, since without a filter it would succeed.
"""

import asyncio
import ctypes
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from coalign_graders.sandbox.sandbox import Sandbox, SandboxError, SandboxLimits, find_shortfalls
from packages.graders.tests.sandbox.machines import OLD_MACHINES, processes_of, run, run_all, wait_until_gone

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
TRY = """
import ctypes, fcntl, os, signal, socket, struct
def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def attempt(attack):
    try:
        attack()
        print("done")
    except OSError as error:
        print(type(error).__name__)
"""
SMALL = SandboxLimits(seconds=120.0, file_mb=2)


def attempts(*attacks, readable=(), limits=SMALL):
    """What became of each expression: `done`, or the name of its OSError."""
    program = TRY + "".join(f"attempt(lambda: {attack})\n" for attack in attacks)
    report = run(program, readable=readable, limits=limits)
    assert report.ended == "exit 0"
    return dict(zip(attacks, report.output.split(), strict=True))


def assert_refused(*attacks, readable=(), by="PermissionError"):
    assert attempts(*attacks, readable=readable) == dict.fromkeys(attacks, by)


@pytest.fixture
def victim():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_file_cannot_be_made_to_signal_others(old_machine, victim):
    attacks = (
        *(f"fcntl.fcntl({end}, fcntl.F_SETOWN, {victim.pid})" for end in ("read", "one")),
        *(f"fcntl.fcntl({end}, 15, struct.pack('ii', 1, {victim.pid}))" for end in ("read", "one")),  # F_SETOWN_EX
        f"fcntl.ioctl(one, 0x8901, struct.pack('i', {victim.pid}))",  # FIOSETOWN
        f"fcntl.ioctl(one, 0x8902, struct.pack('i', {victim.pid}))",  # SIOCSPGRP
        *(f"fcntl.fcntl({end}, fcntl.F_SETSIG, signal.SIGKILL)" for end in ("read", "one")),
        "fcntl.ioctl(read, 0x5452, struct.pack('i', 1))",  # FIOASYNC
        "fcntl.fcntl(os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, 1)",
    )
    program = TRY + "read, write = os.pipe()\none, other = socket.socketpair()\n"
    program += "".join(f"attempt(lambda: {attack})\n" for attack in attacks)
    program += "for end in (read, one): fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\n"
    report = run(program + "os.write(write, b'x'), other.send(b'x')\n")
    assert (report.ended, report.output.split()) == ("exit 0", ["PermissionError"] * len(attacks))
    assert victim.poll() is None


def test_process_1_cannot_be_interrupted(old_machine):
    everyone = "(0, 1, -1) if os.getppid() == 1 else (os.getppid(),)"
    attack = f"import os, signal\nfor p in {everyone}:\n    try: os.kill(p, signal.SIGINT)\n    except OSError: pass"
    assert run_all(attack, "print('well')")[-1].output == "well\n"
    if "processes" not in find_shortfalls(3):  # jobs that start processes may send them signals
        group = SandboxLimits(seconds=120.0, processes=3)
        kill_all = attack.replace("SIGINT", "SIGKILL")
        assert run_all(attack, kill_all, "print('well')", limits=group)[-1].output == "well\n"


def test_code_can_still_be_interrupted():
    interrupted = "try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: print('as ever')"
    assert run(f"import signal\n{interrupted}").output == "as ever\n"


def test_files_cannot_be_emptied(old_machine, tmp_path):
    (tmp_path / "packages").mkdir()
    library, secret = tmp_path / "packages" / "library.py", tmp_path / "secret"
    for file in (library, secret):
        file.write_text("good")
    ways = ("O_RDONLY", "O_RDONLY | os.O_CREAT", "O_ACCMODE")
    attacks = (
        *(f"os.open({str(library)!r}, os.{way} | os.O_TRUNC)" for way in ways),
        *(f"os.open({str(secret)!r}, os.{way} | os.O_TRUNC)" for way in ("O_ACCMODE", "O_RDONLY", "O_WRONLY")),
        f"os.open({str(secret)!r}, os.O_ACCMODE)",
        f"os.truncate({str(library)!r}, 0)",
    )
    assert_refused(*attacks, readable=[tmp_path / "packages"])
    how = "struct.pack('QQQ', os.O_RDONLY | os.O_TRUNC, 0, 0)"
    assert_refused(f"call(437, -100, {bytes(library)!r}, {how}, 24)", readable=[tmp_path / "packages"], by="OSError")
    assert [file.read_text() for file in (library, secret)] == ["good"] * 2


def test_what_others_read_cannot_be_locked(old_machine, tmp_path):
    (tmp_path / "packages").mkdir()
    library = tmp_path / "packages" / "library.py"
    library.write_text("good")
    file = f"os.open({str(library)!r}, os.O_RDONLY)"
    lock = "struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0)"
    attacks = (
        f"fcntl.flock({file}, fcntl.LOCK_EX)",
        *(f"fcntl.fcntl({file}, {command}, {lock})" for command in (6, 7, 37, 38)),  # F_SETLK …, of open files too
        f"fcntl.fcntl({file}, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
        f"fcntl.ioctl({file}, 0x40086602, struct.pack('i', 0x80))",  # FS_IOC_SETFLAGS
    )
    assert_refused(*attacks, readable=[tmp_path / "packages"])
    with open(library) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("old_machine", ["old", "old, no mounts"], indirect=True)
@pytest.mark.parametrize("hide", ["os.remove(str(i))", "os.rename(str(i), 'same')", "map_only(i)"])
def test_no_more_is_written_than_the_files_may_have(hide, old_machine):
    """Whatever hides a file: removal, another in its place, a mapping as all that is left of it."""
    program = f"""
import mmap, os, time
kept, written = [], 0
def map_only(i):
    kept.append(mmap.mmap(kept.pop().fileno(), 1, prot=mmap.PROT_READ))
    os.remove(str(i))
try:
    for i in range(64):
        kept.append(open(str(i), 'w+b', buffering=0))
        for _ in range(8):
            written += kept[-1].write(bytes(2**18))
        {hide}
        time.sleep(0.05)
except OSError:
    pass
print(written)
"""
    report = run(program, limits=SMALL)
    assert report.ended == "files" or int(report.output) <= 2 * 2**20


def test_nor_by_files_without_a_name_or_by_its_input(old_machine):
    unnamed = "sum(os.write(os.open('.', os.O_TMPFILE | os.O_RDWR), bytes(2**20)) and print(i) or 1 for i in range(8))"
    report = run(f"import os\ntry: {unnamed}\nexcept OSError: pass", limits=SMALL)
    assert len(report.output.split()) <= 2
    assert_refused("os.write(0, b'x')", "os.ftruncate(0, 2**20)")


def test_pairs_of_sockets_are_unix_streams(old_machine):
    families = [family for family in range(46) if family != 1]
    assert_refused(
        *(f"socket.socketpair({family}, socket.SOCK_STREAM)" for family in families),
        *(f"socket.socketpair(socket.AF_UNIX, {kind})" for kind in range(2, 8)),
    )
    expected = {"socket.socketpair()": "done", "socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | 0o4000)": "done"}
    assert attempts("socket.socketpair()", "socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | 0o4000)") == expected


def test_shared_memory_of_others_stays(old_machine):
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.shmget(0, 4096, 0o600)
    try:
        column = ("x86_64", "aarch64").index(os.uname().machine)
        calls = (calls[column] for calls in ((31, 195), (71, 187), (66, 191)))  # shmctl, msgctl, semctl
        assert_refused(*(f"call({call}, {number}, 0, None)" for call in calls))
        assert libc.shmctl(number, 2, ctypes.create_string_buffer(256)) == 0  # IPC_STAT: it is there
    finally:
        libc.shmctl(number, 0, None)


def test_a_job_dies_with_its_supervisor(old_machine):
    escape = "import os, ctypes\nprint(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0), flush=True)\n"
    escape += "try: os.execv('/bin/sleep', ['sleep', '60'])\nexcept PermissionError: print('stays', flush=True)\n"
    assert run(escape).output == "-1\nstays\n"

    processes = 2 + ("processes" not in find_shortfalls(3))  # the supervisor, process 1 if there is one, the job

    async def killed():
        async with Sandbox(SandboxLimits(seconds=600)) as box:
            running = asyncio.ensure_future(box.run(f"{escape}\nwhile True: os.sched_yield()"))
            while len(jobs := processes_of(box._process.pid)) < processes:
                await asyncio.sleep(0.01)
            os.kill(box._process.pid, signal.SIGKILL)
            with pytest.raises(SandboxError):
                await running
            return jobs

    wait_until_gone(asyncio.run(killed()))


@pytest.mark.parametrize(
    "old_machine",
    [pytest.param(n, marks=() if n in ("old", "old, no rights at all") else pytest.mark.slow) for n in OLD_MACHINES],
    indirect=True,
)
def test_the_self_test_finds_nothing(old_machine):
    assert find_shortfalls() == {}


def test_locks_and_controls_that_programs_need():
    program = "import sys, os\nprint(sys.stdin.isatty(), os.get_blocking(0), os.dup(1) > 1, os.get_inheritable(1))"
    assert run(program).output == "False True True True\n"
