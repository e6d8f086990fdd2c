"""The Slurm target: an sbatch script that raises Ray on the allocation, trains, and comes back after preemption.

Login node and compute nodes share a file system (the usual case), so nothing is copied: the script trains in the
directory and with the Python of the shell that submits it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from coalign_jobs.environment import list_variables
from coalign_jobs.job import TrainingJob
from coalign_jobs.ray_script import raise_ray

STEM = """\
#!/bin/bash
# {title}
{directives}

set -uo pipefail
cd {directory} || exit 1

{variables}
# People's own modules are found here, on every node.
export PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"

driver= preempted= interrupted= told=
# USR1 comes {notice} s before the time limit, and with preemption where Slurm is configured to send it
# (SlurmctldParameters=preempt_send_user_signal): coalign saves, and the job goes back into the queue.
# TERM is the end that somebody wants (scancel): coalign saves, and that is all.
end_run() {{
  preempted=$1 interrupted=yes
  if [ -n "$driver" ] && [ -z "$told" ]; then  # once: the second signal ends a run without a checkpoint
    told=yes
    kill -TERM "$driver" 2>/dev/null
  fi
}}
trap 'end_run yes' USR1
trap 'end_run ""' TERM

train() {{
  code=143
  [ -z "$interrupted" ] || return 0  # told to end before it began
  {command} &
  driver=$!
  while :; do
    interrupted=
    wait "$driver"
    code=$?
    [ -n "$interrupted" ] || break  # else a signal was handled, and the run goes on
  done
  return 0
}}
"""
ONE_NODE = """\
train
"""
SEVERAL_NODES = """\
RAY_AUTH_TOKEN=$({python} -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
{functions}
RAY_HEAD=$(own_address)
export RAY_HEAD
export RAY_PORT=$((20000 + SLURM_JOB_ID % 20000))  # another job on this machine has another number
export RAY_FILES="/tmp/ray_${{SLURM_JOB_ID}}_${{SLURM_RESTART_COUNT:-0}}"
export RAY_ADDRESS=$RAY_HEAD:$RAY_PORT
export -f own_address start_ray
(start_ray head) &
head=$!
srun --nodes={others} --ntasks={others} --ntasks-per-node=1 --exclude="$SLURMD_NODENAME" bash -c 'start_ray worker' &
workers=$!
wait_for_nodes && train || code=1
kill "$workers" "$head" 2>/dev/null
wait "$workers" "$head" 2>/dev/null
"""
END = """\
if [ -n "$preempted" ] && [ "$code" -eq 143 ]; then  # saved, and not at its last step
  echo "coalign: preempted; job $SLURM_JOB_ID goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60  # Slurm ends this script; what comes after would count as the job's end
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmOptions:
    """What sbatch is asked for beside nodes and devices; None: Slurm's default.

    ``notice``: seconds between the warning and the end of an attempt. ``extra``: further options of sbatch.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    cores: int | None = None
    gpu: str | None = None
    interface: str | None = None
    notice: int = 120
    extra: tuple[str, ...] = ()


def render_sbatch(job: TrainingJob, options: SlurmOptions) -> str:
    """Render the sbatch script of a job."""
    size, several = job.size, job.size.nodes > 1
    notice = job.config.runtime.preemption_notice or options.notice
    python = os.path.normpath(sys.executable)
    settings = [f"runtime.preemption_notice={notice:g}", *(["runtime.ray_address=auto"] if several else [])]
    user = re.sub(r"\W", "", os.environ.get("USER", "user"))
    variables = list_variables(
        f"/tmp/coalign_{user}", options.interface, hub=os.environ.get("HF_HOME"), starts_ray=several
    )
    devices = f", {size.devices} {size.resource} each" if size.devices else ""
    text = STEM.format(
        title=f"coalign launch slurm {job.file}: {size.nodes} node{'s' * several}{devices}",
        directives="\n".join(f"#SBATCH {line}" for line in _list_directives(job, options)),
        directory=shlex.quote(str(job.directory)),
        variables="".join(f"export {v.name}={shlex.quote(v.value)}  # {v.reason}\n" for v in variables),
        notice=options.notice,
        command=job.command(python, *settings),
    )
    ray = shlex.quote(str(Path(python).with_name("ray")))
    several_nodes = SEVERAL_NODES.format(
        python=shlex.quote(python), others=size.nodes - 1, functions=raise_ray(size, ray)
    )
    return text + "\n" + (several_nodes if several else ONE_NODE) + END


def _list_directives(job: TrainingJob, options: SlurmOptions) -> list[str]:
    size = job.size
    gpu_type = f"{options.gpu}:" if options.gpu else ""
    output = Path(job.config.output)
    lines = [
        f"--job-name={job.name}",
        f"--nodes={size.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={options.cores}" if options.cores else "--exclusive",
        f"--gpus-per-node={gpu_type}{size.devices}" if size.resource == "GPU" and size.devices else "",
        f"--partition={options.partition}" if options.partition else "",
        f"--account={options.account}" if options.account else "",
        f"--time={options.time}" if options.time else "",
        "--requeue",
        f"--signal=B:USR1@{options.notice}",
        f"--output={output.parent}/{job.name}-%j.log",
        "--open-mode=append",
    ]
    return [*filter(None, lines), *options.extra]


def submit_sbatch(job: TrainingJob, script: str) -> str:
    """Submit the script; returns what to tell the person. ValueError with sbatch's own words if it refuses."""
    if shutil.which("sbatch") is None:
        raise ValueError("Slurm's `sbatch` is not on this machine: call this on a login node, or look at --dry-run")
    output = Path(job.config.output).parent
    (job.directory / output).mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for its log
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, cwd=job.directory)
    if done.returncode:
        raise ValueError(f"sbatch refused the job: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    log = output / f"{job.name}-{number}.log"
    return f"job {number} is in the queue\nfollow it: tail -F {log}; squeue --job {number}\nend it: scancel {number}"
