"""What lists say of a record of samples.jsonl."""

from __future__ import annotations

import pytest

from coalign.run_files.records import name_group


@pytest.mark.parametrize(
    ("group", "name"), [(0, "group 0"), (12, "group 12"), (-1, "evaluation prompt 1"), (None, "no group")]
)
def test_a_group_has_a_name(group, name):
    assert name_group(group) == name
