"""Which transport fits where the ranks are."""

from __future__ import annotations

import os

import pytest

from coalign.config.schema import SyncConfig
from coalign.roles import Context
from coalign.weights.sync.shared_memory import CudaIpcTransport
from coalign.weights.sync.sync import _choose_transport_name
from coalign.weights.sync.transport import WeightEndpoint, describe_endpoint
from tests.weights.modules import Adopter, Sender


def at(host: str, gpu: str | None = None) -> WeightEndpoint:
    return WeightEndpoint(host, 1, "cuda:0" if gpu else "cpu", gpu, True, False)


@pytest.mark.parametrize(
    ("places", "in_turns", "transport"),
    [
        ([at("a"), at("a")], False, "shared_memory"),
        ([at("a"), at("a")], True, "shared_memory"),
        ([at("a", "0"), at("a", "0")], False, "cuda_ipc"),
        ([at("a", "0"), at("a", "0")], True, "shared_memory"),
        ([at("a", "0"), at("a", "1")], False, "shared_memory"),
        ([at("a", "0"), at("a")], False, "shared_memory"),
        ([at("a"), at("b")], False, "broadcast"),
        ([at("a", "0"), at("b", "1")], True, "object_store"),
    ],
)
def test_the_transport_that_fits(places, in_turns, transport):
    assert _choose_transport_name(places, in_turns) == transport


def test_a_rank_knows_its_place():
    found = describe_endpoint(Adopter(None, Context(rank=1, world_size=2)), None)
    assert (found.process, found.device, found.gpu) == (os.getpid(), "cpu", None)
    assert found.adopts and not found.sends
    assert describe_endpoint(Sender(None, Context(rank=1, world_size=2)), None).sends


def test_handles_of_a_gpu_are_refused_elsewhere(make):
    trainer, policy = make()
    with pytest.raises(ValueError, match="`cuda_ipc` needs trainer and policy on one GPU; they are on CPU"):
        CudaIpcTransport(trainer, policy, SyncConfig(), [at("a")], [at("a")])
    with pytest.raises(ValueError, match="they are on 0, 1"):
        CudaIpcTransport(trainer, policy, SyncConfig(), [at("a", "0")], [at("a", "1")])
