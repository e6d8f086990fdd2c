"""What may depend on the processor, as another one computes it: a part of what `make test-processors` runs."""

import pytest

from tests.processors import run

PARTS = [
    "tests/backends/native/test_invariance.py::test_neighbours_do_not_change_a_bit",
    "tests/backends/native/test_continuing.py::test_a_sample_goes_on_as_if_it_had_never_stopped",
    "tests/golden/test_curves.py::test_the_curve_is_the_one_that_was_kept",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_processor():
    done = run("the least of all three", *PARTS, "-k", "small or soft_cap-dtype0 or dtype0-soft_cap or remax or ppo]")
    assert done.returncode == 0, done.stdout
