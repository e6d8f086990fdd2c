"""What filled the memory is written where somebody finds it."""

from __future__ import annotations

import pytest
import torch

from coalign.cluster.future import WorkerError
from coalign.cluster.memory_report import list_largest_tensors, write_memory_report
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from tests.cluster.threads import thread_cluster

CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to …")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), CPU], ids=repr)
def test_every_kind_of_memory_that_is_missing_gets_a_table(tmp_path, error):
    added = write_memory_report(error, tmp_path / "out_of_memory", "trainer_rank1")
    table = tmp_path / "out_of_memory" / "trainer_rank1.txt"
    assert added == f"\nthe largest tensors are listed in {table}" and " MiB in " in table.read_text()


def test_other_errors_write_nothing(tmp_path):
    assert write_memory_report(ValueError("no memory of it"), tmp_path / "folder", "trainer_rank1") == ""
    assert not (tmp_path / "folder").exists()


def test_a_disk_that_is_full_hides_no_error(tmp_path):
    (tmp_path / "folder").write_text("a file is in the way")
    assert "could not be written: [Errno" in write_memory_report(MemoryError(), tmp_path / "folder", "trainer_rank1")


def test_the_largest_come_first_and_views_count_once():
    large = torch.nn.Parameter(torch.zeros(9, 1024, 1024, dtype=torch.bfloat16))
    views = [large[i] for i in range(9)]
    lines = list_largest_tensors().splitlines()
    mine = [line.split(maxsplit=2) for line in lines if "[9, 1024, 1024]" in line]
    assert [line[:2] for line in mine] == [["18.0", "bfloat16"]] and "cpu parameter" in mine[0][2]
    assert not any("[1024, 1024]" in line and "bfloat16" in line for line in lines) and len(views) == 9
    sizes = [float(line.split()[0]) for line in lines[1:]]
    assert sizes == sorted(sizes, reverse=True)


def test_the_error_of_a_call_says_where_the_table_is(tmp_path):
    with thread_cluster({}) as cluster:
        config = ModelConfig(module="tests.cluster.modules:SumModule")
        judge = cluster.spawn("judge", config, Context(model="judge", threads=1, output=str(tmp_path)))
        with pytest.raises(WorkerError, match=r"judge_replica0\.txt") as caught:
            judge.run(_fills_memory).result()
    assert str(caught.value).startswith("judge._fills_memory failed in judge, replica 0: RuntimeError: [enforce fail")
    assert (tmp_path / "out_of_memory" / "judge_replica0.txt").exists()


def _fills_memory(module, store):
    return torch.zeros(2**50)
