"""What is on the device, what is on the host, and that nothing of it changes on the way."""

import pytest
import torch

from coalign import memory as arena_module
from coalign.memory import Arena, OutOfDeviceMemory

KIB = 256  # floats


def filled(*sizes: int, start: int = 0) -> list[torch.Tensor]:
    return [torch.arange(size, dtype=torch.float32) + start + i for i, size in enumerate(sizes)]


@pytest.fixture
def arena() -> Arena:
    return Arena("cpu")


def test_bytes_are_counted_by_model_and_part(arena):
    arena.settle("trainer", "weights", filled(KIB, 2 * KIB))
    arena.settle("trainer", "optimizer", filled(4 * KIB))
    arena.settle("policy", "weights", filled(KIB))
    assert arena.list_resident("trainer") == {"weights": 3 * 1024, "optimizer": 4 * 1024}
    assert arena.list_resident("policy") == {"weights": 1024}
    assert arena.used == arena.peak == 8 * 1024


def test_a_part_comes_back_bit_for_bit_under_every_view(arena):
    weight, bias = filled(KIB, 3)
    weight[7] = float("nan")
    views = [weight.view(16, 16), weight[5:9]]
    before = [t.clone() for t in (weight, bias, *views)]
    arena.settle("trainer", "weights", [weight, bias])
    for _ in range(2):
        assert arena.offload("trainer", ["weights"]) == 1024 + 12
        assert weight.untyped_storage().nbytes() == 0  # the memory is gone, not only the account
        assert (
            arena.used == 0
            and arena.list_resident("trainer") == {}
            and arena.list_offloaded("trainer") == {"weights": 1036}
        )
        assert arena.reload("trainer", ["weights"]) == 1024 + 12
        for now, then in zip((weight, bias, *views), before, strict=True):
            assert torch.equal(now.view(torch.int32), then.view(torch.int32))
    assert arena.used == 1036


def test_what_changed_on_the_device_is_what_comes_back(arena):
    (weight,) = filled(KIB)
    arena.settle("trainer", "weights", [weight])
    for value in (1.0, 2.0):
        arena.offload("trainer", ["weights"])
        arena.reload("trainer", ["weights"])
        weight.fill_(value)
    arena.offload("trainer", ["weights"])
    arena.reload("trainer", ["weights"])
    assert torch.equal(weight, torch.full((KIB,), 2.0))


def test_constant_parts_are_copied_to_the_host_once(arena):
    (weight,) = filled(KIB)
    arena.settle("reference", "weights", [weight])
    arena.offload("reference", ["weights"], constant=["weights"])
    arena.reload("reference", ["weights"])
    weight.zero_()  # which nobody does to a constant: it shows that the second leave copied nothing
    arena.offload("reference", ["weights"], constant=["weights"])
    arena.reload("reference", ["weights"])
    assert torch.equal(weight, filled(KIB)[0])


def test_dtypes_empty_tensors_and_tied_ones(arena):
    half, whole = torch.ones(5, dtype=torch.bfloat16), torch.arange(3)
    tied = half[:]
    arena.settle("m", "weights", [half, tied, whole, torch.empty(0)])
    assert arena.list_resident("m") == {"weights": 10 + 24}
    arena.offload("m", ["weights"])
    arena.reload("m", ["weights"])
    assert torch.equal(tied, torch.ones(5, dtype=torch.bfloat16)) and whole.tolist() == [0, 1, 2]


def test_a_mapped_file_becomes_memory_that_can_be_freed(arena):
    mapped = torch.frombuffer(bytearray(range(16)), dtype=torch.uint8)
    parameter = torch.nn.Parameter(mapped.view(torch.float32)[1:3], requires_grad=True)
    before = parameter.detach().clone()
    arena.settle("m", "weights", [parameter])
    arena.offload("m", ["weights"])
    assert parameter.untyped_storage().nbytes() == 0
    arena.reload("m", ["weights"])
    assert torch.equal(parameter.detach(), before) and parameter.requires_grad


def test_shared_storages_are_counted_once_and_stay_for_whoever_is_there(arena):
    shared, own = filled(KIB, KIB)
    arena.settle("trainer", "weights", [shared])
    arena.settle("policy", "weights", [shared[:10], own])
    assert (arena.list_resident("trainer"), arena.list_resident("policy")) == ({"weights": 1024}, {"weights": 1024})
    assert arena.offload("trainer", ["weights"]) == 0
    assert shared[3] == 3.0 and arena.list_resident("policy") == {"weights": 2048}
    assert arena.list_offloaded("trainer") == {"weights": 0}
    assert arena.offload("policy", ["weights"]) == 2048
    assert arena.reload("trainer", ["weights"]) == 1024
    assert arena.list_offloaded("policy") == {"weights": 1024} and shared[3] == 3.0


