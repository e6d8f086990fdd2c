"""Every transport between processes: the same weights arrive, and nothing else is ever served."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from coalign.cluster.future import WorkerError
from coalign.cluster.worker import Worker
from coalign.config.schema import SyncConfig
from coalign.roles import Context
from coalign.types import Total
from coalign.weights.sync import broadcast, segment, shared_memory
from coalign.weights.sync.checksums import copy_tensors
from coalign.weights.sync.stored import _verify_buckets
from coalign.weights.sync.sync import WeightSync
from coalign.weights.sync.transport import WeightError
from tests.weights import modules

TRANSPORTS = ["shared_memory", "object_store", "disk", "broadcast"]
STAGED = ["shared_memory", "object_store", "disk"]
# For what the senders agree on among themselves, whatever carries the bytes.
TWO_QUICK = ["shared_memory", "broadcast", *(pytest.param(each, marks=pytest.mark.slow) for each in STAGED[1:])]
FAULTS = {
    "break": "the export broke",
    "forget": r"weight 'layers\.\d\.half' was not sent",
    "twice": r"weight 'layers\.\d\.weight' was sent twice",
    "both": "weight 'layers.0.weight' was sent twice",
}
EMBED = 4 * 2**18
LAYER = 4 * 15 + 2 * 7


@pytest.fixture
def syncing(tmp_path):
    def make_sync(trainer, policy, transport, **settings):
        given = {"timeout": 20.0, "bucket_mib": 1, "directory": str(tmp_path / "sync")} | settings
        return WeightSync(trainer, policy, SyncConfig(transport=transport, **given))

    return make_sync


def expected(ranks, learnt):
    found = {"embed": torch.arange(2.0**18), "empty": torch.zeros(0, 4)}
    for rank in range(ranks):
        found[f"layers.{rank}.weight"] = torch.full((3, 5), float(rank + learnt))
        found[f"layers.{rank}.half"] = torch.full((7,), 1.0 + learnt, dtype=torch.bfloat16)
    return found


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[k].dtype == wanted[k].dtype and torch.equal(found[k], wanted[k]) for k in wanted
    )


def check_serving(policy, version, weights):
    for found, served in policy.call("serving"):
        assert found == version and same(served, weights)


@pytest.mark.parametrize(
    ("transport", "module"),
    [*((transport, "Adopter") for transport in TRANSPORTS), ("shared_memory", "Reader"), ("broadcast", "Reader")],
)
def test_several_senders_reach_several_readers(make, syncing, transport, module):
    trainer, policy = make(senders=2, readers=2, module=module)
    sync = syncing(trainer, policy, transport)
    assert sync(0)["sync/bytes"] == Total(EMBED + 2 * LAYER)
    for version in range(1, 4):
        trainer.call("learn")
        check_serving(policy, version - 1, expected(2, version - 1))  # training does not show through
        assert sync(version)["sync/bytes"] == Total(2 * LAYER)  # the embedding is frozen
        check_serving(policy, version, expected(2, version))


@pytest.mark.parametrize("transport", TWO_QUICK)
def test_a_sender_may_have_nothing_to_send_until_others_are_heard(make, syncing, transport):
    trainer, policy = make(senders=2, readers=2, source="Together")
    syncing(trainer, policy, transport)(0)
    for _, weights in policy.call("serving"):
        assert same(weights, {f"layers.{i}.weight": torch.full((2**18,), float(i)) for i in range(12)})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_computes_in_a_narrower_dtype_is_sent_no_more(make, syncing, transport):
    trainer, policy = make(readers=2, module="Narrow")
    sync = syncing(trainer, policy, transport)
    assert sync(0)["sync/bytes"] == Total(EMBED // 2 + 2 * 15 + 2 * 7)
    trainer.call("learn", 0.123)
    assert sync(1)["sync/bytes"] == Total(2 * 15 + 2 * 7)
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in expected(1, 0.123).items()}
    wanted["layers.0.half"] = torch.ones(7, dtype=torch.bfloat16) + 0.123
    assert all(version == 1 and same(weights, wanted) for version, weights in policy.call("serving"))


@pytest.mark.parametrize(
    ("transport", "turns"), [*((each, False) for each in TRANSPORTS), *((each, True) for each in STAGED)]
)
def test_versions_may_come_again_and_go_back(make, syncing, transport, turns):
    """Also between models that take turns on their devices."""
    trainer, policy = make(module="Adopter", turns=turns)
    sync = syncing(trainer, policy, transport)
    for learnt, version in enumerate([5, 6, 6, 3, 3, 4]):
        sync(version)
        check_serving(policy, version, expected(1, learnt))
        trainer.call("learn")


def test_a_sync_through_files_deletes_only_its_own(make, syncing, tmp_path):
    for version in (1, 7):
        (tmp_path / "sync" / f"version_{version}").mkdir(parents=True)
        (tmp_path / "sync" / f"version_{version}" / "model.safetensors").write_text("mine")
    sync = syncing(*make(), "disk")
    for version in range(3):
        sync(version)
    found = {str(file.relative_to(tmp_path / "sync")) for file in (tmp_path / "sync").rglob("model.safetensors")}
    assert found == {"version_1.before-1/model.safetensors", "version_7/model.safetensors"}
    left = sorted(folder.name for folder in (tmp_path / "sync").glob("version_*"))
    assert left == ["version_1.before-1", "version_2", "version_7"]


@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        *(("shared_memory", fault) for fault in FAULTS),
        *((transport, "break") for transport in STAGED[1:]),
        *(pytest.param(t, f, marks=pytest.mark.slow) for t in STAGED[1:] for f in FAULTS if f != "break"),
    ],
)
def test_what_goes_wrong_at_a_sender_leaves_the_old_version(make, syncing, transport, fault):
    trainer, policy = make(senders=2, readers=2, module="Adopter")
    sync = syncing(trainer, policy, transport)
    for version in (0, 1):
        sync(version)
    trainer.call("learn")
    trainer.call("misbehave", fault)
    with pytest.raises((WorkerError, WeightError), match=FAULTS[fault]):
        sync(2)
    check_serving(policy, 1, expected(2, 0))
    trainer.call("misbehave", "")
    sync(3)
    check_serving(policy, 3, expected(2, 1))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("break", r"trainer, rank 1 broke off (after 'layers.1.weight'|before its first tensor): .*the export broke"),
        ("forget", r"weight 'layers\.\d\.half' was not sent"),
        (
            "twice",
            r"trainer, rank \d broke off .*: WeightError: weight 'layers\.\d\.weight' was sent twice by one rank",
        ),
        ("both", "weight 'layers.0.weight' was sent twice: by rank 0 and by rank 1"),
    ],
)
def test_a_broken_stream_leaves_replicas_that_do_not_serve(make, syncing, fault, message):
    trainer, policy = make(senders=2, readers=2)
    sync = syncing(trainer, policy, "broadcast")
    for version in (0, 1):
        sync(version)
    trainer.call("misbehave", fault)
    with pytest.raises(WorkerError, match=message):
        sync(2)
    assert all("version 2 were installed in part" in why for why in policy.call("condition"))
    trainer.call("misbehave", "")
    sync(3)
    assert policy.call("condition") == [None, None]
    check_serving(policy, 3, expected(2, 0))


def damaged_fill(jobs, *turn):
    for job in jobs:
        for result in copy_tensors([job], *turn):
            job[2][:1] ^= 4
            yield result


def damaged_broadcast(module, store, *arguments):
    broadcast.copy_tensors = damaged_fill
    try:
        return broadcast.send(module, store, *arguments)
    finally:
        broadcast.copy_tensors = copy_tensors


def test_damaged_buckets_leave_replicas_that_do_not_serve(make, syncing):
    trainer, policy = make(readers=2)
    sync = syncing(trainer, policy, "broadcast")
    sync(0)
    sync.transport.source = Damaging(trainer, broadcast.send, damaged_broadcast)
    with pytest.raises(WorkerError, match=r"weight '[\w.]+' arrived damaged"):
        sync(1)
    assert all("version 1" in why for why in policy.call("condition"))


@pytest.mark.parametrize(
    "transport",
    ["shared_memory", "broadcast", *(pytest.param(t, marks=pytest.mark.slow) for t in ("disk", "object_store"))],
)
def test_a_sender_that_stalls_is_named(make, syncing, transport):
    trainer, policy = make()
    sync = syncing(trainer, policy, transport, timeout=1.0, bucket_mib=1)
    sync(0)
    trainer.call("misbehave", "stall")
    # By broadcast the tensor is in a bucket that has not left.
    after = "before its first tensor" if transport == "broadcast" else "after 'layers.0.weight'"
    with pytest.raises(WorkerError, match=rf"trainer, rank 0 sent nothing for 1 s \(sync.timeout\) {after}"):
        sync(1)
    assert policy.call("serving")[0][0] == 0


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_nobody_waits_for_a_sender_that_has_died(make, syncing, transport):
    trainer, policy = make(senders=2, readers=2)
    sync = syncing(trainer, policy, transport, timeout=80.0)
    sync(0)
    trainer.call("misbehave", "die")
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker lost|has ended |or is gone"):
        sync(1)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_replica_that_fails_while_it_installs_refuses_to_serve(make, syncing, transport):
    trainer, policy = make(readers=2)
    sync = syncing(trainer, policy, transport)
    sync(0)
    policy.call("misbehave", "break")
    with pytest.raises(WorkerError, match="the load broke"):
        sync(1)
    assert set(policy.call("condition")) == {
        "the weights of version 1 were installed in part only; it needs a complete sync"
    }
    policy.call("misbehave", "")
    sync(2)
    assert policy.call("condition") == [None, None]
    assert policy.call("serving")[0][0] == 2


def test_a_replica_that_is_unfit_answers_no_call():
    worker = Worker(None, 1)
    worker._module = modules.Reader(None, Context(model="policy"))
    worker.module.unfit = "half of it is new"
    meta, _ = worker.execute("call", "serving", (), {})
    assert meta.failure.message == "model 'policy' does not serve: half of it is new"


def damaged_send(module, store, *arguments):
    """``send`` with one bit of each tensor flipped after it was written."""

    shared_memory.copy_tensors = damaged_fill
    try:
        return shared_memory.send(module, store, *arguments)
    finally:
        shared_memory.copy_tensors = copy_tensors


def damaged_verify(module, store, references, directory=None):
    """``_verify_buckets`` of what has one bit flipped."""
    for reference in references:
        for packed in store.get(reference):
            data = packed.data.copy()
            data[:1] ^= 4
            type(packed)(packed.name, packed.dtype, packed.shape, data, packed.checksum).verify()


class Damaging:
    """A model in which one of a transport's functions is replaced."""

    def __init__(self, model, function, by):
        self.model, self.function, self.by = model, function, by

    def __getattr__(self, name):
        return getattr(self.model, name)

    def run(self, function, *arguments, **keywords):
        return self.model.run(self.by if function is self.function else function, *arguments, **keywords)


