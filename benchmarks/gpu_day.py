"""Everything that one hour with a GPU should answer, most valuable first, unattended.

    python benchmarks/gpu_day.py [--output runs/gpu_day] [--minutes 40] [--device cuda:0] [--small] [JOB ...]

Each job has a process and a time limit of its own, so one that fails or hangs costs only itself. A job writes a line
to OUTPUT/results.jsonl as soon as it ends, and its output to OUTPUT/JOB.log; jobs with a line there are not run again.
What is measured stands beside its floor: FLOPs over the matmul rate, or bytes over the copy rate, both measured first.
`--small` takes tiny models, for a try on another device (`cpu`, or `standin:0`, the simulated one of the tests).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.packing import pack
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.devices import is_accelerator
from coalign.roles import Context

ROOT = Path(__file__).resolve().parents[1]
# Qwen2.5: hidden size, layers, heads, heads of keys, width of the MLP, vocabulary, whether the head is tied.
SHAPES = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "tiny": (64, 2, 4, 2, 128, 512, True),
}
PROMPTS, SAMPLES, ASKED, NEW = 8, 8, 256, 512  # of a batch: prompts, samples of each, tokens of either
Job = Callable[[argparse.Namespace, Path], dict[str, Any]]


# ---- jobs


def measure_machine(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rates of products (FLOP/s) and of copies (B/s): what the floors of the other jobs are made of."""
    device, size, mib = options.device, 256 if options.small else 8192, 1 if options.small else 1024
    found: dict[str, Any] = {"torch": torch.__version__, "device": describe_device(device)}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size).to(device, dtype) for _ in range(2))
        found[f"matmul_{str(dtype)[6:]}"] = 2 * size**3 / time_call(lambda a=a, b=b: a @ b, device, repeats=20)
    there = torch.zeros(mib * 2**20, dtype=torch.uint8, device=device)
    found["copy"] = 2 * there.nbytes / time_call(lambda: there.clone(), device, repeats=20)  # it reads and writes
    here = torch.zeros(mib * 2**20, dtype=torch.uint8)
    found["from_host"] = here.nbytes / time_call(lambda: here.to(device), device)
    return found


