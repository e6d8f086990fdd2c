"""Decoding beside other work: OpenMP's default spinning in turns with Coalign's, on an idle and on a busy machine.

    python benchmarks/spinning.py MODEL [--loads 0 2 4 8] [--tokens 40] [--rounds 2]

Each measurement is a process of its own, because OpenMP reads its environment once. It decodes one sequence with a
thread for each processor, while other processes (the load) compute without a pause.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import time

DEFAULT = {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None}  # None: not set
SETTINGS = {"default": DEFAULT | {"GOMP_SPINCOUNT": "300000"}, "coalign": DEFAULT}


def decode(model: str, tokens: int) -> None:
    """Print the seconds, and those of all processors, that decoding takes after a first call."""
    import coalign

    def run(count: int) -> tuple[float, float]:
        begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        coalign.generate(model, "Tell a story of the sea.", max_new_tokens=count, temperature=0.0, dtype="float32")
        after = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter() - begun, after.ru_utime - used.ru_utime + after.ru_stime - used.ru_stime

    run(1)
    loading, computing = run(1)
    seconds, processor = run(tokens)
    print(f"{seconds - loading:.2f} {processor - computing:.2f}")


def measure(model: str, tokens: int, setting: dict[str, str | None]) -> tuple[float, float]:
    """Decode in a process with these environment variables; return seconds, and seconds of processors."""
    environment = {name: text for name, text in os.environ.items() if name not in setting and name != "OMP_NUM_THREADS"}
    environment |= {name: text for name, text in setting.items() if text is not None}
    done = subprocess.run(
        [sys.executable, __file__, model, "--tokens", str(tokens), "--child"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, processor = done.stdout.split()[-2:]
    return float(seconds), float(processor)


def compute_forever() -> None:
    number = 0
    while True:
        number = (number * 31 + 7) % 1_000_003


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--loads", type=int, nargs="*", default=[0, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", action="store_true")
    asked = parser.parse_args()
    if asked.child:
        return decode(asked.model, asked.tokens)
    print(f"{asked.tokens} tokens, {len(os.sched_getaffinity(0))} processors; best of {asked.rounds}, in turns")
    for load in asked.loads:
        busy = [multiprocessing.Process(target=compute_forever, daemon=True) for _ in range(load)]
        for process in busy:
            process.start()
        rounds = [
            {name: measure(asked.model, asked.tokens, s) for name, s in SETTINGS.items()} for _ in range(asked.rounds)
        ]
        for process in busy:
            process.kill()
        best = {name: min(one[name] for one in rounds) for name in SETTINGS}
        told = "; ".join(f"{name} {seconds:.1f} s ({used:.1f} of processors)" for name, (seconds, used) in best.items())
        print(f"load {load}: {told}; ratio {best['default'][0] / best['coalign'][0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
