import pytest
import torch

from coalign.algorithms.advantages import rloo
from coalign.algorithms.shaping import mask_truncated, scale_truncated, sequence_kl_reward, shape_reward
from coalign.types import Status

T = torch.tensor


def shaped(reward, mask, segment, sampled, ref, **arguments):
    out = shape_reward(T(reward), T(sampled), T([b == "1" for b in mask]), T(segment), T(ref), **arguments)
    return out["token_rewards"].tolist(), out


def test_worked_by_hand():
    # Trained tokens 1, 2, 4 of the first sequence (3 is a tool's), 6 of the second; log-ratios 0.5, -0.5, 1.0 and 2.0.
    # -0.1 * 0.5; -0.1 * -0.5; 2 - 0.1 * 1.0; -1 - 0.1 * 2.0
    sampled = [0.0, -1.0, -1.5, 9.0, -1.0, 0.0, -1.0]
    ref = [0.0, -1.5, -1.0, 0.0, -2.0, 0.0, -3.0]
    got, out = shaped([2.0, -1.0], "0110101", [0, 0, 0, 0, 0, 1, 1], sampled, ref, kl_coef=0.1)
    assert got == pytest.approx([0, -0.05, 0.05, 0, 1.9, 0, -1.2])
    assert out["kl"].value == pytest.approx((1.0 + 2.0) / 2)  # nats per response
    assert out["kl_per_token"].value == pytest.approx(3.0 / 4)


def test_the_estimator_is_a_choice():
    got, _ = shaped([0.0], "1", [0], [0.0], [-2.0], kl_coef=0.5, estimator="k2")
    assert got == [-1.0]


def test_a_reward_of_zero_is_a_reward_and_an_empty_response_has_no_place_for_one():
    got, out = shaped([3.0, 0.0], "0011", [0, 0, 1, 1], [0.0] * 4, [0.0] * 4, kl_coef=0.1)
    assert got == [0.0] * 4
    assert out["kl"].count == 1.0


def test_responses_that_end_masked_keep_their_reward_on_the_last_trained_token():
    got, _ = shaped([1.0, 2.0], "010010", [0, 0, 0, 1, 1, 1], [0.0] * 6, [0.0] * 6, kl_coef=0.1)
    assert got == [0, 1, 0, 0, 2, 0]


def test_inputs_are_left_alone():
    sampled = torch.full((2,), -1.0)
    shape_reward(T([1.0]), sampled, T([True, True]), T([0, 0]), torch.zeros(2), kl_coef=0.1)
    assert sampled.tolist() == [-1.0, -1.0]


def test_without_a_reference_there_is_only_the_reward():
    out = shape_reward(T([2.0]), torch.full((2,), -1.0), T([True, True]), T([0, 0]), kl_coef=0.0)
    assert out.keys() == {"token_rewards"} and out["token_rewards"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(0.0, [0, -0.1, 0, 0, 2.0]), (1.0, [0, 0.5 - 0.1, 0, 0, 1.5]), (2.0, [0, 1.0 - 0.1, 0, 0, 1.0])],
)
def test_turn_rewards_are_part_of_the_reward_and_stand_at_their_tokens(weight, expected):
    # Turns end at tokens 1 and 4 (3 is a tool's, where a reward would belong to nobody).
    sampled, ref, on = torch.zeros(5), T([0.0, -1.0, 0.0, 0.0, 0.0]), T([False, True, True, False, True])
    turns = T([7.0, 0.5, 0.0, 7.0, -0.25])
    out = shape_reward(T([2.0]), sampled, on, T([0] * 5), ref, turns, kl_coef=0.1, turn_weight=weight)["token_rewards"]
    assert out.tolist() == pytest.approx(expected)
    assert out.sum().item() == pytest.approx(2.0 - 0.1)  # however it is spread


class TestSequenceKlReward:
    # Log-ratios 0.5, -0.25 (and a tool's 9) | 2.0 | nothing
    REWARD, ON, SEGMENT = T([1.0, 0.0, 3.0]), T([False, True, False, True, True, False]), T([0, 0, 0, 0, 1, 2])
    SAMPLED, REF = T([0.0, -1.0, 9.0, -1.5, -1.0, 0.0]), T([0.0, -1.5, 0.0, -1.25, -3.0, 0.0])
    ARGUMENTS = (REWARD, SAMPLED, REF, ON, SEGMENT)

    def test_worked_by_hand(self):
        out = sequence_kl_reward(*self.ARGUMENTS, kl_coef=0.1)
        assert out["reward"].tolist() == pytest.approx([1 - 0.1 * 0.25, -0.2, 3.0])
        assert (out["kl"].value, out["kl"].count) == (pytest.approx(2.25 / 2), 2)
        assert out["kl_per_token"].value == pytest.approx(2.25 / 3)

    def test_the_divergence_is_inside_of_the_baseline(self):
        out = sequence_kl_reward(*self.ARGUMENTS, kl_coef=0.1)["reward"]
        # 0.975 - (-0.2 + 3) / 2
        assert rloo(out, T([0, 0, 0]), self.ON, self.SEGMENT)["advantages"][1].item() == pytest.approx(-0.425)
        assert self.REWARD.tolist() == [1.0, 0.0, 3.0]  # left alone


STATUS = T([int(Status.OK), int(Status.TRUNCATED), int(Status.OK)], dtype=torch.uint8)


def test_truncated_responses_earn_a_share():
    reward = T([1.0, 1.0, -1.0])
    assert scale_truncated(reward, STATUS, factor=0.25)["reward"].tolist() == [1.0, 0.25, -1.0]
    assert scale_truncated(reward, STATUS, factor=0.0, offset=-0.5)["reward"].tolist() == [1.0, -0.5, -1.0]
    assert scale_truncated(reward, STATUS)["reward"].tolist() == [1.0, 1.0, -1.0]


def test_truncated_responses_are_not_trained_on():
    out = mask_truncated(T([False, True, False, True, True]), STATUS, T([0, 0, 1, 1, 2]))
    assert out["loss_mask"].tolist() == [False, True, False, False, True]
    assert out["samples/masked"].value == 1
