"""Boxes against commands that attack them: bubblewrap where it is installed, podman among the slow tests."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from coalign_graders import boxes
from coalign_graders.boxes import SandboxConfig, SandboxError, open_sandbox
from coalign_graders.code import code
from packages.graders.tests.sandbox.machines import wait_until_gone
from tests.rewards.samples import sample

IMAGE = "localhost/coalign-tests-busybox"


@pytest.fixture(scope="session")
def bwrap():
    if shutil.which("bwrap") is None:
        pytest.skip("there is no bwrap (apt-get install bubblewrap)")
    if subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces")
    return {"type": "bwrap"}


@pytest.fixture(scope="session")
def podman(tmp_path_factory):
    """A container image of nothing but busybox."""
    busybox = shutil.which("busybox")
    if not (shutil.which("podman") and busybox):
        pytest.skip("there is no podman, or no busybox (apt-get install podman runc busybox-static)")
    script = "mkdir bin tmp; cp $0 bin/busybox; for a in $($0 --list); do ln -s busybox bin/$a; done; tar -c bin tmp"
    folder = tmp_path_factory.mktemp("image")
    archive = subprocess.run(["sh", "-c", script, busybox], cwd=folder, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["podman", "import", "-q", "-", IMAGE], input=archive, check=True)
    yield {"type": "podman", "image": IMAGE}
    subprocess.run(["podman", "rmi", "-f", IMAGE], check=True)


@pytest.fixture(params=["bwrap", pytest.param("podman", marks=pytest.mark.slow)])
def config(request):
    return request.getfixturevalue(request.param)


def use(config, steps):
    """The result of ``steps(box)`` in a new box."""

    async def run():
        async with open_sandbox(config) as box:
            return await steps(box)

    return asyncio.run(run())


def run(config, command, **arguments):
    return use(config, lambda box: box.run(command, **arguments))


def list_processes(mark):
    """The processes of this machine, boxes included, whose command line has ``mark``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def test_a_command_its_streams_and_its_exit_code(config):
    async def steps(box):
        return [
            await box.run("cat; echo $A; echo no >&2; exit 3", stdin=b"in\n", env={"A": "$(id) --x"}),
            await box.run(["echo", "a  b", "$HOME;", "--version"]),
            await box.run("kill -9 $$"),
            await box.run("pwd; false | cat"),
            await box.run("no_such_command"),
            await box.run("echo \ud800 " + "#" * (2**17 - 14)),
            *[await box.run(command) for command in ("echo a\0b", "x" * 2**17, ["echo", "x" * 10**6])],
        ]

    plain, listed, killed, pipe, missing, surrogate, *impossible = use(config, steps)
    assert (plain.code, plain.out, plain.err, plain.timed_out) == (3, "in\n$(id) --x\n", "no\n", False)
    assert listed.out == "a  b $HOME; --version\n"
    assert (killed.code, killed.timed_out) == (137, False)
    assert (pipe.code, pipe.out) == (0, "/work\n")  # the code of the last command, as `run` says
    assert (missing.code, surrogate.out) == (127, "?\n")
    assert [(result.code, result.timed_out) for result in impossible] == [(126, False)] * 3


def test_a_pipe_that_fails_can_say_so(bwrap):
    assert run(bwrap, ["bash", "-o", "pipefail", "-c", "false | tee log"]).code == 1


def test_nothing_of_this_machine_is_seen(config, tmp_path, monkeypatch):
    monkeypatch.setenv("COALIGN_SECRET", "secret")
    (tmp_path / "secret").write_text("secret")
    seen = run(config, f"env; cat /proc/net/dev; cat {tmp_path}/secret; cat /etc/shadow; ls /root /home")
    assert "secret" not in seen.out.lower() and "root:" not in seen.out
    devices = [line.split(":")[0].strip() for line in seen.out.splitlines() if ":" in line and "=" not in line]
    assert devices == ["lo"]


def test_system_folders_are_read_only_and_rights_are_gone(bwrap):
    commands = ["touch /usr/x", "touch /etc/x", "touch /x", "touch /dev/x", "mount -t tmpfs x /mnt", "unshare -Ur true"]
    script = "".join(f"{command} && echo done: {command}\n" for command in commands)
    result = run(bwrap, f"{script}id -u; grep CapEff /proc/self/status; ls /proc/self/fd | wc -l")
    user, rights, descriptors = result.out.splitlines()
    assert int(user) != 0 and rights.split()[1].strip("0") == "" and int(descriptors) <= 4


