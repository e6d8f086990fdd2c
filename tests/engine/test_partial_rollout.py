"""Partial rollout and oversampling in whole runs: the ledger of every token, ages, and how a run goes on."""

import pytest
import torch

from coalign.backends.engines.native.native_engine import NativeModule
from coalign.data.batch import Batch
from coalign.engine.engine import Trainer
from coalign.engine.rollouts.unfinished import CompleteGroups
from tests.engine.test_sampling_control import assert_resumes_bit_for_bit, online
from tests.runs import metrics, run, run_to_end, weights_hash

STOP = list("abcdefghijklmnopqrstuvwxyz0123456789")  # ends about every seventh token of a random model


class Watched:
    """Every token that the policy gave, and every one that was trained on: (group, index) -> [(token, version)]."""

    def __init__(self, monkeypatch):
        self.grown, self.trained, self.statuses = {}, {}, []
        generate, step = NativeModule.generate, Trainer.step

        def generating(module, prompts, **options):
            out = generate(module, prompts, **options)
            for sample in rows(out):
                before = self.grown.get(sample["key"], [])
                assert sample["tokens"][: len(before)] == before  # what was there stays as it was
                limit = options.get("round_tokens") or 10**9
                assert len(sample["tokens"]) - len(before) <= limit
                self.grown[sample["key"]] = sample["tokens"]
            return out

        def stepping(trainer, batch):
            for sample in rows(batch.fetch()):
                assert sample["key"] not in self.trained, "trained twice"
                assert sample["status"] < 2
                self.trained[sample["key"]] = sample["tokens"]
            return step(trainer, batch)

        monkeypatch.setattr(NativeModule, "generate", generating)
        monkeypatch.setattr(Trainer, "step", stepping)


def rows(batch):
    for row in batch.rows():
        chosen = row["loss_mask"]
        tokens = list(zip(row["tokens"][chosen].tolist(), row["versions"][chosen].tolist(), strict=True))
        yield {"key": (int(row["group"]), int(row["index"])), "tokens": tokens, "status": int(row["status"])}


def partial(tmp_path, *, rollout, **runtime):
    config = online(tmp_path, **runtime) | {"rollout": rollout}
    config["models"]["policy"]["sampling"] = {"max_new_tokens": 16, "stop": STOP}
    return config


def sums(lines, *names):
    return [sum(line.get(name, 0) for line in lines) for name in names]


OVERSAMPLED = pytest.param({"round_tokens": 16, "oversample": 2.0}, marks=pytest.mark.slow)


@pytest.mark.parametrize("rollout", [{"round_tokens": 4}, OVERSAMPLED])
def test_every_token_is_trained_on_once_or_counted(tmp_path, monkeypatch, rollout):
    watched = Watched(monkeypatch)
    config = partial(tmp_path, rollout=rollout, steps=5)
    lines = run_to_end(config)
    assert [line["samples/count"] for line in lines] == [16] * 5
    assert lines[-1]["rollout/rounds"] == 1  # of several, `carried` would be the most after any
    generated = sum(map(len, watched.grown.values()))
    trained = sum(map(len, watched.trained.values()))
    on_their_way = sum(len(tokens) for key, tokens in watched.grown.items() if key not in watched.trained)
    assert generated == trained + on_their_way
    assert all(watched.grown[key] == tokens for key, tokens in watched.trained.items())
    # What is not trained on is carried, waits in the pool, or was counted as dropped.
    rest = {key[0] for key in watched.grown} - {key[0] for key in watched.trained}
    dropped = sums(lines, "rollout/given_up", "rollout/expired")
    assert len(rest) == lines[-1]["rollout/carried"] + lines[-1]["rollout/waiting"]
    assert dropped == [0, 0]
    # Some responses really were chosen by several versions of the weights.
    assert any(len({version for _, version in tokens}) > 1 for tokens in watched.trained.values())
    assert max(line["samples/staleness_max"] for line in lines) <= 4


def test_what_oversampling_cuts_is_counted(tmp_path, monkeypatch):
    watched = Watched(monkeypatch)
    config = partial(tmp_path, rollout={"oversample": 1.5}, steps=3)
    lines = run_to_end(config)
    assert [line["samples/count"] for line in lines] == [16] * 3
    assert {key[0] for key in watched.grown} == set(range(18))  # six prompts begun for every four
    cut, expired = sums(lines, "rollout/cut", "rollout/expired")
    assert cut > 0 and cut + expired + lines[-1]["rollout/waiting"] == 18 - 12
    untrained = [key for key in watched.grown if key not in watched.trained]
    assert sums(lines, "rollout/cut_tokens")[0] <= sum(len(watched.grown[key]) for key in untrained)


def test_groups_beyond_the_age_are_given_up_and_counted(tmp_path, monkeypatch):
    watched = Watched(monkeypatch)
    config = partial(tmp_path, rollout={"round_tokens": 4, "max_age": 1}, steps=6)
    lines = run_to_end(config)
    assert max(line["samples/staleness_max"] for line in lines) <= 1
    given_up, expired = sums(lines, "rollout/given_up", "rollout/expired")
    assert given_up > 0
    rest = {key[0] for key in watched.grown} - {key[0] for key in watched.trained}
    assert len(rest) == given_up + expired + lines[-1]["rollout/carried"] + lines[-1]["rollout/waiting"]


@pytest.mark.parametrize("rollout", [{"round_tokens": 4}, OVERSAMPLED])
def test_a_run_cut_in_the_middle_of_responses_goes_on_bit_for_bit(tmp_path, rollout):
    assert_resumes_bit_for_bit(partial(tmp_path, rollout=rollout, steps=4))


def test_what_belongs_to_a_group_is_asked_for_by_what_came_out(tmp_path):
    """ReMax: a group that ends two rollouts later still finds the greedy response to its prompt."""
    rollout = {"round_tokens": 6}
    config = partial(tmp_path, rollout=rollout, steps=3, samples_per_prompt=2) | {"algorithm": "remax"}
    config |= {"kl": {"fn": "FixedKL", "coef": 0.0}}
    lines = run_to_end(config)
    assert [line["samples/count"] for line in lines] == [8] * 3
    assert [line["samples/dropped"] for line in lines] == [0] * 3
    assert lines[-1]["samples/staleness_max"] > 0


@pytest.mark.slow
def test_two_replicas_on_ray_give_what_one_process_gives(tmp_path):
    """Prompts are shared out by expected lengths (later steps see prompts again), carried samples go on anywhere."""
    one = partial(tmp_path, rollout={"round_tokens": 4}, steps=4, prompts_per_step=8)
    run(one)
    two = one | {"output": str(tmp_path / "two"), "runtime": one["runtime"] | {"cluster": "ray"}}
    policy, trainer = one["models"]["policy"], one["models"]["trainer"]
    two["models"] = {"policy": policy | {"num_process": 2}, "trainer": trainer | {"num_process": 1}}
    run(two)
    assert weights_hash(two, 4) == weights_hash(one, 4)
    assert [line["loss/value"] for line in metrics(two)] == [line["loss/value"] for line in metrics(one)]


def test_a_run_that_continues_no_group_names_those_that_it_drops(caplog):
    unfinished = Batch(torch.ones(3, dtype=torch.int64)).with_(group=torch.tensor([4, 4, 7]))
    CompleteGroups(None, None, 2).restore(unfinished)
    assert "2 unfinished groups of the checkpoint are dropped" in caplog.text
    caplog.clear()
    CompleteGroups(None, None, 2).restore(unfinished.slice(0, 0))
    assert not caplog.text
