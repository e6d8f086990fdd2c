"""Measures this machine for the planner: its rates, and what the project's own engine and trainer make of them.

Rates of products, memory and collectives are measured directly. A few decode steps of the native engine and training
steps of the fsdp trainer, on a small random model, then say how near these come to the rates. The result replaces the
data sheet and the constants that public tables were fitted to (coalign_plan.constants.MeasuredMachine).

Every figure is a median of several runs. The machine should be idle: other work makes all of them worse.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coalign.processes.host import count_processors
from coalign_plan.constants import Constants, MeasuredMachine
from coalign_plan.generation import EngineReplica
from coalign_plan.gpus import GPUS, ClusterSpec, Gpu, find_gpu
from coalign_plan.hf_config import read_directory
from coalign_plan.job import ModelWork, Parallelism
from coalign_plan.training import TokenBatch, TrainingModel

if TYPE_CHECKING:
    import torch

FOLDER = Path.home() / ".cache" / "coalign" / "planner"
SHAPE = {
    "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1024,
    "vocab_size": 16384, "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
LAYERS = 4  # in the small model
# The training batch: groups that share a prompt, answers of uneven lengths, more than a processor's caches hold.
PROMPT, GROUPS = 64, 8
ANSWERS = (32, 48, 64, 80, 112, 128, 144, 160)  # tokens of a group's samples
DECODED = 24  # tokens of each sequence of a decode probe
GIB = 2**30


def name_machine() -> str:
    """Return the name that this machine's file has: its accelerator, or its host and processor count."""
    import torch

    if torch.accelerator.is_available():
        return torch.get_device_module().get_device_name().replace(" ", "-").replace("/", "-")
    return f"{platform.node()}-{count_processors()}cpu"


