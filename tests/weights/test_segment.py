"""Shared memory without a name: seen by others, read only, gone with its last process, and never more than there is."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal

import pytest
import torch

from coalign import memory
from coalign.weights.sync.segment import (
    HostMemoryFull,
    JournalState,
    SharedMemorySegment,
    SyncJournal,
    TensorEntry,
    align,
)
from coalign.weights.sync.transport import WeightError

FORK = multiprocessing.get_context("fork")


def in_another_process(function, *arguments):
    process = FORK.Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


MATRIX = TensorEntry("matrix", torch.float32, (2, 2), align(24))


def read(address):
    assert MATRIX.tensor(SharedMemorySegment.open(address).bytes).tolist() == [[1, 2], [3, 4]]


def write(address):
    faulthandler.disable()
    SharedMemorySegment.open(address).bytes[0] = 1


def test_another_process_reads_and_cannot_write():
    own = SharedMemorySegment.create(4096)
    MATRIX.tensor(own.bytes).copy_(torch.tensor([[1.0, 2], [3, 4]]))
    assert in_another_process(read, own.address) == 0
    assert in_another_process(write, own.address) == -signal.SIGSEGV
    assert own.bytes[0] == 0


def test_it_is_no_file_and_ends_with_its_process():
    before = set(os.listdir("/dev/shm"))
    own = SharedMemorySegment.create(4096)
    assert set(os.listdir("/dev/shm")) <= before
    assert not own.is_abandoned()
    with pytest.raises(OSError):
        SharedMemorySegment.open((own.address[0], 10**6, 4096))


def test_more_than_the_container_leaves_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("10000000\n")
    (tmp_path / "memory.current").write_text("9000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\nactive_file 1000000\ninactive_file 2000000\n")
    assert memory.measure_free_memory() == 4_000_000
    with pytest.raises(HostMemoryFull, match="shared memory for weights: 5 MiB wanted, 4 MiB are free"):
        SharedMemorySegment.create(5 * 2**20)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.measure_free_memory() > 10_000_000


class Record:
    def __init__(self, name):
        self.name = name


def test_a_journal_is_followed_while_it_is_written():
    own = SyncJournal()
    own.begin(3)
    own.append(Record("a"))
    following = SyncJournal(own.address).follow(3, 5.0, "sender")
    assert next(following).name == "a"
    own.append(Record("b"))
    own.end(JournalState.COMPLETE)
    assert [record.name for record in following] == ["b"]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda journal: journal.end(JournalState.BROKEN), "sender broke off after 'a'"),
        (lambda journal: journal.begin(4), "sender broke off after 'a'"),
        (lambda journal: None, r"sender sent nothing for 0.1 s \(sync.timeout\) after 'a'"),
    ],
)
def test_a_journal_that_does_not_go_on(end, message):
    own = SyncJournal()
    own.begin(3)
    own.append(Record("a"))
    following = SyncJournal(own.address).follow(3, 0.1, "sender")
    next(following)
    end(own)
    with pytest.raises(WeightError, match=message):
        next(following)
