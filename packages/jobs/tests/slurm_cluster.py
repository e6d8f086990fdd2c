"""A real Slurm on this machine: Debian's daemons, with two nodes that are processes here.

They are those of `apt-get install slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins libhwloc15`. Everything
is in one directory, on ports of its own, and ends with the context. A job of the partition `urgent` takes the nodes of
those in `all`, which get USR1 a minute before. A requeued job waits for `cred_expire` seconds.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
CONFIGURATION = """\
ClusterName=one
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=9 PreemptMode=OFF
"""


def find_lack() -> str:
    """Return why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)})"
    return "" if os.getuid() == 0 else "its daemons run as root here"


@contextmanager
def start_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start Slurm in ``folder`` (a short path: it holds sockets); yields the environment of its commands."""
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = {"host": socket.gethostname().partition(".")[0], "folder": folder, "cores": os.cpu_count()}
    names["first"] = random.randrange(1000, 20000)  # a job's number becomes its Ray's port
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(ports=_find_ports(3), **names))
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": PATH}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    commands = [munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with open(folder / f"daemon.{number}.log", "wb") as log:
                started.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                )
            if command is munge:
                _wait_for((folder / "munge.socket").exists, folder)
        ask = ["sinfo", "--noheader", "--format=%T"]
        _wait_for(lambda: subprocess.run(ask, env=environment, capture_output=True).stdout.strip() == b"idle", folder)
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True)
        queue = ["squeue", "--noheader"]
        _wait_for(lambda: not subprocess.run(queue, env=environment, capture_output=True).stdout.strip(), folder)
        for daemon in reversed(started):
            daemon.terminate()
        for daemon in started:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()


def _find_ports(count: int) -> list[int]:
    """Find ports that are free now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _wait_for(condition: Callable[[], object], folder: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log"))))
        time.sleep(0.2)