def measure_machine(say: Callable[[str], None] = print) -> tuple[MeasuredMachine, Path]:
    """Measure the machine, keep the result in a file of ~/.cache/coalign/planner, and return both."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    probe = MachineProbe(device, clock=time.process_time if alone else time.perf_counter)
    machine = probe.measure(say)
    path = FOLDER / f"{name_machine()}.json"
    machine.save(path)
    return machine, path


@dataclass
class MachineProbe:
    """Runs the probes of one device. ``repeats``: of each measurement, of which the median counts.

    ``clock``: with one thread, processor time is not disturbed as much by other work.
    """

    device: torch.device
    repeats: int = 3
    clock: Callable[[], float] = time.perf_counter

    def measure(self, say: Callable[[str], None]) -> MeasuredMachine:
        import torch

        figures: dict[str, float] = {}

        def note(name: str, value: float) -> float:
            figures[name] = value
            say(f"{name:46}{value:12.4g}")
            return value

        rates = {}
        for dtype, key in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            large = note(f"{key} products of 1536, TFLOP/s", self._product_rate(dtype, 1536, 1536, 1536) / 1e12)
            thin = note(f"{key} products of 1024 x 384, TFLOP/s", self._product_rate(dtype, 1024, 384, 384) / 1e12)
            rates[key] = (large, thin)
        copy = note("copies, GB/s (read and written)", self._copy_rate() / 1e9)
        attention = note("attention in bf16, TFLOP/s", self._attention_rate() / 1e12)
        link = note("all-reduce between two processes, GB/s", measure_collective(self.device.type) / 1e9)
        host = note("host to device, GB/s", self._host_rate() / 1e9)
        tile = statistics.mean(solve_tile(*pair) for pair in rates.values())
        peaks = {key: large * (1 + 3 * tile / 1536) for key, (large, _) in rates.items()}
        gpu = self._describe(peaks, copy, link)
        constants = replace(
            Constants(), matmul=1.0, memory=1.0, tile=tile, link=1.0, network=1.0, attention=attention / peaks["bf16"],
            host_gb_s=host, host_adam_gb_s=copy, step=0.0, sample=0.0, sync_fixed=0.0,
        )  # fmt: skip
        if self.device.type == "cpu":
            constants = replace(constants, eager_layer=0.0)  # whatever launches also computes
        with tempfile.TemporaryDirectory() as folder:
            for key in ("fp32", "bf16"):
                seconds = note(f"training step in {key}, s", self._training_seconds(Path(folder), key))
                gpu = calibrate_training(gpu, constants, Path(folder), key, seconds)
            points = {
                (layers, sequences): note(
                    f"decode step of {sequences} sequences, {layers} layers, ms",
                    1e3 * self._decode_seconds(Path(folder), layers, sequences),
                )
                for layers, sequences in ((LAYERS, 8), (LAYERS, 64), (LAYERS // 2, 64))
            }
            constants = calibrate_decoding(gpu, constants, Path(folder), points)
        return MeasuredMachine(gpu, constants, figures)

    # ---- rates -----------------------------------------------------------------------------------------------------

    def _time(self, work: Callable[[], object], times: int = 1) -> float:
        """Return the median seconds of one of ``times`` runs in a row, after a warm one."""
        import torch

        wait = torch.accelerator.synchronize if self.device.type != "cpu" else lambda: None
        work()
        seconds = []
        for _ in range(self.repeats):
            wait()
            started_at = self.clock()
            for _ in range(times):
                work()
            wait()
            seconds.append((self.clock() - started_at) / times)
        return statistics.median(seconds)

    def _product_rate(self, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
        import torch

        scale = 1 if self.device.type == "cpu" else 4
        a = torch.randn(rows * scale, inputs * scale, device=self.device, dtype=dtype)
        b = torch.randn(inputs * scale, outputs * scale, device=self.device, dtype=dtype)
        flops = 2.0 * rows * inputs * outputs * scale**3
        return flops / self._time(lambda: a @ b, times=max(1, int(2e9 * scale**3 / flops)))

    def _copy_rate(self) -> float:
        import torch

        source = torch.ones(2**26, device=self.device)  # 256 MiB
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._time(lambda: target.copy_(source))

    def _host_rate(self) -> float:
        import torch

        source = torch.ones(2**25, pin_memory=self.device.type == "cuda")
        target = torch.empty_like(source, device=self.device)
        return source.nbytes / self._time(lambda: target.copy_(source))

    def _attention_rate(self) -> float:
        import torch

        shape = (1, 6, 1024, 64)
        query, key, value = (torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(3))
        attend = torch.nn.functional.scaled_dot_product_attention
        flops = 2 * 2 * 6 * 64 * 1024 * 1024 / 2
        return flops / self._time(lambda: attend(query, key, value, is_causal=True), times=4)

    def _describe(self, peaks: dict[str, float], copy: float, link: float) -> Gpu:
        """Return the record of the device, with what could not be measured from its data sheet."""
        import torch

        if self.device.type == "cpu":
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
            base = replace(GPUS["L40S"], name="cpu", memory_gib=memory, fp8_tflops=None, fp4_tflops=None,
                           link_gpus=count_processors(), dollars_per_hour=0.0)  # fmt: skip
        else:
            try:
                base = find_gpu(torch.get_device_module().get_device_name())
            except ValueError:
                base = replace(GPUS["L40S"], name=name_machine())
            total = torch.get_device_module().get_device_properties(0).total_memory
            base = replace(base, memory_gib=total / GIB)
        return replace(
            base, bf16_tflops=peaks["bf16"], fp32_tflops=peaks["fp32"], memory_gb_s=copy, link_gb_s=link,
            network_gb_s=link if self.device.type == "cpu" else base.network_gb_s, matmul_share=1.0,
        )  # fmt: skip

    # ---- the project's own trainer and engine ----------------------------------------------------------------------

    def _training_seconds(self, folder: Path, precision: str) -> float:
        import torch

        from coalign.algorithms.losses.policy import PolicyGradient
        from coalign.algorithms.objective import Objective
        from coalign.backends.hf.fsdp import FSDPModule
        from coalign.config.schema import ModelConfig
        from coalign.data.batch import Batch
        from coalign.roles import Context

        save_shape(folder, LAYERS)
        config = ModelConfig(
            load=str(folder), init="random", compute_dtype="float32" if precision == "fp32" else "bfloat16",
            max_tokens_per_micro=16384,
        )  # fmt: skip
        trainer = FSDPModule(config, Context(loss=Objective(PolicyGradient())))
        trainer.setup()
        generator = torch.Generator().manual_seed(0)
        lengths = torch.tensor([PROMPT + answer for answer in ANSWERS] * GROUPS)
        count, total = len(lengths), int(lengths.sum())
        rows = []
        for _ in range(GROUPS):
            prompt, *answers = (
                torch.randint(3, SHAPE["vocab_size"], (length,), generator=generator, dtype=torch.int32)
                for length in (PROMPT, *ANSWERS)
            )
            rows += [torch.cat([prompt, answer]) for answer in answers]
        batch = Batch(
            lengths,
            {
                "tokens": torch.cat(rows),
                "loss_mask": torch.cat([torch.arange(len(row)) >= PROMPT for row in rows]),
                "advantages": torch.randn(total, generator=generator),
                "rollout_logprobs": torch.full((total,), -9.7),
            },
            {
                "group": torch.arange(GROUPS).repeat_interleave(len(ANSWERS)),
                "prompt_length": torch.full((count,), PROMPT),
            },
        )
        return self._time(lambda: trainer.train_step(batch))

    def _decode_seconds(self, folder: Path, layers: int, sequences: int) -> float:
        import torch
        from transformers import AutoModelForCausalLM, Qwen2Config

        from coalign.backends.engines.native.native_engine import NativeEngine
        from coalign.backends.engines.native.native_model import NativeModel
        from coalign.backends.engines.request import Request
        from coalign.backends.engines.session_driver import generate_responses
        from coalign.config.schema import SamplingConfig

        config = Qwen2Config(**SHAPE, num_hidden_layers=layers, eos_token_id=None, bos_token_id=None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(self.device).eval()
        engine = NativeEngine(
            NativeModel(model.config, dtype=model.dtype, device=self.device.type), seed=0, max_sequences=sequences,
            kv_tokens=None, prefill_tokens=4096, end_tokens=[], decoder=lambda stops: str,
        )  # fmt: skip
        engine.load_weights(model.named_parameters(), version=0, adopt=True)
        prompts = [list(range(3, 3 + PROMPT)) for _ in range(sequences // 8)]

        def generate(tokens: int) -> object:
            requests = [Request(prompt, index, 8) for index, prompt in enumerate(prompts)]
            return generate_responses(engine, requests, SamplingConfig(max_new_tokens=tokens))

        with torch.inference_mode():
            long, short = (self._time(lambda tokens=tokens: generate(tokens)) for tokens in (DECODED, DECODED // 4))
        return (long - short) / (DECODED - DECODED // 4)


def save_shape(folder: Path, layers: int) -> None:
    """Write the config.json of the small model."""
    from transformers import Qwen2Config

    Qwen2Config(**SHAPE, num_hidden_layers=layers).save_pretrained(folder)


def solve_tile(large: float, thin: float) -> float:
    """Return the tile (coalign_plan.training.fill_tiles) that explains the rates of products of both shapes."""
    few, many = 3 / 1536, 1 / 1024 + 2 / 384
    ratio = large / thin
    return min(200.0, max(0.0, (ratio - 1) / (many - ratio * few))) if many > ratio * few else 200.0


def calibrate_training(gpu: Gpu, constants: Constants, folder: Path, precision: str, seconds: float) -> Gpu:
    """Return the device with the rate of this precision at which the predicted training step takes ``seconds``."""
    save_shape(folder, LAYERS)
    work = ModelWork(
        "trainer", "trainer", read_directory(folder), Parallelism(), precision=precision, micro_batch_tokens=16384,
        recomputes_head=True,
    )  # fmt: skip
    batch = describe_batch()
    low, high = 1e-3, 1e3
    field = "fp32_tflops" if precision == "fp32" else "bf16_tflops"
    for _ in range(60):
        middle = math.sqrt(low * high)
        trial = replace(gpu, **{field: getattr(gpu, field) * middle})
        predicted = TrainingModel(work, ClusterSpec(1, 1, trial, 1.0), _keep_attention(constants, gpu, trial))
        low, high = (middle, high) if predicted.train(batch).seconds > seconds else (low, middle)
    return replace(gpu, **{field: getattr(gpu, field) * math.sqrt(low * high)})


def describe_batch() -> TokenBatch:
    """Return the training batch as the planner sees it: a group's prompt is computed once."""
    trained = GROUPS * sum(ANSWERS)
    computed = GROUPS * PROMPT + trained
    lengths = [PROMPT + answer for answer in ANSWERS]
    return replace(TokenBatch.from_lengths(lengths, 1.0, trained / computed), tokens=computed)


