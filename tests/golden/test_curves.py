"""Every recipe still learns exactly as it did: a change in any number of its first steps has to be meant."""

import json
from contextlib import nullcontext

import pytest

from coalign.cluster.future import WorkerError
from tests.golden.curves import STEPS, WATCHED, curve
from tests.golden.record import FILE, rollouts_file
from tests.golden.rollouts import Rollouts, replayed
from tests.runs import stopping_after

LONG = {"pretrain": 1}  # steps of 65,536 tokens: how many of them the fast suite makes
RARE = ("dpo_images", "grpo_images")  # of what the fast suite has in others
SLOW = [pytest.mark.slow, pytest.mark.processors]
CASES = [
    *(pytest.param(name, STEPS, id=name, marks=SLOW if name in (*LONG, *RARE) else ()) for name in WATCHED),
    *(pytest.param(name, steps, id=f"{name}-begins") for name, steps in LONG.items()),
]


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_the_curve_is_the_one_that_was_kept(name, steps, tmp_path):
    kept = json.loads(FILE.read_text())[name]
    rollouts = Rollouts.read(rollouts_file(name)) if rollouts_file(name).exists() else None
    with stopping_after(steps), nullcontext() if rollouts is None else replayed(rollouts):
        now = curve(name, tmp_path)
    for key, values in kept.items():
        # Other processors round differently; a change of the mathematics shows in the first digits.
        assert now[key] == pytest.approx(values[:steps], rel=2e-3, abs=2e-5), key
    # A sample is compared up to its first token of a small margin: that may not become an excuse for comparing nothing.
    assert rollouts is None or rollouts.compared > 0.9 * rollouts.generated


def test_the_curves_show_learning():
    """Guards against keeping the curve of a recipe that does nothing."""
    kept = json.loads(FILE.read_text())
    assert kept["sft"]["loss/value"][-1] < 0.95 * kept["sft"]["loss/value"][0]
    assert all(norm > 0 for name in kept for norm in kept[name]["loss/grad_norm"])


@pytest.mark.parametrize(("column", "message"), [("tokens", "drawn with a margin"), ("rollout_logprobs", "log-probs")])
def test_another_sample_than_the_recorded_one_is_noticed(column, message, tmp_path):
    rollouts = Rollouts.read(rollouts_file("grpo"))
    first = rollouts.calls[0]
    place = int(first["prompt_length"][0])
    changed = first[column].clone()
    changed[place] += 1
    rollouts.calls[0] = first.with_(**{column: changed})
    with pytest.raises(WorkerError, match=message), replayed(rollouts):
        curve("grpo", tmp_path)
