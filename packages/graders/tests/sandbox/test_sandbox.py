"""The sandbox against code that attacks it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from coalign_graders.sandbox import sandbox
from coalign_graders.sandbox.sandbox import (
    LimitNotEnforceable,
    Sandbox,
    SandboxError,
    SandboxLimits,
    find_shortfalls,
    require_limits,
)
from packages.graders.tests.sandbox.machines import (
    children_of,
    make_machine,
    processes_of,
    run,
    run_all,
    wait_until_gone,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
SECRET = "coalign-test-secret"


def outcomes(*attacks):
    """What became of statements that should be refused: `done`, or the error's name."""
    reports = run_all(*map(_caught, attacks))
    return {attack: report.output.strip() or report.ended for attack, report in zip(attacks, reports, strict=True)}


def _caught(attack):
    lines = "\n".join(f"    {line}" for line in attack.strip().splitlines())
    after = "    print('done')\nexcept BaseException as error:\n    print(type(error).__name__)"
    return f"import os, sys\ntry:\n{lines}\n{after}"


def assert_refused(*attacks, by=("PermissionError",)):
    assert {attack: what for attack, what in outcomes(*attacks).items() if what not in by} == {}


def test_a_program_an_expression_and_statements(machine):
    function = "def f(x): return {x: (1, 2.5)}"
    reports = run_all(
        {"code": "print(input()[::-1])", "stdin": "abc\n"},
        {"code": function, "test": "__answer__(f('a')); __answer__(1)"},
        {"code": function, "test": "assert f(1)[1] == (1, 2.5)", "token": "n0nce"},
        {"code": function, "test": "assert f(1) == 2", "token": "n0nce"},
        "import sys; sys.exit(7)",
        "import os; os.abort()",
        "this is no Python",
        "import numpy; print(numpy.ones(3).sum())",
    )
    assert [(r.ended, r.output, r.answer) for r in reports] == [
        ("exit 0", "cba\n", ""),
        ("exit 0", "", "[{'a': (1, 2.5)}, 1]"),
        ("exit 0", "", "n0nce[]"),
        ("exit 1", "", ""),
        ("exit 7", "", ""),
        ("signal 6", "", ""),
        ("exit 1", "", ""),
        ("exit 0", "3.0\n", ""),
    ]


def test_what_is_needed_to_work_is_there(machine):
    threads = "import threading\nt = [threading.Thread(target=lambda: None) for _ in range(8)]\n[x.start() for x in t]"
    seen = outcomes(
        "import asyncio\nasyncio.run(asyncio.sleep(0))",
        "open('a', 'w').write('x')\nassert os.listdir() == ['a']",
        "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x' * 1000)",
        "open('a', 'w').write('x')\nos.rename('a', 'b')\nos.remove('b')",
        threads,
    )
    # Where the folder has no fixed size nothing can be removed, and tempfile removes a file to begin with.
    removed = ["done"] * 2 if machine == "everything" else ["FileNotFoundError", "PermissionError"]
    threads = "RuntimeError" if machine == "no rights at all" else "done"
    assert list(seen.values()) == ["done", "done", *removed, threads]


def test_endless_loop_and_endless_sleep(machine):
    begun = time.monotonic()
    endless = ("while True: pass", "import time; time.sleep(1e6)", "import signal; signal.pause()")
    assert [report.ended for report in run_all(*endless, limits=SandboxLimits(seconds=0.2))] == ["seconds"] * 3
    assert time.monotonic() - begun < 60


def test_ten_gigabytes_of_output(machine):
    to_all = "import os\nwhile True: os.write({}, b'x' * 10**6)"
    reports = run_all("for _ in range(10**4): print('x' * 10**6)", to_all.format(1), to_all.format(3))
    assert [report.ended for report in reports] == ["output"] * 3
    assert all(len(report.output) <= (256 << 10) + (1 << 16) for report in reports)


def test_memory_bomb(machine):
    bombs = ("x = bytearray(10**9)", "x = []\nwhile True: x.append(bytearray(10**6))", "x = 'x' * 10**9")
    small = SandboxLimits(seconds=120.0, memory_mb=100)
    assert [report.ended for report in run_all(*bombs, limits=small)] == ["exit 1"] * 3
    assert_refused("import mmap\nmmap.mmap(-1, 10**9)", "os.memfd_create('x')", by=("OSError", "PermissionError"))


BOMB = """
import os, threading, time
started = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(100)
        started += 1
except OSError:
    print(started)
"""


def test_fork_bomb(machine):
    assert run(BOMB).output == "0\n"
    some = SandboxLimits(seconds=120.0, processes=6)
    assert run(BOMB, limits=some).output == ("5\n" if machine == "everything" else "0\n")
    relentless = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(relentless, limits=SandboxLimits(seconds=0.5, processes=6)).ended == "seconds"


def test_threads_have_a_limit(machine):
    many = BOMB.replace("os.fork() == 0", "threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()")
    started = int(run(many.replace("OSError", "RuntimeError")).output)
    assert started == {"everything": 31, "no namespaces": 32, "no rights at all": 0}[machine]