def test_memory_processes_and_files_are_limited(config):
    small = {**config, "memory_mb": 64, "processes": 20, "file_mb": 1}

    async def steps(box):
        memory = await box.run("head -c 300000000 /dev/zero | tail -c 200000000 > /dev/null")
        file = await box.run("head -c 3000000 /dev/zero > big")
        size = await box.run("wc -c < big")
        processes = await box.run("for i in $(seq 50); do sleep 60 & done; echo all of them")
        return memory, file, size, processes

    memory, file, size, processes = use(small, steps)
    assert memory.code not in (0, None) and file.code not in (0, None) and int(size.out) <= 2**20
    assert processes.code != 0 and "all of them" not in processes.out


def test_time_ends_what_forks_and_ignores_signals(config):
    mark = f"1{os.getpid()}{time.monotonic_ns() % 10**6}"
    fork = f"trap '' TERM HUP; (setsid sh -c \"trap '' TERM; sleep {mark}\" &); echo begun; sleep {mark}"

    async def steps(box):
        result = await box.run(fork, seconds=1.0)
        left = list_processes(mark)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run(fork), 1.0)
        return result, left, list_processes(mark), await box.run("echo alive")

    result, left, after_cancellation, then = use(config, steps)
    assert (result.code, result.out, result.timed_out) == (None, "begun\n", True)
    wait_until_gone([*left, *after_cancellation])
    assert then.out == "alive\n"


def test_the_beginning_of_long_output_is_kept(config):
    result = run(config, "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo only >&2")
    assert result.code == 0 and result.out.startswith("first\nxxx") and result.err == "only\n"
    assert result.out.endswith(f"\n[{5_000_006 - 2**20} bytes more]")


def test_files_are_written_and_read_below_the_folder_alone(config):
    wrong = ["../x", "/etc/passwd", "a/../../x", "", "..", "out/x", "out/passwd", "file", "a\0b"]

    async def steps(box):
        await box.write("a/-b c'$(id).bin", bytes(range(256)) * 8000)
        whole = await box.read("a/-b c'$(id).bin", 10**8)
        assert whole == bytes(range(256)) * 8000
        assert await box.read("./a/-b c'$(id).bin", limit=3) == b"\0\1\2"
        await box.run("ln -s /etc out; ln -s /tmp/new file; ln -s a inner; mkfifo fifo")
        assert await box.read("inner/-b c'$(id).bin", 1) == b"\0"
        for path in wrong:
            with pytest.raises(ValueError, match="leads out"):
                await box.write(path, b"")
        await box.run("echo x > /tmp/new")
        for path in wrong[:-1]:
            with pytest.raises((ValueError, FileNotFoundError)):
                await box.read(path)
        with pytest.raises(FileNotFoundError):
            await box.read("none")
        with pytest.raises(OSError, match="in the box"):
            await box.read("a")
        return await box.run("ls /tmp /tmp/.. | grep -x x; wc -c < /tmp/new")

    assert use(config, steps).out == "2\n"


def test_other_boxes_begin_with_what_was_saved(config):
    async def fill(box):
        await box.write("a/b", b"saved")
        await box.run("chmod 700 a; ln -s /etc/passwd link")
        image = await box.save()
        await box.write("a/b", b"later")
        return image

    image = use(config, fill)

    async def look(box):
        text = await box.read("a/b")
        await box.write("a/b", b"other")
        return text

    assert [use({**config, "image": image}, look) for _ in range(2)] == [b"saved", b"saved"]
    subprocess.run(["rm", "-r", image] if config["type"] == "bwrap" else ["podman", "rmi", image], check=True)


def check_ports(config):
    async def answer(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + request.split()[1] * 100_000)
        writer.close()

    async def steps(box):
        servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(3)]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        assert await box.expose(ports[0]) == f"127.0.0.1:{ports[0]}"
        await box.run("sleep 60", seconds=0.5)  # a container starts anew, in another network
        await box.expose(ports[1])
        script = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        fetch = ["python3", "-c", script] if config["type"] == "bwrap" else ["wget", "-qO-"]
        urls = [f"http://127.0.0.1:{port}/ok" for port in ports] + ["http://1.1.1.1/"]
        return [await box.run([*fetch, url]) for url in urls]

    first, second, *others = use(config, steps)
    assert [(first.code, first.out.strip()), (second.code, second.out.strip())] == [(0, "/ok" * 100_000)] * 2
    assert all(other.code == 1 and not other.out for other in others)


