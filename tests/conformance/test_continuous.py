"""RolloutModule.roll on every engine: batches that arrive while others are computed, and new weights in between."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from coalign.backends.engines.episodes import EpisodeRunner, EpisodesFailed
from coalign.config.schema import RolloutConfig
from coalign.data.batch import Batch
from coalign.environments.conversation import find_environments
from coalign.environments.episode import Episode
from coalign.environments.loop import EnvironmentBlocked
from coalign.roles import Context
from coalign.types import Status
from tests.conformance.engines import ENGINES, build, load, mismatch, prompts
from tests.conformance.test_engines import _three_turns, other_weights, responses, same

pytestmark = pytest.mark.timeout(300)
LOOK = 1e-9  # seconds: one step


@pytest.fixture
def policy(engine, directory):
    """The engine with version 0 of the weights, and nothing to compute."""
    engine.stop_rolling()
    engine.engine.recomputes_kv = engine.context.recompute_kv
    engine.load_weights(load(directory).named_parameters(), version=0)
    return engine


def equal(policy, first: Batch, second: Batch) -> None:
    """The native engine gives the same bits in every company."""
    same(first, second)
    if getattr(policy.engine, "is_invariant", False):
        assert torch.equal(first["rollout_logprobs"], second["rollout_logprobs"])


def collect(policy, found=None, new=()):
    """{number: (batch, statistics)} of everything, in the order of arrival; ``found`` came before."""
    found = {} if found is None else found
    number, batch, stats, _ = policy.roll(list(new), 60.0)
    while number is not None:
        found[number] = batch, stats
        number, batch, stats, _ = policy.roll([], 60.0)
    return found


def test_batches_that_arrive_at_different_times_are_those_of_generate(policy):
    parts = list(prompts().split(2, by="sequences"))
    expected = [policy.generate(part) for part in parts]
    greedy = policy.generate(prompts(2), samples=1, temperature=0.0, max_new_tokens=5)
    assert policy.roll([(3, parts[0], {})], LOOK)[:3] == (None, None, {})
    assert not torch.is_inference_mode_enabled()
    for _ in range(4):
        assert policy.roll([], LOOK)[0] is None
    late = [(2, parts[1], {}), (1, prompts(2), {"samples": 1, "temperature": 0.0, "max_new_tokens": 5})]
    number, batch, stats, waiting = policy.roll(late, 60.0)
    assert (number, stats, waiting) == (1, {}, 0)  # the shortest
    equal(policy, batch, greedy)
    assert not batch["tokens"].is_inference() and not batch["rollout_logprobs"].is_inference()
    assert len(policy.engine.sessions) == 2 and policy.rolling
    found = collect(policy)
    assert sorted(found) == [2, 3]
    equal(policy, found[3][0], expected[0])
    equal(policy, found[2][0], expected[1])
    assert policy.roll([], 60.0) == (None, None, {}, 0) and not policy.rolling
    policy.roll([(0, parts[0], {})], LOOK)
    assert len(policy.engine.sessions) == 1  # the other one had no batch
    policy.stop_rolling()
    assert not policy.engine.sessions


def test_what_is_complete_comes_by_number_and_at_once(policy):
    nothing = prompts(1).slice(0, 0)
    one = prompts(1)
    assert policy.roll([(9, one, {"max_new_tokens": 1}), (7, nothing, {})], 0.0)[0] == 7
    begun = policy.roll([], LOOK)
    number = begun[0] if begun[0] is not None else policy.roll([], 60.0)[0]
    assert number == 9
    whole = policy.generate(one, round_tokens=3)
    [(out, _)] = collect(policy, new=[(1, whole, {})]).values()  # samples of an earlier call go on
    equal(policy, out, policy.generate(whole))


def test_an_option_or_a_prompt_that_is_wrong_leaves_the_others(policy):
    expected = policy.generate(prompts())
    policy.roll([(0, prompts(), {})], LOOK)
    with pytest.raises(ValidationError, match="temprature"):
        policy.roll([(1, prompts(), {"temprature": 0.5})], LOOK)
    with pytest.raises(ValidationError, match="round_tokens"):
        policy.roll([(1, prompts(), {"round_tokens": 5})], LOOK)
    with pytest.raises(ValueError, match="batch 0 is being computed"):
        policy.roll([(0, prompts(), {})], LOOK)
    bad = Batch(torch.tensor([2]), {"tokens": torch.tensor([5, 400])}, {"group": torch.tensor([14])})
    with pytest.raises(ValueError, match="group 14"):
        policy.roll([(1, Batch.concat([prompts(1).without("rows"), bad]), {})], LOOK)
    found = collect(policy)
    assert list(found) == [0]
    equal(policy, found[0][0], expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_weights_change_between_two_slices(policy, directory, recompute):
    policy.engine.recomputes_kv = recompute
    old, new = load(directory), other_weights(directory)
    undisturbed = policy.generate(prompts())
    for _ in range(6):
        policy.roll([(0, prompts(), {})] if not policy.rolling else [], LOOK)
    policy.load_weights(new.named_parameters(), version=1)
    [(out, _)] = collect(policy).values()
    assert policy.engine.version == 1
    before = out["versions"] == 0
    assert all(versions == sorted(versions) and set(versions) == {0, 1} for versions in responses(out, "versions"))
    for whole, tokens, versions in zip(responses(undisturbed), responses(out), responses(out, "versions"), strict=True):
        begun = versions.count(0)
        assert tokens[:begun] == whole[:begun] and 5 <= begun <= 7
    # Every log-prob is that of one version's plain forward over the whole sequence, if all was computed again.
    met, mask = out["rollout_logprobs"], out["loss_mask"]
    for model, chosen in ((old, before), (new, mask & ~before)):
        only = out.with_(loss_mask=chosen)
        error = mismatch(model, only)
        assert error < 1e-5 if recompute or model is old else error > 1e-4
    assert not met[~mask].any()


# ---- episodes


async def _pauses(episode: Episode) -> None:
    await episode.generate(max_new_tokens=6)
    await asyncio.sleep(0.3)
    await _three_turns(episode)


async def _fails_in_group_10(episode: Episode) -> None:
    await episode.generate(max_new_tokens=4)
    if episode.group == 10:
        raise LookupError("no such thing")


async def _blocks(episode: Episode) -> None:
    await episode.generate(max_new_tokens=2)
    time.sleep(4)


_GIVE_UP, _GIVEN_UP = threading.Event(), threading.Event()


async def _gives_up_a_turn(episode: Episode) -> None:
    turn = asyncio.ensure_future(episode.generate(max_new_tokens=400))
    while not _GIVE_UP.is_set():
        await asyncio.sleep(0.01)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    _GIVEN_UP.set()
    await episode.generate(max_new_tokens=3)


def playing(directory, fn, name="native", timeout=120.0, samples=2):
    """A policy that plays episodes of ``fn``."""
    policy = build(name, directory, Context(model="policy", samples_per_prompt=samples, seed=5))
    context = replace(policy.context, tokenizer=str(directory))
    rollout = RolloutConfig(fn=f"tests.conformance.test_continuous:{fn}", timeout=timeout)
    policy.runner = EpisodeRunner(find_environments(rollout), policy.tokenizer, context)
    return policy


@pytest.mark.parametrize("name", ENGINES)
def test_episodes_of_several_batches_run_side_by_side(directory, name):
    policy = playing(directory, "_pauses", name)
    parts = list(prompts().split(2, by="sequences"))
    expected = [policy.generate(part) for part in parts]
    assert policy.roll([(0, parts[0], {})], 0.05)[0] is None
    found = collect(policy, new=[(1, parts[1], {})])
    assert sorted(found) == [0, 1]
    for number, (whole, stats) in enumerate(expected):
        out, own = found[number]
        equal(policy, out.without("messages"), whole.without("messages"))
        assert out["messages"] == whole["messages"] and own.keys() == stats.keys()
        assert own["episode/turns"] == stats["episode/turns"]
        if name == "native":
            assert own["episode/tokens_prefilled"] == stats["episode/tokens_prefilled"]
            assert own["episode/tokens_kept"] == stats["episode/tokens_kept"]
    policy.close()


def test_a_conversation_goes_on_with_new_weights(directory):
    policy = playing(directory, "_three_turns")
    old, new = load(directory), other_weights(directory)
    policy.load_weights(old.named_parameters(), version=0)
    policy.roll([(0, prompts(), {})], 0.0)
    while max(session.tokens_chosen for session in policy.engine.sessions) < 8 * 9:  # in the middle of the second turn
        policy.roll([], LOOK)
    policy.load_weights(new.named_parameters(), version=1)
    [(out, _)] = collect(policy).values()
    before, mask = out["versions"] == 0, out["loss_mask"]
    assert int(mask.sum()) == 8 * 3 * 6 and before.any() and int((mask & ~before).sum()) > 0
    assert any({0, 1} <= set(versions[6:12]) for versions in responses(out, "versions"))  # within one turn
    assert mismatch(old, out.with_(loss_mask=before)) < 1e-5
    assert mismatch(new, out.with_(loss_mask=mask & ~before)) < 1e-5
    policy.close()


def test_episodes_that_all_fail_end_their_batch_alone(directory):
    policy = playing(directory, "_fails_in_group_10")
    parts = list(prompts(2).split(2, by="sequences"))
    policy.roll([(number, part, {}) for number, part in enumerate(parts)], 0.0)
    with pytest.raises(EpisodesFailed, match="2 of 2 calls"):
        policy.roll([], 60.0)
    [(out, _)] = collect(policy).values()
    assert out["group"].tolist() == [11, 11] and Status.ERROR not in out["status"].tolist()
    policy.close()


def test_an_environment_that_blocks_is_named_though_slices_are_short(directory, monkeypatch):
    monkeypatch.setattr("coalign.environments.loop._GRACE", 0.2)
    policy = playing(directory, "_blocks", timeout=0.3)
    policy.roll([(0, prompts(1), {})], 0.0)
    with pytest.raises(EnvironmentBlocked, match=r"time\.sleep"):
        for _ in range(1000):
            assert policy.roll([], 0.05)[0] is None
    assert not policy.engine.sessions and not policy.rolling
    policy.close()


def test_a_turn_that_is_given_up_after_new_weights_leaves_its_slot(directory):
    policy = playing(directory, "_gives_up_a_turn", samples=1)
    policy.load_weights(load(directory).named_parameters(), version=0)
    policy.engine.end_tokens = frozenset()
    policy.roll([(0, prompts(1), {"max_new_tokens": 2000})], LOOK)
    while not (policy.engine.sessions[0].tokens_chosen or policy.roll([], LOOK)[0] is not None):
        pass
    policy.load_weights(other_weights(directory).named_parameters(), version=1)
    _GIVE_UP.set()
    assert _GIVEN_UP.wait(60.0)
    [(out, stats)] = collect(policy).values()
    assert responses(out, "versions") == [[1] * 3] and stats["episode/turns"].value == 1
    policy.close()