def test_nothing_of_ours_can_be_read(machine, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    system = ("/etc/passwd", "/root/.bashrc", "/proc/self/environ", "/proc/1/cmdline", "/dev/mem", "/dev/shm/x")
    reads = [f"open({str(path)!r})" for path in (tmp_path / "secret", __file__, sandbox.__file__, *system)]
    writes = [read.replace(")", ", 'a')") for read in reads]
    places = ("/", "/root", "/home", "/tmp", "/proc", str(tmp_path), str(Path(__file__).parents[2]))
    lists = [f"os.listdir({place!r})" for place in places]
    assert_refused(*reads, *writes, *lists, by=("PermissionError", "FileNotFoundError"))


def test_nor_our_environment_and_memory(machine, monkeypatch):
    monkeypatch.setenv("API_KEY", SECRET)
    assert SECRET not in run("import os; print(dict(os.environ))").output
    ours, peek = os.getpid(), "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nif libc.{} < 0: raise OSError"
    files = [
        f"open(f'/proc/{{{pid}}}/{name}', 'rb').read()"
        for pid in (ours, "os.getppid()", 1)
        for name in ("environ", "mem", "maps", "fd/0")
    ]
    calls = (f"ptrace(16, {ours}, 0, 0)", "ptrace(16, os.getppid(), 0, 0)", f"process_vm_readv({ours}, 0, 0, 0, 0, 0)")
    refusals = ("PermissionError", "FileNotFoundError", "OSError")
    assert_refused(*files, *map(peek.format, calls), f"os.pidfd_open({ours})", by=refusals)


def test_no_open_file_is_passed_on(machine, tmp_path):
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        seen = "import os\nfor fd in range(256):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass"
        assert run(seen).output.split() == ["0", "1", "2", "3", "4"]


def test_nothing_can_be_written_outside(machine, tmp_path):
    (tmp_path / "data").write_text("good")
    path = str(tmp_path / "data")
    assert_refused(
        f"open({path!r}, 'w')",
        f"os.remove({path!r})",
        f"os.rename({path!r}, 'mine')",
        f"os.truncate({path!r}, 0)",
        f"os.chmod({path!r}, 0)",
        f"os.utime({path!r})",
        f"os.setxattr({path!r}, 'user.x', b'')",
        f"os.symlink({path!r}, 'link')",
        f"os.link({path!r}, 'link')",
        f"os.mkdir({str(tmp_path / 'new')!r})",
        f"open({str(tmp_path / 'escaped')!r}, 'w')",
        "os.mkdir('inside')",
        "os.mkfifo('pipe')",
        "os.chroot('.')",
        by=("PermissionError", "OSError"),
    )
    assert (tmp_path / "data").read_text() == "good"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data", "folders", "jail"]


def test_its_own_files_have_limits(machine):
    stay = "\nimport time\ntime.sleep(1000)"
    reports = run_all(
        "open('big', 'w').write('x' * 2 * 10**6)",
        "for i in range(8): open(str(i), 'w').write('x' * 900_000)" + stay,
        "for i in range(1000): open(str(i), 'w')" + stay,
        limits=SandboxLimits(seconds=120.0, file_mb=1),
    )
    assert [report.ended for report in reports] == ["exit 1"] + ["exit 1" if machine == "everything" else "files"] * 2


def test_each_run_starts_in_an_empty_folder(machine):
    assert run_all("open('left', 'w').write('for the next')", "import os; print(os.listdir())")[1].output == "[]\n"


def test_no_network_of_any_kind(machine, tmp_path):
    stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
    with socket.socket() as tcp, socket.socket(type=datagram) as udp, socket.socket(socket.AF_UNIX, stream) as unix:
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "socket"))
        tcp.listen(), unix.listen(), udp.setblocking(False)
        attacks = (
            f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}))",
            f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))",
            f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.getaddrinfo('example.com', 80)",
        )
        assert_refused(*(f"import socket\n{attack}" for attack in attacks), by=("PermissionError", "gaierror"))
        with pytest.raises(BlockingIOError):
            udp.recv(1)


# Signal 0 only asks for the right: without a filter any other would reach this whole machine.
def test_nobody_else_can_be_killed(machine):
    assert_refused(*(f"os.kill({pid}, 0)" for pid in (os.getpid(), "os.getppid()", 1, -1, 0)))
    assert_refused("import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))")
    assert run("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)").ended == "signal 15"


def test_the_supervisor_survives_attacks_on_it(machine):
    everyone = "(0, 1, -1) if os.getppid() == 1 else (os.getppid(),)"
    attack = f"import os\nfor p in {everyone}:\n    try: os.kill(p, {{}})\n    except OSError: pass"
    attacks = [attack.format(number) for number in (2, 9, 19, 15)]
    assert run_all(*attacks, "print('well')")[-1].output == "well\n"
    if machine == "everything":  # here, jobs that may start processes may also send them signals
        some = SandboxLimits(seconds=2.0, processes=4)  # it stops itself, too
        assert run_all(*attacks, "print('well')", limits=some)[-1].output == "well\n"


