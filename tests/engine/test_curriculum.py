"""The curriculum: what is known of a prompt, and which prompts are drawn."""

import pytest
import torch

from coalign.config.schema.rollout import CurriculumConfig
from coalign.data.batch import Batch
from coalign.engine.rollouts.selection import Curriculum, _hash_row, pass_rates


class Numbers:
    """A loader whose n-th row asks for n modulo ``count``."""

    def __init__(self, count):
        self.count, self.drawn, self.batch_size = count, 0, 2

    def next(self, rows=None):
        group = torch.arange(self.drawn, self.drawn + rows)
        self.drawn += rows
        asked = [{"prompt": str(n % self.count), "_row": n, "_source": "x"} for n in group.tolist()]
        return Batch(torch.ones(rows), {"tokens": group.int()}, {"group": group, "rows": asked})

    def give_back(self, rows):
        """Every row has the same source."""


def scored(*rewards_of):
    """A batch with the rewards of each prompt's samples."""
    group, reward, rows = [], [], []
    for number, (prompt, rewards) in enumerate(rewards_of):
        group += [100 - number] * len(rewards)
        reward += rewards
        rows += [{"prompt": prompt, "_row": 7}] * len(rewards)
    columns = {"group": torch.tensor(group), "reward": torch.tensor(reward), "rows": rows}
    return Batch(torch.zeros(len(group)), {}, columns)


def asked(batch):
    return [row["prompt"] for row in batch["rows"]]


def test_a_row_is_known_by_its_content_wherever_it_stands():
    here, there = {"prompt": "a", "_source": "x", "_row": 1}, {"_row": 9, "_source": "y", "prompt": "a"}
    assert _hash_row(here) == _hash_row(there) != _hash_row({"prompt": "b"})


def test_pass_rates_by_prompt():
    found = pass_rates(scored(("0", [1.0, 0.0, 1.0, 0.5]), ("1", [0.0])), solved=1.0)
    shares = dict(zip(found["key"], found["share"].tolist(), strict=True))
    assert shares == {_hash_row({"prompt": "0"}): 0.5, _hash_row({"prompt": "1"}): 0.0}
    assert pass_rates(scored(("0", [1.0, 0.5])), solved=0.5)["share"].tolist() == [1.0]
    assert len(pass_rates(scored(), solved=1.0)) == 0


def test_prompts_outside_of_the_bounds_are_passed_over_and_the_untried_are_not():
    curriculum = Curriculum(CurriculumConfig(low=0.1, high=0.9), Numbers(4))
    curriculum.note(pass_rates(scored(("0", [1.0, 1.0]), ("1", [0.0, 1.0]), ("2", [0.0, 0.0])), solved=1.0), step=0)
    prompts, stats = curriculum.draw(4, step=1)
    assert asked(prompts) == ["1", "3", "1", "3"]
    assert prompts["group"].tolist() == [1, 3, 5, 7]
    assert stats["curriculum/passed_over"].value == 4


def test_the_last_measurement_counts_and_is_forgotten_in_time():
    curriculum = Curriculum(CurriculumConfig(high=0.9, forget=3), Numbers(2))
    curriculum.note(pass_rates(scored(("0", [0.0])), solved=1.0), step=0)
    curriculum.note(pass_rates(scored(("0", [1.0])), solved=1.0), step=2)
    assert asked(curriculum.draw(2, step=4)[0]) == ["1", "1"]
    assert asked(curriculum.draw(2, step=5)[0]) == ["0", "1"]


def test_what_is_known_goes_on_with_a_run():
    config = CurriculumConfig(high=0.5)
    curriculum, copy = Curriculum(config, Numbers(3)), Curriculum(config, Numbers(3))
    curriculum.note(pass_rates(scored(("2", [1.0])), solved=1.0), step=4)
    copy.load_state_dict(curriculum.state_dict())
    assert asked(copy.draw(4, step=5)[0]) == asked(curriculum.draw(4, step=5)[0]) == ["0", "1", "0", "1"]


def test_a_run_without_prompts_left_says_so():
    curriculum = Curriculum(CurriculumConfig(high=0.5), Numbers(2))
    curriculum.note(pass_rates(scored(("0", [1.0]), ("1", [1.0])), solved=1.0), step=0)
    with pytest.raises(RuntimeError, match=r"curriculum: of \d+ prompts drawn for step 2 only 0 of 2 .*forget"):
        curriculum.draw(2, step=1)


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"is 0.8, above high \(0.2\)"):
        CurriculumConfig(low=0.8, high=0.2)