def test_bytes_that_are_damaged_once_are_sent_again(make, syncing, caplog):
    trainer, policy = make(senders=1, readers=2, module="Adopter")
    sync = syncing(trainer, policy, "object_store")
    sync(0)
    trainer.call("learn")
    target = sync.transport.target

    class DamagingOnce(Damaging):
        def run(self, function, *arguments, **keywords):
            sync.transport.target = target
            return super().run(function, *arguments, **keywords)

    sync.transport.target = DamagingOnce(target, _verify_buckets, damaged_verify)
    sync(1)
    assert "arrived damaged" in caplog.text and "all are sent again" in caplog.text
    check_serving(policy, 1, expected(1, 1))


@pytest.mark.parametrize("transport", ["shared_memory", "object_store"])
def test_damaged_bytes_are_refused_and_the_old_version_keeps_serving(make, syncing, transport):
    trainer, policy = make(senders=1, readers=2, module="Adopter")
    sync = syncing(trainer, policy, transport)
    sync(0)
    trainer.call("learn")
    whole = sync.transport.source, sync.transport.target
    sync.transport.source = Damaging(whole[0], shared_memory.send, damaged_send)
    sync.transport.target = Damaging(whole[1], _verify_buckets, damaged_verify)
    with pytest.raises(WorkerError, match=r"weight '[\w.]+' arrived damaged") as caught:
        sync(1)
    assert isinstance(caught.value.cause, WeightError)
    check_serving(policy, 0, expected(1, 0))
    sync.transport.source, sync.transport.target = whole
    sync(1)
    check_serving(policy, 1, expected(1, 1))


