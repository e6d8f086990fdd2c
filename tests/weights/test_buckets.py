"""Packing into buckets and back, and what a checksum sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coalign.weights.buckets import Bucket, WeightError, pack
from coalign.weights.checksum import checksum, tensor_bytes


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
    buckets = list(pack(weights(), size))
    for bucket in buckets:
        bucket.verify()
    back = [item for bucket in buckets for item in bucket.tensors()]
    assert [name for name, _ in back] == [name for name, _ in weights()]
    for (_, sent), (_, got) in zip(weights(), back, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)


def test_buckets_are_filled_and_a_large_tensor_has_its_own():
    items = [(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate([64, 64, 64, 300, 64])]
    names = [[entry.name for entry in bucket.entries] for bucket in pack(items, 128)]
    assert names == [["0", "1"], ["2"], ["3"], ["4"]]


def test_any_flipped_bit_is_seen_and_the_tensor_named():
    [bucket] = pack(weights())
    entry = bucket.entries[1]
    for byte in range(entry.start, entry.stop):
        data = bucket.data.copy()
        data[byte] ^= 1 << (byte % 8)
        with pytest.raises(WeightError, match="weight 'b' arrived damaged"):
            Bucket(data, bucket.entries).verify()


def test_swapped_words_are_seen():
    data = tensor_bytes(torch.tensor([1.0, 2.0, 3.0]))
    swapped = tensor_bytes(torch.tensor([2.0, 1.0, 3.0]))
    assert checksum(data) != checksum(swapped)


def test_read_only_data_raises_no_warning(recwarn):
    [bucket] = pack(weights())
    data = bucket.data.copy()
    data.flags.writeable = False
    assert dict(Bucket(data, bucket.entries).tensors())["a"].shape == (5, 3)
    assert not recwarn.list


def test_bytes_of_a_contiguous_tensor_are_a_view():
    tensor = torch.zeros(4, 4)
    tensor_bytes(tensor)[0] = 1
    assert tensor.view(torch.uint8).flatten()[0] == 1
    assert np.array_equal(tensor_bytes(tensor.t()), tensor_bytes(tensor.t().contiguous()))
