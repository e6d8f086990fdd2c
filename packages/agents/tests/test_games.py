"""Games: rules, opponents, both sides of self-play."""

from __future__ import annotations

from random import Random

import pytest
import torch

from coalign.algorithms.advantages import rloo
from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.local import LocalStore
from coalign.cluster.worker import apply_columns
from coalign.data.batch import Batch
from coalign.types import Status
from coalign_agents.games import GuessTheNumber, Nim, _IllegalMove, game, self_play
from coalign_agents.users import simulated_user
from examples.custom_environment import higher_or_lower
from tests.environments.helpers import TOKENIZER, episode, play


def move(what) -> str:
    return f"I think so. <move>{what}</move>"


def total(one) -> float:
    return sum(one.rows[0].turn_rewards)


def takes_one(board, random) -> str:
    return "1"


ONE = {"rules": "Nim", "settings": {"sticks": 5}, "opponent": "packages.agents.tests.test_games:takes_one"}


def test_rules_of_nim():
    board = Nim(Random(0), sticks=5)
    assert board.turn == 0 and board.moves() == ["1", "2", "3"]
    board.play("3")
    assert board.turn == 1 and board.moves() == ["1", "2"]
    for wrong in ("3", "0", "", "one"):
        with pytest.raises(_IllegalMove, match="you may take 1 or 2"):
            board.play(wrong)
    board.play("2")
    assert board.turn is None and (board.score(0), board.score(1)) == (-1, 1)


def test_rules_of_guessing():
    board = GuessTheNumber(Random(0), highest=10, tries=3)
    wrong = [n for n in range(1, 11) if n != board.number]
    board.play(str(wrong[0]))
    assert ("higher" if board.number > wrong[0] else "lower") in board.view(0)
    with pytest.raises(_IllegalMove):
        board.play("11")
    assert board.turn == 0 and board.tries == 2
    board.play(str(board.number))
    assert board.turn is None and board.score(0) == 1.0


def test_a_game_that_is_won():
    one = episode(move(1), move(3))  # 5 - 1 - (1) - 3
    play(game, one, starts=True, **ONE)
    assert total(one) == 1.0
    texts = [m["content"] for m in one.messages]
    assert "There are 5 sticks" in texts[0] and texts[2] == "I take 1. There are 3 sticks. Your move."
    assert one.rows[0].turn_rewards[-1] == 1.0 and one.counts["turns"] == 2


def test_the_opponent_may_begin():
    one = episode(move(3), move(1))  # 5 - (1) - 3 - (1)
    play(game, one, starts=False, **ONE)
    assert "I take 1. There are 4 sticks." in one.messages[0]["content"]
    assert total(one) == -1.0


@pytest.mark.parametrize("says", ["I resign", move(7), move("")])
def test_no_legal_move_loses(says):
    one = episode(says)
    play(game, one, starts=True, illegal=-2.0, **ONE)
    assert total(one) == -2.0 and one.counts["illegal_moves"] == 1 and one.status == Status.OK


def test_there_may_be_another_try():
    one = episode(move(9), move(1), move(3))
    play(game, one, starts=True, tries=2, **ONE)
    assert "That is not possible: you may take 1 or 2 or 3, not '9'." in one.messages[2]["content"]
    assert total(one) == 1.0


def test_a_simulator_has_one_player():
    number = GuessTheNumber(Random("3/5"), highest=4, tries=3).number
    one = episode(move(number))
    play(game, one, rules="GuessTheNumber", settings={"highest": 4, "tries": 3})
    assert total(one) == 1.0


def test_a_group_starts_from_one_position():
    many = [episode(move(1), *["pass"] * 9, index=i) for i in range(3)]
    play(game, *many)
    assert len({one.messages[0]["content"].split("There are")[1] for one in many}) == 1


