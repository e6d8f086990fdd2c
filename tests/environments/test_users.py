"""Functions that play the user."""

from random import Random

import pytest

from coalign.environments.conversation import scripted


def test_a_row_without_the_script_is_named():
    said = [{"role": "assistant", "content": "a"}]
    with pytest.raises(ValueError, match=r"the row has no list `replies` .*; it has answer, prompt"):
        scripted(said, {"prompt": "?", "answer": "1"}, Random(0))
    assert scripted(said, {"replies": []}, Random(0)) is None