def test_one_port_of_this_machine_is_reached_and_nothing_else(config):
    check_ports(config)


def test_a_port_is_reached_without_root(bwrap, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # what root may do is not tried
    check_ports(bwrap)


def test_a_box_that_dies_or_does_not_start_is_no_result(config, monkeypatch):
    async def steps(box):
        command = asyncio.create_task(box.run("sleep 60"))
        while not (processes := list_processes(box.name)):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        if config["type"] == "podman":
            subprocess.run(["podman", "kill", box.name], check=True)
        else:
            os.kill(min(processes), signal.SIGKILL)
        await command

    with pytest.raises(SandboxError, match="has died"):
        use(config, steps)
    with pytest.raises(SandboxError, match="no/such/image"):
        run({**config, "image": "localhost/no/such/image"}, "true")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=f"there is no '{config['type']}' on this machine; install "):
        run(config, "true")


def test_what_a_killed_run_leaves_is_removed(config):
    mark = f"2{os.getpid()}{time.monotonic_ns() % 10**6}"
    program = f"""if True:
        import asyncio
        from coalign_graders.boxes import open_sandbox
        async def use():
            async with open_sandbox({config!r}) as box:
                print(box.name, flush=True)
                await box.run("sleep {mark}")
        asyncio.run(use())"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout
        name = killed.stdout.readline().strip()
        while not list_processes(mark) and killed.poll() is None:
            time.sleep(0.05)

        async def steps(box):
            boxes._reap.cache_clear()
            await asyncio.to_thread(boxes._reap, config["type"])
            assert list_processes(mark)  # of a run that lives
            killed.kill()
            killed.wait()
            boxes._reap.cache_clear()
            await asyncio.to_thread(boxes._reap, config["type"])
            return await box.run("echo alive")

        assert use(config, steps).out == "alive\n"
    wait_until_gone(list_processes(mark))
    assert not list(Path(tempfile.gettempdir()).glob(f"{name}*"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "bwarp"}, r"type is 'bwarp'; expected bwrap \| podman \| docker \| my.module:name"),
        ({"type": "bwrap", "memory": 1}, "unknown key 'memory'; did you mean 'memory_mb'?"),
        ({"type": "bwrap", "memory_mb": 0}, "greater than 0"),
        ({"type": "bwrap", "network": True}, "no effect in bwrap"),
        ({"type": "podman"}, "missing `image`"),
        ({"type": "podman", "image": "--privileged"}, "image"),
    ],
)
def test_settings_that_are_wrong(config, message):
    with pytest.raises(ValueError, match=message):
        SandboxConfig.model_validate(config)


@contextlib.asynccontextmanager
async def own_box(**settings):
    yield settings


def test_a_class_of_ones_own_gets_the_other_keys():
    async def use_own():
        async with open_sandbox({"type": f"{__name__}:own_box", "image": "x", "token": 1}) as box:
            return box

    assert asyncio.run(use_own()) == {"image": "x", "token": 1}


def test_the_code_reward_in_a_box(bwrap):
    if not (python := shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        pytest.skip("the system has no Python")
    asserts = ["assert f(1) == 2", "assert f(5) == 10", "assert all(f(i) == 2 * i for i in range(3))"]
    cases = [{"input": "3\n", "output": "6"}]
    programs = [
        ("def f(x): return 2 * x", asserts, 1.0),
        ("def f(x): return 2", asserts, 1 / 3),
        ("import os; os._exit(0)", asserts, 0.0),
        ("while True: pass", asserts[:1], 0.0),
        ("print(2 * int(input()))", cases, 1.0),
        ("print(6); print('x' * 10**6)", cases, 0.0),
        ("print(6); exit(1)", cases, 0.0),
        ("import os, sys; os.write(2, b'x'); os.write(3, b'y'); print(6)", cases, 1.0),
    ]

    async def score(**settings):
        samples = [sample(f"```python\n{program}\n```", tests=tests) for program, tests, _ in programs]
        return [(await code(one, seconds=2.0, total_seconds=60.0, **settings))["reward"] for one in samples]

    assert asyncio.run(score(sandbox=SandboxConfig(**bwrap))) == [reward for _, _, reward in programs]
    assert asyncio.run(score()) == [reward for _, _, reward in programs]
    with pytest.raises(SandboxError, match="runs no Python"):
        asyncio.run(score(sandbox=SandboxConfig(**bwrap, options=["--ro-bind", "/dev/null", python])))