def run_tests(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The tests of devices: on CUDA those of tests/gpu, elsewhere a part of those on the simulated one."""
    chosen = ["-m", "gpu", "tests/gpu"] if options.device.startswith("cuda") else ["tests/test_standin.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", *chosen, f"--junitxml={folder / 'tests.xml'}"]
    return {"exit": subprocess.run(command, cwd=ROOT, check=False).returncode}


def time_training(shape: str, kernel: str) -> Job:
    def job(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        module = build_trainer(options, folder, shape, kernel)
        batch = make_batch(SHAPES[shape][5], options)
        seconds = {
            "score": time_call(lambda: module.forward_step(batch), options.device),
            "train": time_call(lambda: module.train_step(batch), options.device),
        }
        flops = count_flops(module, batch)
        rate = read_rate(folder, f"matmul_{options.dtype}")
        floors = {"score": flops / rate, "train": 3 * flops / rate} if rate else {}
        return {
            "seconds": seconds,
            "of_floor": {name: floors[name] / seconds[name] for name in floors},
            "tokens_per_second": batch.tokens_total / seconds["train"],
            "peak_gib": read_peak(options.device),
        }

    return job


def time_decoding(shape: str) -> Job:
    def job(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        new = 16 if options.small else NEW
        sampling = SamplingConfig(max_new_tokens=new)
        config = ModelConfig(
            load=str(make_model(folder, shape)), init="random", compute_dtype=options.dtype, sampling=sampling
        )
        context = Context(model="policy", device=options.device, samples_per_prompt=SAMPLES)
        module = NativeModule(config, context)
        module.setup()
        trainer = build_trainer(options, folder, shape, "auto")
        module.load_weights(trainer.export_weights(), version=0)
        size = sum(p.numel() for p in trainer.model.parameters()) * torch.finfo(getattr(torch, options.dtype)).bits // 8
        del trainer
        asked = 8 if options.small else ASKED
        tokens = torch.randint(3, SHAPES[shape][5], (PROMPTS * asked,), dtype=torch.int32)
        prompts = Batch(torch.full((PROMPTS,), asked)).with_(
            tokens=tokens, group=torch.arange(PROMPTS), rows=[{} for _ in range(PROMPTS)]
        )
        seconds = time_call(lambda: module.generate(prompts), options.device, repeats=2)
        module.engine.graphs = False
        without = time_call(lambda: module.generate(prompts), options.device, repeats=2)
        copied = read_rate(folder, "copy")
        return {
            "seconds": seconds,
            "seconds_without_graphs": without,
            "tokens_per_second": PROMPTS * SAMPLES * new / seconds,
            # Each step reads the weights once; keys and values come on top.
            "of_floor": new * size / (copied / 2) / seconds if copied else None,
            "peak_gib": read_peak(options.device),
        }

    return job


def time_sync(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """New weights for a policy on the same device, beside the time of copying them."""
    shape = "tiny" if options.small else "1.5B"
    trainer = build_trainer(options, folder, shape, "auto")
    config = ModelConfig(load=str(folder / shape), init="random", compute_dtype=options.dtype)
    policy = NativeModule(config, Context(model="policy", device=options.device))
    policy.setup()
    versions = iter(range(100))
    send = lambda: policy.load_weights(trainer.export_weights(), version=next(versions))  # noqa: E731
    size = sum(p.nbytes for p in trainer.model.parameters())
    copied = read_rate(folder, "copy")
    seconds = time_call(send, options.device, repeats=5)
    return {"seconds": seconds, "bytes": size, "of_floor": 2 * size / copied / seconds if copied else None}


def trace(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A Perfetto file of a training step, and its kernels by name."""
    shape = "tiny" if options.small else "0.5B"
    module, batch = build_trainer(options, folder, shape, "auto"), make_batch(SHAPES[shape][5], options)
    module.train_step(batch)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.device.startswith("cuda"):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        module.train_step(batch)
    profile.export_chrome_trace(str(folder / "train_step.json"))
    kernels = [event for event in profile.events() if event.device_type != torch.autograd.DeviceType.CPU]
    return {"kernels_a_layer": len(kernels) / SHAPES[shape][1], "file": "train_step.json"}


def compare_with_trl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if importlib.util.find_spec("trl") is None:
        return {"skipped": "trl is not installed"}
    steps = ["--rounds", "1", "--steps", "3", "--precision", "bf16"]
    command = [sys.executable, str(ROOT / "benchmarks/grpo_vs_trl.py"), *steps]
    return {"exit": subprocess.run(command, cwd=ROOT, check=False).returncode}


# Minutes that each may take, in the order of their worth.
JOBS: dict[str, tuple[float, Job]] = {
    "machine": (2, measure_machine),
    "tests": (8, run_tests),
    "train-0.5B-auto": (3, time_training("0.5B", "auto")),
    "decode-0.5B": (3, time_decoding("0.5B")),
    "train-0.5B-blocks": (3, time_training("0.5B", "blocks")),
    "train-0.5B-flex": (4, time_training("0.5B", "flex")),
    "train-1.5B-auto": (3, time_training("1.5B", "auto")),
    "decode-1.5B": (3, time_decoding("1.5B")),
    "sync": (2, time_sync),
    "trace": (2, trace),
    "decode-7B": (4, time_decoding("7B")),
    "train-7B-auto": (4, time_training("7B", "auto")),
    "trl": (10, compare_with_trl),
}
SMALL: dict[str, tuple[float, Job]] = {
    "machine": JOBS["machine"],
    "tests": JOBS["tests"],
    "train-tiny": (3, time_training("tiny", "auto")),
    "decode-tiny": (3, time_decoding("tiny")),
    "sync": JOBS["sync"],
    "trace": JOBS["trace"],
}


# ---- what they share


def make_model(folder: Path, shape: str) -> Path:
    """A directory with the configuration of a model of this shape; its weights are drawn where it is built."""
    from transformers import Qwen2Config

    hidden, layers, heads, kv_heads, width, vocabulary, tied = SHAPES[shape]
    path = folder / shape
    config = Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=width, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=4096,
        rope_theta=1e6, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(path)
    return path


def build_trainer(options: argparse.Namespace, folder: Path, shape: str, kernel: str) -> FSDPModule:
    config = ModelConfig(
        load=str(make_model(folder, shape)),
        init="random",
        # Sixteen bytes a parameter would not fit with 7B.
        dtype="bfloat16" if shape == "7B" else "float32",
        compute_dtype=options.dtype,
        attention=kernel if options.device.startswith("cuda") else "auto",
        activation_checkpointing="full" if shape == "7B" else None,
    )
    loss = Objective(PolicyGradient())
    module = FSDPModule(config, Context(model="trainer", device=options.device, loss=loss, samples_per_prompt=SAMPLES))
    module.setup()
    return module


def make_batch(vocabulary: int, options: argparse.Namespace) -> Batch:
    """Responses of half to all of NEW tokens to prompts of ASKED, random."""
    asked, new = (8, 16) if options.small else (ASKED, NEW)
    generator = torch.Generator().manual_seed(0)
    count = PROMPTS * SAMPLES
    responses = torch.randint(new // 2, new + 1, (count,), generator=generator)
    prompts = [torch.randint(3, vocabulary, (asked,), generator=generator) for _ in range(PROMPTS)]
    rows = [
        torch.cat([prompts[i // SAMPLES], torch.randint(3, vocabulary, (int(n),), generator=generator)])
        for i, n in enumerate(responses)
    ]
    mask = torch.cat([torch.arange(len(row)) >= asked for row in rows])
    tokens = torch.cat(rows).to(torch.int32)
    return Batch(torch.tensor([len(row) for row in rows])).with_(
        tokens=tokens,
        loss_mask=mask,
        advantages=torch.where(mask, torch.randn(len(tokens), generator=generator), 0.0),
        group=torch.arange(count) // SAMPLES,
        prompt_length=torch.full((count,), asked),
    )


def count_flops(module: FSDPModule, batch: Batch) -> float:
    """Least FLOPs of a forward: two for each weight of a product and token, four for each pair that attends."""
    layout, model = pack(batch), module.model.model
    config = model.config.get_text_config()
    head = config.hidden_size * config.vocab_size
    embeddings = head * (1 if config.tie_word_embeddings else 2)
    body = sum(p.numel() for p in model.parameters() if p.dim() == 2) - embeddings
    pairs = sum(
        length * ((block.prefix[1] - block.prefix[0] if block.prefix else 0) + length / 2)
        for block in layout.blocks
        for length in block.lengths
    )
    attention = 4 * pairs * config.hidden_size * config.num_hidden_layers
    return 2.0 * body * len(layout.tokens) + 2.0 * head * len(layout.targets) + attention


def time_call(call: Callable[[], object], device: str, *, repeats: int = 3) -> float:
    """Median seconds of a call, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        if is_accelerator(device):
            torch.accelerator.synchronize(torch.device(device))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def describe_device(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def read_peak(device: str) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.startswith("cuda") else None


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / "results.jsonl"
    lines = map(json.loads, file.read_bytes().splitlines()) if file.exists() else ()
    return {line["job"]: line for line in lines}


def read_rate(folder: Path, name: str) -> float | None:
    return read_results(folder).get("machine", {}).get(name)


# ---- the day


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="these alone; by default all")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_day"))
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    table = SMALL if options.small else JOBS
    if unknown := [name for name in options.jobs if name not in table]:
        parser.error(f"there is no job {unknown[0]}; there are: {', '.join(table)}")
    if options.job:
        if options.device.startswith("standin"):
            sys.path.insert(0, str(ROOT))
            from tests.standin.device import load

            load()
        run_job(options, table[options.job][1])
        return
    end = time.monotonic() + 60 * options.minutes
    for name in options.jobs or table:
        limit = min(60 * table[name][0], end - time.monotonic())
        if name in read_results(options.output) or limit < 20:
            print(f"{name}: {'done before' if limit >= 20 else 'no time is left'}")
            continue
        begun = time.monotonic()
        result = start_job(name, limit, options)
        append(options.output, {"job": name, **result, "job_seconds": round(time.monotonic() - begun, 1)})


def run_job(options: argparse.Namespace, job: Job) -> None:
    result = job(options, options.output)
    (options.output / f"{options.job}.json").write_text(json.dumps(result))


def start_job(name: str, limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run a job in a process of its own; its results, or why there are none."""
    given = [argument for argument in sys.argv[1:] if argument not in options.jobs]
    with open(options.output / f"{name}.log", "wb") as log:
        try:
            code = subprocess.run(
                [sys.executable, __file__, *given, "--job", name], stdout=log, stderr=log, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {limit:.0f} s"}
    if code:
        lines = (options.output / f"{name}.log").read_text(errors="replace").splitlines()
        return {"error": lines[-1] if lines else f"exit code {code}"}
    return json.loads((options.output / f"{name}.json").read_text())


def append(folder: Path, line: dict[str, Any]) -> None:
    with open(folder / "results.jsonl", "a") as results:
        results.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
