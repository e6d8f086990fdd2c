"""Conversion against copying: a model of Qwen2-0.5B's shapes with random weights, to `torch_dist` and back.

    python benchmarks/convert.py [--folder DIR] [--processes N]

A copy is `cp` and `fsync` of the same file in the same folder, before and after. Memory is the peak of anonymous
memory (RssAnon) of the converting process and its children, above what it has after imports; mapped files are not in
it, since the kernel takes their pages back whenever it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

from coalign.weights import families
from coalign.weights.convert import Request, convert
from coalign.weights.convert.files import writing
from coalign.weights.convert.huggingface import Entry, write

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


def make(folder: Path) -> Path:
    """The model, 0.99 GB of bfloat16."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    family = families.of(CONFIG)
    entries = [Entry(name, s.stored, torch.bfloat16) for name, s in family.sources(family.config(CONFIG)).items()]
    with writing(folder / "model.safetensors") as file:
        write(file, entries, (torch.randn(entry.shape).bfloat16() for entry in entries))
    return folder


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

    def __enter__(self) -> Memory:
        self._base = self.peak = self._now()
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


def measured(request: Request, size: int, copy: float) -> None:
    with Memory() as memory:
        begun = time.perf_counter()
        convert(request)
        seconds = time.perf_counter() - begun
    print(
        f"to {request.to}: {seconds:.2f} s, {size / seconds / 1e6:.0f} MB/s, {copy / seconds:.0%} of a copy's speed; "
        f"{memory.peak / 1e6:.0f} MB of memory, {memory.peak / size:.0%} of the model"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as home:
        base = Path(home)
        source = make(base / "hf")
        file = source / "model.safetensors"
        size = file.stat().st_size
        copy = min(copied(file, base / "copy") for _ in range(2))
        print(f"{size / 1e6:.0f} MB; a copy: {copy:.2f} s, {size / copy / 1e6:.0f} MB/s; load {os.getloadavg()[0]:.1f}")
        more = {"processes": options.processes}
        measured(Request(source=source, output=base / "megatron", to="megatron", **more), size, copy)
        measured(Request(source=base / "megatron", output=base / "back", to="hf", **more), size, copy)
        same = subprocess.run(["cmp", file, base / "back" / "model.safetensors"]).returncode == 0
        came = "the same" if same else "ANOTHER"
        print(f"a copy: {copied(file, base / 'copy'):.2f} s; the file that came back is {came}")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
