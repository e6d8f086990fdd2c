"""What a prompt may cost, by its row of data."""

import json

import pytest
import torch

from coalign.backends.engines.request import begin_samples
from coalign.config.schema.rollout import RolloutConfig
from coalign.data.batch import Batch
from coalign.engine.rollouts.selection import add_budgets
from tests.engine.test_partial_rollout import Watched, partial
from tests.runs import run, run_to_end, settings


def prompts(*rows):
    group = torch.arange(len(rows))
    return Batch(torch.ones(len(rows)), {"tokens": group.int()}, {"group": group, "rows": list(rows)})


def test_a_row_says_its_own_numbers_and_the_others_get_the_runs():
    config = RolloutConfig(samples_key="n", max_new_tokens_key="budget")
    rows = prompts({"n": 3, "budget": None}, {"budget": 7}, {"n": None})
    found = add_budgets(rows, config, samples=2, max_new_tokens=16)
    assert found["samples"].tolist() == [3, 2, 2]
    assert found["max_new_tokens"].tolist() == [16, 7, 16]
    assert "samples" not in add_budgets(prompts({"n": 3}), RolloutConfig(), samples=2, max_new_tokens=16)


def test_the_tokens_of_a_group_are_shared_equally():
    config = RolloutConfig(samples_key="n", max_new_tokens_key="budget", group_tokens=17)
    rows = prompts({"n": 3}, {"n": 3, "budget": 4}, {"n": 1}, {})
    found = add_budgets(rows, config, samples=2, max_new_tokens=16)
    assert found["max_new_tokens"].tolist() == [5, 4, 16, 8]  # 17 // 3, its own, the run's, 17 // 2
    assert found["max_new_tokens"].dtype == torch.int32 and found["samples"].tolist() == [3, 3, 1, 2]
    alone = add_budgets(rows, RolloutConfig(group_tokens=17), samples=4, max_new_tokens=16)
    assert alone["max_new_tokens"].tolist() == [4] * 4 and "samples" not in alone
    with pytest.raises(ValueError, match=r"group_tokens is 2, and a prompt has 3 samples"):
        add_budgets(rows, RolloutConfig(samples_key="n", group_tokens=2), samples=2, max_new_tokens=16)


@pytest.mark.parametrize("wrong", [0, 2.5, "3"])
def test_what_is_no_number_of_samples_is_refused(wrong):
    rows, said = prompts({"n": wrong, "_source": "a.jsonl", "_row": 7}), "row 7 of a.jsonl has .* under 'n'; expected a"
    with pytest.raises(ValueError, match=f"samples_key: {said} whole number > 0"):
        add_budgets(rows, RolloutConfig(samples_key="n"), samples=2, max_new_tokens=16)


def test_prompts_begin_as_many_samples_as_they_may():
    rows = add_budgets(prompts({"n": 3}, {}), RolloutConfig(samples_key="n"), samples=2, max_new_tokens=9)
    begun = begin_samples(rows, 2)
    assert begun["group"].tolist() == [0, 0, 0, 1, 1]
    assert begun["index"].tolist() == [0, 1, 2, 0, 1]
    assert "samples" not in begun
    assert begin_samples(prompts({}, {}), 2)["index"].tolist() == [0, 1, 0, 1]
    assert len(begin_samples(prompts({}, {}).slice(0, 0), 2)) == 0


def test_a_run_with_budgets(tmp_path, monkeypatch):
    watched = Watched(monkeypatch)
    rollout = {"samples_key": "n", "max_new_tokens_key": "budget", "round_tokens": 4}
    config = partial(tmp_path, rollout=rollout, steps=2)
    rows = [{"prompt": f"{i}+1=", "n": 2 + i % 2, "budget": 5 + i % 3} for i in range(24)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config["data"] |= {"train": str(tmp_path / "own.jsonl"), "shuffle": False}
    run(config)
    sizes = {group: sum(key[0] == group for key in watched.trained) for group, _ in watched.trained}
    assert sizes == {group: 2 + group % 2 for group in sizes}
    assert all(len(tokens) <= 5 + group % 3 for (group, _), tokens in watched.trained.items())


def test_a_run_keeps_to_the_budget_of_its_groups(tmp_path):
    rollout = {"group_tokens": 14, "round_tokens": 2}
    config = settings(tmp_path, "grpo", steps=2, eval_at_start=False) | {"rollout": rollout}
    config["data"].pop("eval")
    for line in run_to_end(config):
        assert line["tokens/response_max"] == 3 and line["samples/count"] == 16  # 14 // 4 of at most 8
        assert line["samples/truncated"] > 0