def test_self_play_trains_both_sides():
    first, second = episode(move(2), move(2), index=0), episode(move(1), index=1)  # 5 - 2 - 1 - 2
    play(self_play, first, second, settings={"sticks": 5})
    assert (total(first), total(second)) == (1.0, -1.0)
    assert "I take 2. There are 3 sticks." in second.messages[0]["content"]
    assert "I take 1. There are 2 sticks." in TOKENIZER.decode(first.rows[0].tokens)
    assert sum(first.rows[0].loss_mask) == 2 * len(TOKENIZER(move(2) + "<|im_end|>")["input_ids"])


def test_in_self_play_an_illegal_move_loses():
    first, second = episode(move(2), index=0), episode("no", index=1)
    play(self_play, first, second, settings={"sticks": 5}, illegal=-3.0)
    assert (total(first), total(second)) == (1.0, -3.0)
    early, other = episode("no", index=0), episode(index=1)
    play(self_play, early, other)
    assert (total(early), total(other)) == (-1.0, 0.0) and not any(other.rows[0].loss_mask)


def test_who_has_had_no_turn_is_in_no_baseline():
    """The first of two games is over before the other side moves, the second one is played and won by who begins."""
    early, idle = episode("no", index=0), episode(index=1)
    winner, loser = episode(move(2), move(2), index=2), episode(move(1), index=3)
    many = [early, idle, winner, loser]
    play(self_play, *many, settings={"sticks": 5})
    assert [one.status for one in many] == [Status.OK, Status.ERROR, Status.OK, Status.OK]
    columns = {"loss_mask": torch.tensor([chosen for one in many for chosen in one.rows[0].loss_mask])}
    status = torch.tensor([int(one.status) for one in many])
    sequence = {"status": status, "reward": torch.tensor([total(one) for one in many]), "group": torch.full((4,), 5)}
    batch = Batch(torch.tensor([len(one.rows[0].tokens) for one in many]), columns, sequence)
    store = LocalStore()
    ref, stats = BatchRef.of(Meta.of(batch), store.put(batch), store).without_errors()
    batch = ref.fetch()
    assert stats["samples/dropped"].value == 1 and batch["reward"].tolist() == [-1.0, 1.0, -1.0]
    found = apply_columns(rloo, batch, {})[0]["advantages"]
    advantages = [found[batch["loss_mask"] & (batch.segment == row)].unique().tolist() for row in range(3)]
    assert advantages == [[-1.0], [2.0], [-1.0]]  # -1 - (1 - 1) / 2, 1 - (-1 - 1) / 2, -1 - (-1 + 1) / 2


def test_self_play_needs_pairs():
    running = play(self_play, *[episode("a", index=i) for i in range(3)])
    assert "samples of group 5 is 3: `self_play` pairs the samples" in str(running.calls[0].error)


def test_the_example_of_ones_own():
    number = episode().random.randint(1, 50)
    wrong = 10 if number > 10 else 40
    one = episode(f"Is it {wrong}?", f"{wrong}", "no idea", f"It is {number}!")
    play(higher_or_lower, one)
    rewards = [value for value in one.rows[0].turn_rewards if value]
    assert rewards == pytest.approx([(10 if number > 10 else 11) / 50, -0.1, -0.1, 1.0])
    assert one.counts["found"] == 1


def test_a_function_plays_the_user():
    one = episode("a", "bye", "never")
    play(simulated_user, one, user="packages.agents.tests.simple_tools:asks_on")
    assert [m["content"] for m in one.messages] == ["What is 2+3?", "a", "And 5?", "bye"]
    short = episode("a", "b", "c")
    play(simulated_user, short, user="packages.agents.tests.simple_tools:asks_on", max_turns=2)
    assert short.counts["turns"] == 2 and short.messages[-1]["content"] == "b"


def test_a_script_plays_the_user():
    one = episode("a", "b", "c", replies=["first", "second"])
    play(simulated_user, one, user="scripted")
    assert [m["content"] for m in one.messages[1:]] == ["a", "first", "b", "second", "c"]
