import pytest
import torch

from coalign.algorithms.shaping import shape_reward

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
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1, and nobody produced the column `ref_logprobs`"):
        shape_reward(T([2.0]), torch.full((2,), -1.0), T([True, True]), T([0, 0]), kl_coef=0.1)
