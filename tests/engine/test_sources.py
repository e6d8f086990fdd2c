"""Rows of several sources: rewards, metrics, the filter and evaluation of each. Values are worked by hand."""

import json
import math
from pathlib import Path

import pytest
import torch

from coalign import evaluate
from coalign.data.batch import Batch
from coalign.engine.reward import _RewardTerm, combine, combine_rewards, observe_rewards
from coalign.engine.rollouts.bundle import describe_sources
from coalign.engine.rollouts.selection import filter_groups
from coalign.rewards.calls import RewardError
from coalign.types import Stat, Status, Total
from tests.runs import run, run_to_end, samples, settings

NAN = math.nan
SOURCES = ["sums", "sums", "words", "words", "other"]
GROUP = [0, 0, 1, 1, 2]


def responses(sources=SOURCES, **columns):
    n = len(sources)
    return Batch(
        torch.ones(n),
        {"loss_mask": torch.ones(n, dtype=torch.bool)},
        {
            "group": torch.tensor(GROUP[:n]),
            "status": torch.zeros(n, dtype=torch.uint8),
            "rows": [{"data_source": source} for source in sources],
            **columns,
        },
    )


def scored(**values):
    return Batch(torch.ones(5), {}, {f"reward/{name}": torch.tensor(own) for name, own in values.items()})


def test_a_part_counts_for_its_sources_alone():
    """sums: 2·a. words: 2·a - b. other: no part with weight, so no reward; its values of a and b are not looked at."""
    parts = scored(a=[1.0, 2.0, 3.0, 4.0, 9.0], b=[NAN, 9.0, 1.0, 0.5, NAN], c=[5.0] * 5)
    terms = [
        _RewardTerm("a", 2.0, sources=("sums", "words")),
        _RewardTerm("b", -1.0, sources=("words",)),
        _RewardTerm("c", 0.0),
    ]
    batch, stats = combine_rewards(responses(), parts, terms=terms, into="reward")
    assert batch["reward"][:4].tolist() == [2.0, 4.0, 5.0, 7.5] and batch["reward"][4].isnan()
    assert batch["status"].tolist() == [0, 0, 0, 0, int(Status.ERROR)]
    assert stats["reward/a/mean"] == Stat(10.0, 4.0) and stats["reward/b/mean"] == Stat(1.5, 2.0)
    assert stats["reward/unrewarded"] == Total(1.0) and not any("failed" in name for name in stats)
    assert torch.equal(batch["reward/b"].isnan(), torch.tensor([True, True, False, False, True]))


def test_a_value_that_is_missing_fails_where_the_part_counts():
    parts, terms = (
        scored(a=[1.0] * 5, b=[NAN, NAN, NAN, 1.0, NAN]),
        [_RewardTerm("a"), _RewardTerm("b", sources=("words",))],
    )
    batch, stats = combine_rewards(responses(), parts, terms=terms, into="reward")
    assert batch["status"].tolist() == [0, 0, int(Status.ERROR), 0, 0] and stats["reward/b/failed"] == Total(1.0)


def test_if_no_part_is_for_the_rows_the_error_says_so():
    with pytest.raises(RewardError, match=r"no part with weight is for the sources of these rows"):
        combine_rewards(responses(), scored(a=[1.0] * 5), terms=[_RewardTerm("a", sources=("typo",))], into="reward")


def test_moments_are_those_of_the_rows_that_have_the_part():
    """b over rows 2 and 3: mean 2, deviation 1; rows without it get a alone."""
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [NAN, NAN, 1.0, 3.0]])
    terms = [_RewardTerm("a"), _RewardTerm("b", 1.0, "batch", sources=("words",))]
    expected = pytest.approx([1.0, 2.0, 3.0 - 1, 4.0 + 1], abs=1e-5)
    assert combine(values, torch.tensor([0, 0, 1, 1]), terms, {}).tolist() == expected
    terms[1] = _RewardTerm("b", 1.0, "group", sources=("words",))
    assert combine(values, torch.tensor([0, 0, 1, 1]), terms, {}).tolist() == expected
    terms[1] = _RewardTerm("b", 1.0, "running", sources=("words",))
    names = {"count": [0.0], "mean": [0.0], "squares": [0.0]}
    before = Batch(torch.zeros(1), {}, {k: torch.tensor(v, dtype=torch.float64) for k, v in names.items()})
    parts = scored(a=[1.0] * 5, b=[7.0, 7.0, 1.0, 3.0, 7.0])
    seen = observe_rewards(before, responses(), parts, terms=terms)
    assert (seen["count"].item(), seen["mean"].item()) == (2.0, 2.0)


