"""Packing into buckets and back, and what a checksum sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coalign.weights.sync.checksums import STEP, _sum_device_words, checksum, tensor_bytes
from coalign.weights.sync.segment import pack
from coalign.weights.sync.stored import _PackedTensor
from coalign.weights.sync.transport import WeightError


def weights():
    generator = torch.Generator().manual_seed(0)
    yield "a", torch.randn(5, 3, generator=generator)
    yield "b", torch.randn(7, generator=generator).to(torch.bfloat16)
    yield "scalar", torch.tensor(3.5, dtype=torch.float64)
    yield "flags", torch.tensor([True, False, True])
    yield "transposed", torch.arange(6.0).view(2, 3).t()
    yield "empty", torch.zeros(0, 4)


@pytest.mark.parametrize("size", [1, 64, 100, 10**6])
def test_round_trip_for_any_bucket_size(size):
    back = [_PackedTensor.of(entry.name, tensor) for bucket in pack(weights(), size) for entry, tensor in bucket]
    assert [packed.name for packed in back] == [name for name, _ in weights()]
    for (_, sent), packed in zip(weights(), back, strict=True):
        packed.verify()
        got = packed.tensor()
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)


def test_buckets_are_filled_and_a_large_tensor_has_its_own():
    items = [(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate([64, 64, 64, 300, 64])]
    names = [[entry.name for entry, _ in bucket] for bucket in pack(items, 128)]
    assert names == [["0", "1"], ["2"], ["3"], ["4"]]


def test_a_tensor_that_arrived_damaged_is_named():
    packed = _PackedTensor.of("b", dict(weights())["b"])
    data = packed.data.copy()
    data[3] ^= 1
    with pytest.raises(WeightError, match="weight 'b' arrived damaged"):
        replace(packed, data=data).verify()


def test_read_only_data_raises_no_warning(recwarn):
    packed = _PackedTensor.of("a", dict(weights())["a"])
    data = packed.data.copy()
    data.flags.writeable = False
    assert replace(packed, data=data).tensor().shape == (5, 3)
    assert not recwarn.list


def test_bytes_of_a_contiguous_tensor_are_a_view():
    tensor = torch.zeros(4, 4)
    tensor_bytes(tensor)[0] = 1
    assert tensor.view(torch.uint8).flatten()[0] == 1
    assert np.array_equal(tensor_bytes(tensor.t()), tensor_bytes(tensor.t().contiguous()))


def test_a_checksum_sees_every_bit_every_swap_and_is_the_same_on_every_device():
    block = torch.randint(0, 256, (64 + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = checksum(block.numpy())
    assert found == _sum_device_words(block)
    for byte in range(len(block)):
        other = block.clone()
        other[byte] ^= 1 << (byte % 8)
        assert checksum(other.numpy()) != found
    swapped = torch.cat([block[8:16], block[:8], block[16:]])
    assert checksum(swapped.numpy()) != found
    assert checksum(torch.cat([block, torch.zeros(1, dtype=torch.uint8)]).numpy()) != found


def test_a_checksum_by_hand():
    data = np.array([7, 0, 0, 0, 0, 0, 0, 0, 2, 1], dtype=np.uint8)  # the words 7 and 2 + 256
    assert checksum(data) == (7 * 1 + 258 * (STEP + 1) + 10) % 2**64
