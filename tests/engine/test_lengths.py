"""Prompts are shared out among replicas by what their responses took before."""

import torch

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.batch_shards import shard_rows
from coalign.data.batch import Batch
from coalign.engine.rollouts.selection import _ResponseLengths, response_lengths
from coalign.engine.rollouts.unfinished import _continue_groups
from coalign.types import Status
from tests.cluster.threads import store_batch


def prompts(*texts):
    group = torch.arange(len(texts))
    rows = [{"prompt": text} for text in texts]
    return Batch(torch.ones(len(texts)), {"tokens": group.int()}, {"group": group, "rows": rows})


def answered(**lengths_of):
    """Two tokens of prompt, and responses of these lengths."""
    counts = [(text, n) for text, lengths in lengths_of.items() for n in lengths]
    mask = torch.cat([torch.tensor([False] * 2 + [True] * n) for _, n in counts])
    group = torch.tensor([list(lengths_of).index(text) for text, _ in counts])
    rows = [{"prompt": text} for text, _ in counts]
    return Batch(torch.tensor([2 + n for _, n in counts]), {"loss_mask": mask}, {"group": group, "rows": rows})


def test_expectations_are_means_and_those_of_the_unknown_the_average():
    lengths = _ResponseLengths()
    assert lengths.expect(prompts("a", "b"))["expected_tokens"].tolist() == [1, 1]
    lengths.note(response_lengths(answered(a=[2, 4], b=[10], c=[0, 0])))
    copy = _ResponseLengths()
    copy.load_state_dict(lengths.state_dict())
    # (3 + 10 + 0) / 3 = 4.33 for what is not known; nobody is expected to take less than one token.
    assert copy.expect(prompts("b", "x", "a", "c"))["expected_tokens"].tolist() == [10, 4, 3, 1]


def dealt(ref):
    """Rows of each of two replicas."""
    return [rows.tolist() for rows in shard_rows(ref, 2, "work").rows]


def test_replicas_get_equal_work_the_longest_first():
    ref = store_batch(prompts(*"abcdef").with_(expected_tokens=torch.tensor([10, 10, 50, 15, 10, 10]).int()))
    assert dealt(ref) == [[3, 0, 1, 4, 5], [2]]
    both = BatchRef.concat([ref.slice(1, 3), ref.slice(0, 1)])
    assert both.work.tolist() == [10, 50, 10] and dealt(both) == [[0, 2], [1]]
    alike = store_batch(prompts("a", "b"))
    assert BatchRef.concat([alike, alike]).work is None  # nothing is known of them


def test_a_prompt_with_more_samples_is_more_work():
    ref = store_batch(prompts(*"abc").with_(samples=torch.tensor([8, 4, 4]).int()))
    assert dealt(ref) == [[0], [1, 2]]


def test_what_has_ended_is_no_work_any_more():
    columns = {"group": torch.tensor([7, 7]), "rows": [{}, {}], "index": torch.arange(2).int()}
    columns |= {"prompt_length": torch.ones(2).int(), "status": torch.tensor([0, int(Status.PARTIAL)]).to(torch.uint8)}
    log = {"tokens": torch.zeros(5).int(), "loss_mask": torch.tensor([False, True, True, False, True])}
    log |= {"rollout_logprobs": torch.zeros(5), "versions": torch.tensor([-1, 3, 3, -1, 3]).int()}
    carried = Batch(torch.tensor([3, 2]), log, columns | {"expected_tokens": torch.tensor([9, 9]).int()})
    fresh = prompts("a").with_(expected_tokens=torch.tensor([5]).int())
    samples, stats = _continue_groups(carried, fresh, samples=2, oldest_version=3)
    assert samples["expected_tokens"].tolist() == [0, 9, 5, 5] and stats == {}
    samples, stats = _continue_groups(carried, fresh, samples=2, oldest_version=4)
    assert samples["group"].tolist() == [0, 0]
    assert {name: metric.value for name, metric in stats.items()} == {
        "rollout/given_up": 1,
        "rollout/given_up_tokens": 3,
    }
