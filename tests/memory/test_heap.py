"""Free pages of the heap go back to the system when memory is short."""

import subprocess
import sys

CODE = """
import psutil, sys, torch
from coalign import memory

def resident():
    return psutil.Process().memory_info().rss / 2**20

made = [torch.ones(2**15) for _ in range(2000)]  # 128 KiB each, in the heap
kept = made[::8]
del made
before = resident()
memory.measure_free_memory = lambda: 2**60
memory.release_free_heap()
untouched = resident()
memory.measure_free_memory = lambda: 0
memory.release_free_heap()
print(before - untouched, untouched - resident())
assert all((tensor == 1).all() for tensor in kept)
"""


def test_free_pages_go_back_when_memory_is_short():
    command = [sys.executable, "-c", CODE]
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40), "PATH": ""}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    untouched, released = map(float, said.split())
    assert abs(untouched) < 10 and released > 150
