"""Memory and time of training adapters against training everything: SFT steps of a random 80M model on CPU.

    python benchmarks/lora_memory.py [--steps 3] [--rows 4] [--length 256] [--micro 256] [--only lora qlora]

Each setting runs in a process of its own; its peak is the most memory that the process ever held (ru_maxrss), with
Python, torch and the reading of the model in it. The first line is such a process without a model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import make_model, peak_mib

LORA = {"rank": 16, "alpha": 32}
SHAPE = {"hidden": 640, "layers": 12, "heads": 10, "kv_heads": 2, "intermediate": 2560}
SETTINGS = {
    "full": {},
    "full, checkpointing": {"activation_checkpointing": "full"},
    "lora": {"lora": LORA},
    "lora, checkpointing": {"lora": LORA, "activation_checkpointing": "full"},
    "lora, q and v": {"lora": LORA | {"target": ["*.q_proj", "*.v_proj"]}},
    "dora": {"lora": LORA | {"dora": True}},
    "qlora": {"lora": LORA | {"base_bits": 4}},
}


def measure(path: str, setting: str, steps: int, rows: int, length: int, micro: int) -> dict:
    """Train in this process; seconds of the steps after the first one."""
    import torch

    from coalign.algorithms.losses.supervised import SFTLoss
    from coalign.algorithms.objective import Objective
    from coalign.backends.hf.fsdp import FSDPModule
    from coalign.config.schema import ModelConfig
    from coalign.data.batch import Batch
    from coalign.roles import Context

    torch.set_num_threads(1)
    if setting == "import":
        import peft  # noqa: F401

        return {"peak": peak_mib()}
    config = ModelConfig(load=path, max_tokens_per_micro=micro, optimizer={"lr": 1e-4}, **SETTINGS[setting])
    trainer = FSDPModule(config, Context(model="trainer", steps=steps, loss=Objective(SFTLoss())))
    trainer.setup()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 16000, (rows * length,), generator=draw, dtype=torch.int32)
    batch = Batch(torch.full((rows,), length), {"tokens": tokens})
    times, losses = [], []
    for _ in range(steps):
        begun = time.perf_counter()
        losses.append(trainer.train_step(batch)["loss/value"].value)
        times.append(time.perf_counter() - begun)
    model = trainer.model.model
    return {
        "peak": peak_mib(),
        "trained": model.num_parameters(only_trainable=True),
        "all": model.num_parameters(),
        "seconds": sum(times[1:]) / max(1, len(times) - 1),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro", type=int, default=256, help="tokens of a micro-batch")
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "SETTING"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = (given.steps, given.rows, given.length, given.micro)
    if given.measure:
        print(json.dumps(measure(*given.measure, *sizes)))
        return
    options = [f"--{name}={size}" for name, size in zip(("steps", "rows", "length", "micro"), sizes, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, too: a process begins with the peak of the one that started it.
        making = multiprocessing.get_context("spawn").Process(target=make_model, args=(Path(folder),), kwargs=SHAPE)
        making.start()
        making.join()

        def run(setting: str) -> dict:
            command = [sys.executable, __file__, *options, "--measure", folder, setting]
            return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

        print(f"{'setting':22}{'trained':>12}{'share':>8}{'peak MiB':>10}{'of full':>9}{'s/step':>8}  loss")
        print(f"{'import':22}{'':20}{run('import')['peak']:>10.0f}")
        full = None
        for setting in dict.fromkeys(["full", *given.only]):
            r = run(setting)
            full = full or r["peak"]
            counts = f"{r['trained']:>12,}{r['trained'] / r['all']:>8.2%}"
            memory = f"{r['peak']:>10.0f}{r['peak'] / full:>9.0%}"
            losses = f"{r['losses'][0]:.3f} -> {r['losses'][-1]:.3f}"
            print(f"{setting:22}{counts}{memory}{r['seconds']:>8.1f}  {losses}", flush=True)


if __name__ == "__main__":
    main()