class Turns(Damaging):
    """A model that notes the turns of the checksums of what it sends."""

    def __init__(self, model):
        super().__init__(model, None, None)
        self.turns = []

    def run(self, function, *arguments, **keywords):
        if function is shared_memory.send:
            self.turns.append(arguments[-1])
        return super().run(function, *arguments, **keywords)


@pytest.mark.parametrize(
    ("module", "verify", "turns"),
    [
        ("Adopter", "rotating", [None, None, 1, 1, 2, None, None, 1]),  # two sides, and the fifth does not arrive
        ("Reader", "rotating", [None, 1, 2, 3, 4, None, 1, 2]),
        ("Adopter", "all", [None] * 8),
    ],
)
def test_everything_is_verified_at_first_and_after_what_did_not_arrive(make, syncing, module, verify, turns):
    trainer, policy = make(module=module)
    watched = Turns(trainer)
    sync = syncing(watched, policy, "shared_memory", verify=verify)
    for version in range(8):
        trainer.call("misbehave", "break" if version == 4 else "")
        if version == 4:
            with pytest.raises(WorkerError, match="the export broke"):
                sync(version)
        else:
            sync(version)
    assert watched.turns == turns


@pytest.mark.parametrize("transport", TWO_QUICK)
def test_two_syncs_at_once_come_one_after_the_other(make, syncing, transport):
    trainer, policy = make(senders=2, readers=2, module="Adopter")
    syncs = [syncing(trainer, policy, transport) for _ in range(2)]
    failures = []

    def race(version):
        try:
            syncs[version % 2](version)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=race, args=(version,)) for version in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    versions = {found for found, _ in policy.call("serving")}
    assert len(versions) == 1
    assert all(same(weights, expected(2, 0)) for _, weights in policy.call("serving"))


def test_a_sync_that_cannot_begin_is_refused(make, syncing):
    with pytest.raises(ValueError, match="`broadcast` needs trainer and policy at once"):
        syncing(*make(turns=True), "broadcast")(0)
    trainer, policy = make()
    sync = syncing(trainer, policy, "auto", timeout=0.05)
    with policy.syncing, pytest.raises(WeightError, match="version 5 for policy: another sync of policy has been"):
        sync(5)
    assert not trainer.syncing.locked()


def no_memory(module, store):
    segment.measure_free_memory = lambda: 1000


def test_without_memory_the_weights_take_another_way(make, syncing, caplog):
    trainer, policy = make()
    sync = syncing(trainer, policy, "auto")
    trainer.run(no_memory).result()
    sync(0)
    assert "memory for weights: 256 MiB wanted, 0 MiB are free; they go through the object store" in caplog.text
    assert same(policy.call("serving")[0][1], expected(1, 0))