def test_metrics_of_each_source():
    reward = torch.tensor([1.0, 0.0, 2.0, 4.0, NAN])
    assert describe_sources([{"data_source": name} for name in SOURCES], torch.tensor(GROUP), reward) == {
        "source/sums/samples": Total(2.0),
        "source/sums/groups": Total(1.0),
        "source/sums/reward": Stat(1.0, 2.0),
        "source/words/samples": Total(2.0),
        "source/words/groups": Total(1.0),
        "source/words/reward": Stat(6.0, 2.0),
        "source/other/samples": Total(1.0),
        "source/other/groups": Total(1.0),
        "source/other/reward": Stat(0.0, 0.0),
    }


def test_the_filter_counts_each_source():
    def keep(index):
        return index > 0

    batch = responses(index=torch.tensor([1, 0, 1, 1, 1]))  # the group of sums has one that is not kept
    kept, stats = filter_groups(batch, keep=keep, arguments={}, by_source=True)
    assert kept["group"].tolist() == [1, 1, 2]
    assert {name: total.value for name, total in stats.items()} == {
        "filter/kept": 2.0,
        "filter/dropped": 1.0,
        "filter/dropped_tokens": 2.0,
        "source/sums/kept": 0.0,
        "source/sums/dropped": 1.0,
        "source/words/kept": 1.0,
        "source/words/dropped": 0.0,
        "source/other/kept": 1.0,
        "source/other/dropped": 0.0,
    }


def two_sources(tmp_path, **changes):
    """A GRPO run on two files, of which the second has rows of its own source."""
    config = settings(tmp_path, "grpo", steps=2, eval_prompts=2, eval_at_start=False, log_samples=2)
    rows = [json.loads(line) for line in Path(config["data"]["train"]).read_bytes().splitlines()]
    files = {}
    for name, own in (("first", rows[:8]), ("second", [row | {"data_source": "words"} for row in rows[8:16]])):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in own))
    paths = [{"path": str(files["first"]), "name": "sums"}, str(files["second"])]
    config["data"] |= {"train": paths, "eval": paths}
    config["reward"] = [
        {"fn": "tests.functions:always", "sources": ["sums"]},
        {"fn": "tests.functions:length", "sources": "words", "weight": 0.5},
    ]
    return config | changes


def test_a_run_with_two_sources(tmp_path):
    config = two_sources(tmp_path)
    lines = run_to_end(config)
    assert {line["source/sums/reward"] for line in lines if "source/sums/reward" in line} == {1.0}
    for line in lines:
        groups = line.get("source/sums/groups", 0) + line.get("source/words/groups", 0)
        assert groups == 4 and line["samples/count"] == 16
        if "source/words/reward" in line:
            assert line["source/words/reward"] == pytest.approx(line["reward/length/mean"] / 2)
    evaluated = [one["row"].get("data_source", "sums") for one in samples(config) if one["phase"] == "eval"]
    assert evaluated == ["sums", "words"]  # spread over the sources
    found = evaluate(config, quiet=True)
    assert found["eval/sums/mean@1"] == 1.0
    assert found["eval/mean@1"] == pytest.approx((found["eval/sums/mean@1"] + found["eval/words/mean@1"]) / 2)
    assert found["eval/words/reward/length/mean"] == found["eval/reward/length/mean"]  # sums have none


@pytest.mark.parametrize(
    "parts, message",
    [
        (
            [{"fn": "math"}, {"fn": "math", "name": "m", "sources": "wrds"}],
            r"reward\[1\]\.sources: .*did you mean 'words'",
        ),
        ([{"fn": "math", "sources": "words"}], r"no part with weight is for rows of 'sums' \(data\.train\)"),
    ],
)
def test_sources_that_no_row_has_are_refused(tmp_path, parts, message):
    with pytest.raises(ValueError, match=message):
        run(two_sources(tmp_path, reward=parts))


def test_servers_refuse_sources(tmp_path):
    from coalign_serve.config.stages import JudgeConfig

    with pytest.raises(ValueError, match="is for runs"):
        JudgeConfig.model_validate({"reward": {"fn": "math", "sources": ["a"]}})
