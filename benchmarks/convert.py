"""Conversion against copying: a model of Qwen2-0.5B's shapes with random weights, to `torch_dist` and back.

    python benchmarks/convert.py [--folder DIR] [--processes N] [--rounds N]

A copy is `cp` and `fsync` of the same file in the same folder, the faster one of before and after. Memory is the peak
of anonymous memory (RssAnon) of the converting process and its children, above what it has after imports; mapped files
are not in it, since the kernel takes their pages back whenever it needs them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from coalign_megatron import families
from coalign_megatron.convert import ConversionRequest, convert
from coalign_megatron.convert.files import write_atomically
from coalign_megatron.convert.huggingface import FileTensor, write_safetensors

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def make(folder: Path) -> None:
    """The model, 0.99 GB of bfloat16."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    family = families.find_family(CONFIG)
    entries = [FileTensor(name, s.stored, torch.bfloat16) for name, s in family.sources(family.config(CONFIG)).items()]
    with write_atomically(folder / "model.safetensors") as file:
        write_safetensors(file, entries, (torch.randn(entry.shape).bfloat16() for entry in entries))


def copied(file: Path, target: Path) -> float:
    """Seconds."""
    begun = time.perf_counter()
    shutil.copyfile(file, target)
    with open(target, "rb") as out:
        os.fsync(out.fileno())
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


class Memory:
    """The peak of anonymous memory of this process and its children, in bytes, above that at the start."""

    def __init__(self) -> None:
        self._base = self._now()

    def __enter__(self) -> Memory:
        self.peak = self._now()
        self._going = True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._going = False
        self._thread.join()
        self.peak -= self._base

    def _watch(self) -> None:
        while self._going:
            self.peak = max(self.peak, self._now())
            time.sleep(0.01)

    def _now(self) -> int:
        found = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                continue
            found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
        return found


def measured(request: ConversionRequest, size: int, copied: Callable[[], float], memory: Memory) -> None:
    """Against copies before and after, the faster one."""
    copy = copied()
    with memory:
        begun = time.perf_counter()
        convert(request)
        seconds = time.perf_counter() - begun
    copy = min(copy, copied())
    print(
        f"to {request.to}: {seconds:.2f} s, {size / seconds / 1e6:.0f} MB/s; a copy {copy:.2f} s, so "
        f"{copy / seconds:.0%} of its speed; {memory.peak / 1e6:.0f} MB of memory, {memory.peak / size:.0%} of "
        f"the model; load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as home:
        base = Path(home)
        memory, source = Memory(), base / "hf"
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(source,))  # its memory is not ours
        maker.start()
        maker.join()
        file = source / "model.safetensors"
        size = file.stat().st_size
        print(f"{size / 1e6:.0f} MB, {options.processes} processes")
        for round in range(options.rounds):
            there, back = base / f"megatron{round}", base / f"back{round}"
            more = {"processes": options.processes}
            for request in (
                ConversionRequest(source=source, output=there, to="megatron", **more),
                ConversionRequest(source=there, output=back, to="hf", **more),
            ):
                measured(request, size, lambda: copied(file, base / "copy"), memory)
            if subprocess.run(["cmp", file, back / "model.safetensors"]).returncode:
                sys.exit("the file that came back is another")
            shutil.rmtree(there)
            shutil.rmtree(back)


if __name__ == "__main__":
    main()
