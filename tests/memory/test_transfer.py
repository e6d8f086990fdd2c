"""Host buffers are cut from large blocks."""

import torch

from coalign import memory


def test_room_is_cut_from_few_blocks(monkeypatch):
    monkeypatch.setattr(memory, "BLOCK", 1024)
    space = memory._allocate_host([100, 64, 700, 5000, 1], pinned=False)
    assert [len(piece) for piece in space] == [100, 64, 700, 5000, 1]
    assert len({piece.untyped_storage().data_ptr() for piece in space}) == 3  # 128 + 64 + 704 | 5000 | 1
    assert all(piece.storage_offset() % memory.ALIGNMENT == 0 for piece in space)
    assert memory._allocate_host([], pinned=False) == []


def test_pieces_do_not_overlap():
    space = memory._allocate_host([3, 5, 7], pinned=False)
    for value, piece in enumerate(space):
        piece.fill_(value)
    assert [piece.tolist() for piece in space] == [[0] * 3, [1] * 5, [2] * 7]


def test_raw_shows_all_bytes_of_a_storage():
    tensor = torch.arange(4, dtype=torch.int32)[1:2]
    raw = memory._view_bytes(tensor.untyped_storage())
    assert raw.view(torch.int32).tolist() == [0, 1, 2, 3]
    raw.view(torch.int32)[1] = 9
    assert tensor.tolist() == [9]
