"""A driver that claims the processes of a run, writes which they are, and then ends or is killed.

``python -m tests.cluster.claimant FOLDER EPOCH WHAT``: WHAT is `kill` (itself), `end`, `stay`, `fail` (a call, then
kill), or `orphan`: kill itself, and its processes end after ORPHAN seconds. The last line that it writes is JSON.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import coalign.cluster.ray.ray_cluster as on_ray
from coalign.cluster.choice import start_cluster
from coalign.cluster.survivors.claim import RunClaim
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.roles import Context
from coalign.run_files.lock import lock_folder
from tests.cluster.conftest import find_pid

ORPHAN = 12.0  # longer than a driver's signs of life are apart
MODELS = {"policy": ("SumModule", 2), "trainer": ("GroupModule", 2), "reward": ("RewardLikeModule", 1)}


def claim(folder: Path, epoch: int, what: str, **how: Any) -> None:
    if what == "orphan":
        on_ray.ORPHAN_SECONDS = ORPHAN
    models = {
        name: ModelConfig(module=f"tests.cluster.modules:{module}", num_process=count)
        for name, (module, count) in MODELS.items()
    }
    config = RunConfig(
        algorithm="none", output=str(folder), models=models, runtime=RuntimeConfig(cluster="ray", threads=1)
    )
    lock = lock_folder(folder)
    cluster = start_cluster(config, models, RunClaim(folder, epoch, "same", **how))
    for name, model in models.items():
        cluster.spawn(name, model, Context(model=name, threads=1))
    cluster.expect_functions()
    pids = {name: model.run(find_pid).result() for name, model in cluster.models.items()}
    if what == "fail":
        cluster.models["policy"].call("fail", fatal=False).ended.exception()
    sys.stdout.write(json.dumps({"pids": pids}) + "\n")
    sys.stdout.flush()
    if what == "stay":
        time.sleep(600)
    elif what == "end":
        cluster.shutdown()
        lock.close()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    claim(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], **arguments)