def test_parts_that_share_leave_together(arena):
    (shared,) = filled(KIB)
    arena.settle("m", "weights", [shared])
    arena.settle("m", "optimizer", [shared[1:]])
    assert arena.offload("m", ["weights", "optimizer"]) == 1024
    assert arena.reload("m", ["optimizer"]) == 1024 and arena.reload("m", ["weights"]) == 0


def test_what_is_no_longer_listed_is_forgotten(arena):
    old, new = filled(KIB, 2 * KIB)
    arena.settle("policy", "weights", [old])
    arena.settle("policy", "weights", [new])
    assert arena.used == 2048 and arena.list_resident("policy") == {"weights": 2048}
    arena.offload("policy", ["weights"])
    assert float(old.sum()) == sum(range(KIB))  # it is not the arena's any more
    arena.settle("policy", "weights", [])
    assert arena.used == 0 and arena.list_offloaded("policy") == {"weights": 0}


def test_the_limit_refuses_with_a_table_and_before_anything_moves():
    arena = Arena("cpu", limit=5 * 1024)
    arena.settle("trainer", "weights", filled(KIB))
    arena.settle("trainer", "optimizer", filled(2 * KIB))
    arena.offload("trainer", ["weights", "optimizer"])
    arena.settle("reference", "weights", filled(3 * KIB))
    with pytest.raises(OutOfDeviceMemory) as error:
        arena.reload("trainer", ["weights", "optimizer"])
    text = str(error.value)
    assert "the weights and optimizer of 'trainer'" in text and "runtime.device_memory" in text
    assert "0.00 MiB  reference: weights" in text
    assert arena.list_resident("trainer") == {} and arena.used == 3 * 1024
    assert arena.reload("trainer", ["weights"]) == 1024  # some of it has room


def test_a_model_that_does_not_fit_is_refused_when_it_is_loaded():
    arena = Arena("cpu", limit=2000)
    arena.settle("policy", "weights", filled(KIB))
    with pytest.raises(OutOfDeviceMemory, match="with the weights of 'trainer'"):
        arena.settle("trainer", "weights", filled(KIB))


def test_reservations_count_and_are_given_back():
    arena = Arena("cpu", limit=3000)
    arena.settle("trainer", "weights", filled(KIB))
    assert arena.begin() == 1024
    arena.reserve("trainer", "gradients", 1500)
    arena.reserve("trainer", "gradients", 1024)
    assert arena.list_resident("trainer") == {"weights": 1024, "gradients": 1024}
    with pytest.raises(OutOfDeviceMemory, match="gradients of 'trainer'"):
        arena.reserve("trainer", "gradients", 2000)
    assert arena.used == 2048
    arena.reserve("trainer", "gradients", 0)
    assert (arena.used, arena.peak, arena.list_resident("trainer")) == (1024, 2524, {"weights": 1024})


def test_computing_with_what_is_away_is_refused(arena):
    arena.settle("trainer", "weights", filled(KIB))
    arena.require("trainer", ["weights", "optimizer"], "trainer.train_step")
    arena.offload("trainer", ["weights"])
    with pytest.raises(RuntimeError, match=r"trainer\.train_step needs weights of 'trainer' on the device"):
        arena.require("trainer", ["weights", "optimizer"], "trainer.train_step")


def test_moving_what_is_not_there_or_has_moved_does_nothing(arena):
    arena.settle("trainer", "weights", filled(KIB))
    assert arena.offload("trainer", ["kv", "gradients"]) == 0 and arena.reload("trainer", ["weights", "kv"]) == 0
    arena.offload("trainer", ["weights"])
    assert arena.offload("trainer", ["weights"]) == 0


def test_an_error_while_leaving_loses_nothing(arena, monkeypatch):
    tensors = filled(KIB, KIB)
    arena.settle("trainer", "weights", tensors)
    seen = []

    def failing(storage):
        seen.append(storage)
        if len(seen) == 2:
            raise OSError("the bus is gone")
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "_view_bytes", failing)
        with pytest.raises(OSError, match="the bus is gone"):
            arena.offload("trainer", ["weights"])
    assert arena.list_resident("trainer") == {"weights": 2048}
    assert all(torch.equal(now, then) for now, then in zip(tensors, filled(KIB, KIB), strict=True))
    arena.offload("trainer", ["weights"])
    seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "_view_bytes", failing)
        with pytest.raises(OSError, match="the bus is gone"):
            arena.reload("trainer", ["weights"])
    assert arena.list_offloaded("trainer")["weights"] > 0  # refused to calls, and another try goes on
    arena.reload("trainer", ["weights"])
    assert all(torch.equal(now, then) for now, then in zip(tensors, filled(KIB, KIB), strict=True))
    assert arena.used == 2048
