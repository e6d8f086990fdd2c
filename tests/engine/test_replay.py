"""What `mix` makes of the last batches."""

import pytest
import torch

from coalign.data.batch import Batch
from coalign.engine.transforms import mix


def batch(*groups: int) -> Batch:
    group = torch.tensor(groups)
    return Batch(torch.ones(len(groups)), {"tokens": group.int()}, {"group": group, "rows": [{} for _ in groups]})


def test_the_newest_batch_is_whole_and_first():
    mixed, stats = mix(batch(1, 1, 2, 2, 3, 3, 4, 4), batch(5, 5, 6, 6), share=0.5)
    groups = mixed["group"].tolist()
    assert groups[:4] == [5, 5, 6, 6]
    assert len(groups) == 6 and groups[4] == groups[5] in (1, 2, 3, 4)
    assert stats["replay/sequences"].value == 2


def test_the_first_step_has_nothing_to_replay():
    mixed, stats = mix(batch(5, 5, 6, 6))
    assert mixed["group"].tolist() == [5, 5, 6, 6] and stats["replay/sequences"].value == 0


def test_no_group_is_replayed_twice_in_a_step_and_no_more_than_there_are():
    mixed, _ = mix(batch(1, 1), batch(2, 2), batch(3, 3), share=9.0)
    assert sorted(mixed["group"].tolist()) == [1, 1, 2, 2, 3, 3]


def test_the_draw_follows_from_the_newest_batch():
    old = batch(*[g for g in range(20) for _ in range(2)])
    first = [mix(old, batch(30, 31))[0]["group"].tolist() for _ in range(2)]
    assert first[0] == first[1]
    assert any(mix(old, batch(n, n + 1))[0]["group"].tolist()[2:] != first[0][2:] for n in range(40, 60))


def test_a_negative_share_is_refused():
    with pytest.raises(ValueError, match=r"replay.share is -1"):
        mix(batch(1, 2), share=-1.0)
