"""An episode of several rows counts as one sample, whatever counts samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coalign.algorithms.advantages import gae, group, opo, rloo
from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.algorithms.segments import LossTotals, sequence_shares
from coalign.cluster.worker import apply_columns
from coalign.data.batch import Batch
from coalign.engine.flow import count_episode_tokens
from coalign.engine.rollouts.selection import filter_groups, pass_rates, response_lengths
from coalign.types import LossInput

# A prompt's samples: the first is an episode of three rows, the second and third have one.
LENGTHS, OWNED = [3, 2, 4, 3, 2], [2, 1, 3, 2, 1]  # tokens of each row; those at its end that are trained


def rows(split: bool) -> Batch:
    """The same trained tokens, in rows or (``split`` False) with each episode as one sequence."""
    mask = [i >= n - k for n, k in zip(LENGTHS, OWNED, strict=True) for i in range(n)]
    sequence = {
        "group": torch.zeros(5, dtype=torch.int64),
        "index": torch.tensor([0, 0, 0, 1, 2], dtype=torch.int32),
        "branch": torch.tensor([0, 1, 2, 0, 0], dtype=torch.int32),
        "reward": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5]),
        "rows": [{"prompt": "a"}] * 5,
    }
    token = {"loss_mask": torch.tensor(mask), "tokens": torch.arange(14, dtype=torch.int32)}
    batch = Batch(torch.tensor(LENGTHS), token, sequence)
    return batch if split else batch.as_episodes().without("branch")


def apply(function, batch, **arguments):
    """As a worker does."""
    columns, stats = apply_columns(function, batch.as_episodes(), arguments)
    return batch.with_(**batch.spread(columns)), stats


def test_rows_become_episodes_and_values_go_back_to_rows():
    batch = rows(True)
    merged = batch.as_episodes()
    assert merged.lengths.tolist() == [9, 3, 2] and merged["reward"].tolist() == [1.0, 0.0, 0.5]
    assert torch.equal(merged["tokens"], batch["tokens"])
    spread = batch.spread({"mark": torch.tensor([1, 2, 3]), "name": ["a", "b", "c"], "token": torch.arange(14)})
    assert spread["mark"].tolist() == [1, 1, 1, 2, 3] and spread["name"] == ["a", "a", "a", "b", "c"]
    assert len(spread["token"]) == 14 and batch.first_branches()["branch"].tolist() == [0, 0, 0]
    plain = rows(False)
    assert plain.as_episodes() is plain and plain.first_branches() is plain


@pytest.mark.parametrize("order", [[1, 0, 2, 3, 4], [0, 2, 1, 3, 4], [1, 2, 3, 4], [0, 3, 1, 2, 4]])
def test_rows_of_an_episode_stay_neighbours(order):
    with pytest.raises(ValueError, match=r"rows of an episode .* must be neighbours"):
        rows(True).select(order).as_episodes()


@pytest.mark.parametrize("advantage", [group, rloo, opo])
def test_an_episode_in_rows_has_the_advantages_of_one_sequence(advantage):
    split, whole = apply(advantage, rows(True)), apply(advantage, rows(False))
    assert torch.equal(split[0]["advantages"], whole[0]["advantages"])
    assert split[1] == whole[1]


def test_gae_runs_through_the_rows_in_their_order():
    values = {"values": torch.linspace(-1, 1, 14), "token_rewards": torch.linspace(1, 0, 14)}
    split, whole = (apply(gae, rows(kind).with_(**values))[0] for kind in (True, False))
    assert torch.equal(split["advantages"], whole["advantages"])


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
)
def test_a_loss_of_rows_is_that_of_the_episodes(aggregation):
    """Also cut into micro-batches in the middle of an episode."""
    objective = Objective(PolicyGradient(), aggregation, constant_length=7)

    def loss(batch, cuts):
        batch, _ = apply(count_episode_tokens, apply(group, batch)[0])
        trained = torch.bincount(batch.segment[batch["loss_mask"]], minlength=len(batch))
        shares = sequence_shares(batch.segment[batch["loss_mask"]], len(batch), batch["episode_tokens"])
        totals = LossTotals(float(trained.sum()), float(shares.sum()), 1.0)
        assert totals.sequences == pytest.approx(3.0)
        logprobs = torch.linspace(-2, -1, 9, dtype=torch.float64, requires_grad=True)
        value = torch.zeros((), dtype=torch.float64)
        for start, stop in cuts:
            micro = batch.slice(start, stop)
            mask, before = micro["loss_mask"], int(trained[:start].sum())
            mine = logprobs[before : before + int(mask.sum())]
            sequence = {"episode_tokens": micro["episode_tokens"]}
            x = LossInput(micro.segment[mask], len(micro), mine, columns=sequence, advantages=micro["advantages"][mask])
            value = value + objective(replace(x, old=mine.detach() - 0.1), totals)[0]
        (gradient,) = torch.autograd.grad(value, logprobs)
        return value.detach(), gradient

    whole = loss(rows(False), [(0, 3)])
    for cuts in ([(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 3), (3, 5)]):
        torch.testing.assert_close(loss(rows(True), cuts), whole)


def test_groups_are_filtered_and_measured_by_episodes():
    def keep(reward):
        assert reward.tolist() == [1.0, 0.0, 0.5]
        return reward >= 0

    kept, stats = filter_groups(rows(True), keep=keep, arguments={})
    assert len(kept) == 5 and stats["filter/kept"].value == 1.0
    assert pass_rates(rows(True), solved=1.0)["share"].tolist() == [pytest.approx(1 / 3)]
    assert response_lengths(rows(True))["length"].tolist() == [3.0]
