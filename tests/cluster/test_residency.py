"""Who leaves, who comes, and how often: decisions on stand-ins whose arithmetic is done by hand."""

from __future__ import annotations

import concurrent.futures
from collections import Counter

import pytest

from coalign.cluster.batch_ref import DeviceMemoryUse, Meta, WorkerFailure
from coalign.cluster.future import Call, CallDeadlines, Future, WorkerError, WorkerTask
from coalign.cluster.placement.slots import MOVABLE, Footprint, list_movable_parts, pack_slots
from coalign.cluster.residency import Residency
from coalign.config.schema import ModelConfig
from coalign.memory import PARTS

MIB = 2**20
TRAIN = ("weights", "gradients", "optimizer")
SIZES = {
    "policy": {"weights": 1 * MIB},
    "reference": {"weights": 1 * MIB},
    "trainer": {"weights": 1 * MIB, "optimizer": 2 * MIB},
}


class Process:
    """A worker that has parts of given sizes and moves them at once."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.name = f"{name}, rank 0"
        self.model, self.sizes = name, sizes
        self.on_device, self.on_host = dict(sizes), {}
        self.moves: list[tuple[str, tuple[str, ...]]] = []
        self.limits: list[int | None] = []
        self.failure: WorkerFailure | None = None

    def execute(self, verb, to, parts, limit):
        assert verb == "move"
        self.moves.append((to, parts))
        self.limits.append(limit)
        there, here = (self.on_device, self.on_host) if to == "host" else (self.on_host, self.on_device)
        moved = {part: there.pop(part) for part in parts if part in there}
        here |= moved
        return self.answer(Meta(value=sum(moved.values()), use=self.use(), failure=self.failure))

    def use(self, extra: int = 0) -> DeviceMemoryUse:
        before = sum(self.on_device.values())
        return DeviceMemoryUse(
            {self.model: dict(self.on_device)}, {self.model: dict(self.on_host)}, before, before + extra
        )

    def answer(self, meta: Meta) -> WorkerTask:
        done: concurrent.futures.Future[Meta] = concurrent.futures.Future()
        done.set_result(meta)
        return WorkerTask(self.name, done, None)


class Run:
    """A residency of models that share one device, and calls on them."""

    def __init__(self, capacity: int | None = None, sizes=SIZES, offload="auto") -> None:
        models = {name: ModelConfig(offload=offload) for name in sizes}
        slots = pack_slots({name: Footprint(1, 1) for name in sizes}, [list(sizes)])
        self.residency = Residency(slots, models, capacity, CallDeadlines(10.0))
        self.processes = {name: Process(name, own) for name, own in sizes.items()}
        for name in sizes:
            self.residency.add(name, slots[name], [self.processes[name]])
            self.call(name, "setup", PARTS)
        self.taken()

    def call(self, model, method, parts, *, extra=0, beside=()):
        needs = {model: parts} | {other: ("weights",) for other in beside}
        self.residency.prepare(Future(Call(model, method)), model, method, needs)
        process = self.processes[model]
        for name, wanted in needs.items():
            assert not {*wanted} & {*self.processes[name].on_host}, "computes with what is on the host"
        self.residency.record([process.answer(Meta())], [Meta(use=process.use(extra))], method)
        self.residency.release(model)

    def step(self, kv=0, gradients=0):
        """What GRPO does: the policy samples, the reference scores, the trainer learns, and the policy gets weights."""
        self.call("policy", "generate", ("weights", "kv"), extra=kv)
        self.call("reference", "forward_step", ("weights",))
        self.call("trainer", "train_step", TRAIN, extra=gradients)
        self.call("trainer", "export", ("weights",))
        self.call("policy", "install", ("weights",))

    def taken(self) -> dict[str, float]:
        """What is told of swaps and of memory, but for the time that they took."""
        told = self.residency.take_stats()
        assert told.pop("time/swaps").value >= 0.0
        return {name: metric.value for name, metric in told.items()}


def test_models_that_take_turns_move_once_each_per_step():
    run = Run()
    run.step()
    run.taken()
    for _ in range(2):
        run.step()
        assert run.taken() == {
            "swaps/policy/in": 1.0,
            "swaps/policy/out": 1.0,
            "swaps/reference/in": 1.0,
            "swaps/reference/out": 1.0,
            "swaps/trainer/in": 1.0,
            "swaps/trainer/out": 1.0,
            "swaps/mib": 10.0,  # 1 + 1 + 3, both ways
            "memory/device": 3.0,  # the trainer alone; all together are 5
        }


def test_consecutive_calls_of_one_model_move_nothing():
    run = Run()
    run.call("trainer", "train_step", TRAIN)
    run.taken()
    for method, parts in (("train_step", TRAIN), ("forward_step", ("weights",)), ("save", ("weights", "optimizer"))):
        run.call("trainer", method, parts)
    assert run.taken() == {"swaps/mib": 0.0, "memory/device": 3.0}


def test_a_call_that_needs_nothing_moves_nobody():
    run = Run()
    run.call("policy", "generate", ("weights", "kv"))
    run.taken()
    run.call("trainer", "pause", ())
    assert "swaps/policy/out" not in run.taken()


def test_only_the_parts_that_a_call_needs_come():
    run = Run()
    run.call("reference", "forward_step", ("weights",))
    run.call("trainer", "export", ("weights",))
    assert run.processes["trainer"].moves[-1] == ("device", ("weights",))
    assert run.processes["trainer"].on_host == {"optimizer": 2 * MIB}


def test_weights_of_another_model_stay_beside_a_call():
    run = Run()
    run.call("trainer", "train_step", TRAIN)
    run.taken()
    run.call("policy", "install", ("weights",), beside=["trainer"])
    assert run.processes["trainer"].on_device == {"weights": MIB} and run.processes["policy"].on_device == {
        "weights": MIB
    }
    assert run.taken() == {"swaps/trainer/out": 1.0, "swaps/policy/in": 1.0, "swaps/mib": 3.0, "memory/device": 2.0}


def test_with_room_for_everybody_nobody_moves():
    run = Run(capacity=7 * MIB)
    run.step(kv=MIB, gradients=MIB)  # what a call takes is known once it was made
    run.step(kv=MIB, gradients=MIB)
    run.taken()
    run.step(kv=MIB, gradients=MIB)
    assert run.taken() == {"swaps/mib": 0.0, "memory/device": 6.0}  # 1 + 1 + 3, and a gradient


def test_with_some_room_only_what_is_in_the_way_moves():
    """5 MiB and a gradient of one: the optimizer (2) leaves for the policy's cache (2), and nothing else does."""
    run = Run(capacity=6 * MIB + MIB // 2)  # room is made for calls that take a quarter more
    for _ in range(2):
        run.step(kv=2 * MIB, gradients=MIB)
    run.taken()
    run.step(kv=2 * MIB, gradients=MIB)
    assert run.taken() == {
        "swaps/trainer/in": 1.0,
        "swaps/trainer/out": 1.0,
        "swaps/mib": 4.0,
        "memory/device": 6.0,
    }


def test_who_was_called_last_leaves_first():
    sizes = {name: {"weights": MIB} for name in ("a", "b", "c")}
    run = Run(capacity=2 * MIB, sizes=sizes)
    for name in ("a", "b", "c", "a", "b", "c"):
        run.call(name, "forward_step", ("weights",))
    run.taken()
    for name in ("a", "b", "c"):
        run.call(name, "forward_step", ("weights",))
    moved = Counter({name: value for name, value in run.taken().items() if name.endswith("/in")})
    assert sum(moved.values()) == 2  # to let the least recently called leave would be 3


def test_the_caller_gives_up_its_own_parts_last():
    run = Run(capacity=4 * MIB, sizes={name: SIZES[name] for name in ("policy", "trainer")})
    for _ in range(2):  # only once it was made, it is known what a call takes
        run.call("trainer", "forward_step", ("weights",))
        run.call("trainer", "train_step", TRAIN)
        run.call("policy", "forward_step", ("weights",))
    assert run.processes["trainer"].on_device == {"weights": MIB, "optimizer": 2 * MIB}
    run.call("trainer", "forward_step", ("weights",), extra=2 * MIB)
    run.call("trainer", "forward_step", ("weights",), extra=2 * MIB)
    assert run.processes["policy"].on_device == {} and run.processes["trainer"].on_host == {"optimizer": 2 * MIB}


def test_parts_that_may_not_leave_stay():
    run = Run(offload=["optimizer"])
    run.step()
    run.call("policy", "generate", ("weights",))
    assert run.processes["trainer"].on_host == {"optimizer": 2 * MIB}
    assert run.processes["reference"].on_device == {"weights": MIB}


def test_each_process_is_told_what_is_left_for_it():
    run = Run(capacity=4 * MIB)
    run.call("trainer", "train_step", TRAIN)
    run.call("policy", "generate", ("weights", "kv"), extra=3 * MIB)
    run.call("reference", "forward_step", ("weights",))
    run.call("policy", "generate", ("weights", "kv"), extra=3 * MIB)
    assert run.processes["policy"].limits[-1] == 4 * MIB  # all of it: everybody else has left


def test_a_process_hears_of_room_that_others_left_even_if_it_moves_nothing():
    run = Run(capacity=5 * MIB)
    trainer = run.processes["trainer"]
    for _ in range(2):
        run.call("reference", "forward_step", ("weights",))
        run.call("trainer", "train_step", TRAIN)
    assert trainer.limits[-1] == 4 * MIB  # the reference is there, too
    run.call("trainer", "train_step", TRAIN, extra=MIB)  # the books learn what it takes
    run.call("trainer", "train_step", TRAIN, extra=MIB)
    assert run.processes["reference"].on_device == {} and trainer.limits[-1] == 5 * MIB


def test_what_is_announced_comes_before_its_turn_if_it_fits():
    run = Run(capacity=6 * MIB)
    run.call("policy", "generate", ("weights", "kv"), extra=3 * MIB)  # 1 + 3, or 3.75: there is room for one
    residency, reference, trainer = run.residency, run.processes["reference"], run.processes["trainer"]
    future = Future(Call("policy", "generate"))
    residency.prepare(future, "policy", "generate", {"policy": ("weights", "kv")})
    assert reference.on_device == {} and trainer.on_host["optimizer"]
    residency.announce("reference", ("weights",))
    assert reference.on_device == {"weights": MIB}
    residency.announce("trainer", TRAIN)
    assert trainer.on_host["optimizer"]  # no room beside the cache
    residency.release("policy")
    run.taken()
    run.call("reference", "forward_step", ("weights",))
    told = run.taken()
    assert told["swaps/reference/in"] == told["swaps/reference/ahead"] == 1.0


def test_nothing_is_announced_without_a_known_capacity_or_beside_a_call_of_unknown_size():
    for capacity in (None, 100 * MIB):
        run = Run(capacity=capacity)
        run.call("reference", "forward_step", ("weights",))
        run.processes["trainer"].moves.clear()
        run.residency.prepare(Future(Call("policy", "generate")), "policy", "generate", {"policy": ("weights",)})
        run.residency.announce("trainer", TRAIN)
        assert not any(to == "device" for to, _ in run.processes["trainer"].moves)


def test_a_process_that_cannot_move_fails_the_call_that_waits_for_it():
    run = Run()
    run.processes["policy"].failure = WorkerFailure("OutOfDeviceMemory", "no room for the weights of 'policy'", "")
    run.call("reference", "forward_step", ("weights",))
    with pytest.raises(WorkerError, match=r"policy\.generate failed in policy, rank 0: OutOfDeviceMemory: no room"):
        run.call("policy", "generate", ("weights", "kv"))


@pytest.mark.parametrize(
    ("offload", "devices", "colocated", "parts"),
    [
        ("auto", 1, True, PARTS),
        ("auto", 1, False, ()),
        ("auto", 0, True, ()),
        (["weights"], 0, True, ("weights",)),
        ([], 1, True, ()),
    ],
)
def test_what_may_leave_by_configuration(offload, devices, colocated, parts):
    assert MOVABLE == PARTS
    assert list_movable_parts(ModelConfig(offload=offload), devices, colocated) == frozenset(parts)


def test_slots_from_which_nothing_leaves_are_left_alone():
    models = {"a": ModelConfig(), "b": ModelConfig()}
    slots = pack_slots({name: Footprint(1, 0) for name in models}, [["a", "b"]])
    residency = Residency(slots, models, None, CallDeadlines(10.0))
    residency.add("a", slots["a"], [Process("a", {"weights": MIB})])
    residency.prepare(Future(Call("a", "forward_step")), "a", "forward_step", {"a": ("weights",)})
    assert residency.slots == set() and residency.take_stats() == {}
