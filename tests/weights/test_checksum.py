"""What checksums look at: everything, or of every block a share that is another one each turn."""

from __future__ import annotations

import pytest
import torch

from coalign.weights.sync.checksums import (
    BLOCK,
    PIECE,
    SHARES,
    _checksum_blocks,
    _select_pieces,
    checksum,
    checksum_tensors,
    copy_tensors,
)
from coalign_cpu import operations


@pytest.mark.parametrize("size", [1, PIECE, PIECE + 1, 3 * PIECE - 7, SHARES * PIECE, BLOCK - 1, BLOCK])
def test_the_turns_see_every_byte_and_none_sees_nothing(size):
    seen = torch.zeros(size, dtype=torch.int32)
    for turn in range(5, 5 + SHARES):
        looked_at = sum(stop - start for start, stop in _select_pieces(size, turn))
        assert 0 < looked_at <= max(size / SHARES, PIECE) + PIECE
        for start, stop in _select_pieces(size, turn):
            seen[start:stop] += 1
    assert seen.min() > 0
    assert list(_select_pieces(size, None)) == [(0, size)]


@pytest.mark.parametrize("turn", [None, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_was_copied_adds_up_on_the_other_side(turn, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sizes = [0, 5, PIECE + 1, BLOCK + 3 * PIECE]
        given = {f"t{size}": torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes}
        taken = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
        written = dict(copy_tensors(((name, given[name], taken[name]) for name in given), turn))
        assert dict(checksum_tensors(taken.items(), turn)) == written
        assert all(torch.equal(taken[name], given[name]) for name in given)
        if turn is None:
            assert written == {name: checksum(tensor.numpy()) for name, tensor in given.items()}
    finally:
        torch.set_num_threads(before)


def test_a_damaged_byte_shows_in_one_turn_and_bytes_out_of_place_in_every_one():
    block = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8)
    damaged = block.clone()
    damaged[9 * PIECE + 17] ^= 1
    differs = lambda other, turn: _checksum_blocks([block], turn) != _checksum_blocks([other], turn)  # noqa: E731
    differ = [differs(damaged, turn) for turn in range(SHARES)]
    assert differ == [turn == 9 % SHARES for turn in range(SHARES)]
    shifted = block.roll(64)
    assert all(differs(shifted, turn) for turn in range(SHARES))


@pytest.fixture
def without_kernels(monkeypatch):
    """Computes as on a machine without a compiler."""
    return lambda: monkeypatch.setattr(operations, "has_copy_kernel", lambda *tensors: False)


@pytest.mark.parametrize("turn", [None, 0, 3])
@pytest.mark.parametrize("size", [0, 3, PIECE - 1, 3 * PIECE + 12, BLOCK, 2 * BLOCK + 4 * PIECE + 1])
def test_machines_without_a_compiler_copy_and_compute_the_same(without_kernels, size, turn):
    """Readers on another machine verify with theirs."""
    given, taken = torch.randint(0, 256, (size + 5,), dtype=torch.uint8), torch.zeros(2, size + 9, dtype=torch.uint8)
    copy = lambda into: list(copy_tensors([("x", given[5:], into[7 : size + 7])], turn))  # noqa: E731
    whole = checksum(given.numpy())
    sums = copy(taken[0])
    without_kernels()
    assert copy(taken[1]) == sums
    assert checksum(given.numpy()) == whole
    assert torch.equal(taken[0, 7 : size + 7], given[5:]) and torch.equal(taken[0], taken[1])  # and nothing beside it
