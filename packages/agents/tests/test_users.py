"""Functions that play the user."""

from random import Random

import pytest

from coalign_agents.users import scripted, simulated_user
from tests.environments.helpers import episode, play


def test_a_row_without_the_script_is_named():
    said = [{"role": "assistant", "content": "a"}]
    with pytest.raises(ValueError, match=r"the row has no list `replies` .*; it has answer, prompt"):
        scripted(said, {"prompt": "?", "answer": "1"}, Random(0))
    assert scripted(said, {"replies": []}, Random(0)) is None


def test_a_user_in_a_process_draws_from_the_random_numbers_of_its_episode():
    """Its draws are those of a user in this process: the generator comes back as the call left it."""
    one = episode("a", "b", "c")
    expected = Random(f"{one.seed}/{one.group}/{one.index}")
    running = play(simulated_user, one, user="packages.agents.tests.simple_tools:draws", max_turns=3)
    assert running.calls[0].error is None
    said = [message["content"] for message in one.messages if message["role"] == "user"][1:]
    assert said == [f"What is {expected.random()}?" for _ in range(2)]


def test_a_user_that_holds_the_interpreter_fails_its_episode_alone():
    bad, good = episode("bad", "b", index=0), episode("a", "b", index=1)
    running = play(simulated_user, bad, good, user="packages.agents.tests.simple_tools:hangs", max_turns=2, timeout=2.0)
    assert [call.reason for call in running.calls] == ["timeout", ""] and good.counts["turns"] == 2
