"""Every recipe still learns exactly as it did: a change in any number of its first steps has to be meant."""

import json

import pytest

from tests.golden.curves import WATCHED, curve
from tests.golden.record import FILE


@pytest.mark.parametrize("name", WATCHED)
def test_the_curve_is_the_one_that_was_kept(name, tmp_path):
    kept = json.loads(FILE.read_text())[name]
    now = curve(name, tmp_path)
    for key, values in kept.items():
        # Other processors round differently; a change of the mathematics shows in the first digits.
        assert now[key] == pytest.approx(values, rel=2e-3, abs=2e-5), key


def test_the_curves_show_learning():
    """Guards against keeping the curve of a recipe that does nothing."""
    kept = json.loads(FILE.read_text())
    assert kept["sft"]["loss/value"][-1] < 0.95 * kept["sft"]["loss/value"][0]
    assert all(norm > 0 for name in kept for norm in kept[name]["loss/grad_norm"])