def _keep_attention(constants: Constants, measured: Gpu, trial: Gpu) -> Constants:
    """Return constants at which attention, a share of the bf16 rate, stays as fast as it was measured."""
    return replace(constants, attention=constants.attention * measured.bf16_tflops / trial.bf16_tflops)


def calibrate_decoding(
    gpu: Gpu, constants: Constants, folder: Path, milliseconds: dict[tuple[int, int], float]
) -> Constants:
    """Return constants at which decode steps take what was measured for (layers, sequences)."""
    bare = replace(constants, layer=0.0, decode_step=0.0, sequence=0.0)
    rest = {}
    for (layers, sequences), measured in milliseconds.items():
        save_shape(folder, layers)
        work = ModelWork("policy", "rollout", read_directory(folder), Parallelism(), precision="fp32", weight_bytes=4.0,
                         kv_bytes=4.0)  # fmt: skip
        replica = EngineReplica(work, ClusterSpec(1, 1, gpu, 1.0), bare)
        rest[layers, sequences] = max(0.0, measured / 1e3 - replica.decode_seconds(sequences, PROMPT + DECODED / 2))
    few, many, shallow = rest[LAYERS, 8], rest[LAYERS, 64], rest[LAYERS // 2, 64]
    sequence = max(0.0, (many - few) / 56)
    layer = max(0.0, (many - shallow) / (LAYERS - LAYERS // 2))
    fixed = few - 8 * sequence
    layer = min(layer, max(0.0, fixed) / LAYERS)
    return replace(constants, sequence=sequence, layer=layer, decode_step=max(0.0, fixed - LAYERS * layer))


def measure_collective(device: str) -> float:
    """Return the bytes per second of an all-reduce between two processes (each sends and receives its data once)."""
    import torch
    from torch.multiprocessing.spawn import spawn

    if device != "cpu" and torch.accelerator.device_count() < 2:
        return GPUS["L40S"].link_gb_s * 1e9
    with tempfile.TemporaryDirectory() as folder:
        spawn(_reduce, (device, folder), nprocs=2)
        return float(Path(folder, "rate").read_text(encoding="utf-8"))


def _reduce(rank: int, device: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    backend = {"cpu": "gloo", "cuda": "nccl"}.get(device, "gloo")
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    data = torch.ones(2**24, device=device if device == "cpu" else f"{device}:{rank}")  # 64 MiB
    seconds = []
    for _ in range(5):
        dist.barrier()
        started_at = time.perf_counter()
        dist.all_reduce(data)
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started_at)
    if rank == 0:
        Path(folder, "rate").write_text(str(data.nbytes / statistics.median(seconds)), encoding="utf-8")
    dist.destroy_process_group()