DAEMON = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(0.01)
    os._exit(0)
os.wait()
"""


def test_a_daemon_does_not_outlive_its_job():
    if "processes" in find_shortfalls(6):
        pytest.skip("processes cannot be started here")
    before = find_sandbox_processes()
    assert run(DAEMON, limits=SandboxLimits(seconds=120.0, processes=6)).ended == "exit 0"
    end = time.monotonic() + 30
    while left := find_sandbox_processes() - before:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def find_sandbox_processes():
    """Return processes of sandboxes below this one, or that have lost their parent; not those of tests beside it."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            parents = [parent.pid for parent in process.parents()]
            if sandbox._SUPERVISOR in process.cmdline() and (os.getpid() in parents or parents[0] == 1):
                found.add(process.pid)
    return found


def test_it_dies_with_whoever_started_it(tmp_path):
    script = (
        "import asyncio, sys\nfrom coalign_graders.sandbox.sandbox import *\nasync def main():\n"
        "    async with Sandbox(SandboxLimits(seconds=600)) as box:\n        print('begun', flush=True)\n"
        "        await box.run('while True: pass')\nasyncio.run(main())"
    )

    async def killed():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        await process.stdout.readline()
        while not (inside := processes_of(process.pid)[2:]):
            await asyncio.sleep(0.01)
        process.kill()
        await process.wait()
        return inside

    wait_until_gone(asyncio.run(killed()))


def test_cancelling_ends_it(machine):
    async def cancelled():
        async with asyncio.timeout(0.5), Sandbox(SandboxLimits(seconds=600)) as box:
            await box.run("while True: pass")

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())


@pytest.mark.parametrize("moment", ["before it is told of its parent", "at any time"])
def test_a_supervisor_that_dies_is_an_error_not_a_verdict(moment, tmp_path, monkeypatch):
    if "processes" in find_shortfalls(6):
        pytest.skip("without namespaces the supervisor has no process between itself and the job")
    slow = "import time; die = rights.die_with_parent; rights.die_with_parent = lambda *a: (time.sleep(1), die(*a))"
    check_nothing_is_left = make_machine(slow if moment.startswith("before") else "", tmp_path, monkeypatch)

    async def died():
        async with Sandbox(SandboxLimits(seconds=600)) as box:
            running = asyncio.ensure_future(box.run("while True: pass"))
            while not (begun := children_of(box._process.pid)):
                await asyncio.sleep(0.01)
            if moment == "at any time":
                while not children_of(begun[0]):
                    await asyncio.sleep(0.01)
            os.kill(box._process.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                await running

    with pytest.raises(SandboxError, match="ended unexpectedly"):
        asyncio.run(died())
    check_nothing_is_left()


def test_this_machine_is_attacked_before_it_is_trusted(machine):
    assert find_shortfalls() == {}
    assert list(find_shortfalls(4)) == ([] if machine == "everything" else ["processes"])


def test_a_machine_that_cannot_keep_a_limit_is_refused_by_name(tmp_path, monkeypatch):
    weak = "landlock.apply = seccomp.apply = lambda **_: False; rights.isolate = lambda: False"
    make_machine(weak, tmp_path, monkeypatch)
    message = r"network \(needs a seccomp.*files \(needs Landlock.*`require: \[memory, time\]`"
    with pytest.raises(LimitNotEnforceable, match=message):
        require_limits(sandbox.REQUIREMENTS)
    require_limits(("memory", "time"))
    find_shortfalls.cache_clear()


def _without(call):
    return f"seccomp._CONDITIONAL[{call!r}] = (None, None)"


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("landlock.apply = lambda **_: False", {"files"}),
        ("seccomp.apply = lambda **_: False", {"network", "libraries", "signals", "processes"}),
        (_without("openat"), {"libraries"}),
        (_without("openat2"), {"libraries"}),
        (_without("fcntl"), {"libraries", "signals"}),
        (_without("ioctl"), {"libraries", "signals"}),
        (_without("socketpair"), {"network"}),
        # What interrupts process 1 is a signal that the job may send, which only those may that start processes.
        (f"import signal; signal.SIG_IGN = signal.default_int_handler; {_without('kill')}", {"signals"}),
        ("rights.mount_folder = lambda *_: True", {"disk"}),
    ],
)
def test_each_layer_that_is_missing_is_noticed(change, missing, tmp_path, monkeypatch):
    make_machine(f"landlock.find_version = lambda _: 1; {change}", tmp_path, monkeypatch)
    assert set(find_shortfalls()) == missing
    find_shortfalls.cache_clear()


def test_bad_settings():
    with pytest.raises(ValueError, match="there is no 'net'; there are network, files"):
        require_limits(("net",))
    with pytest.raises(ValueError, match="memory_mb is 0"):
        SandboxLimits(memory_mb=0)
