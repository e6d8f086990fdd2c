"""The reward module: text in, columns out, failures kept apart."""

import logging

import pytest
import torch

from coalign.backends.scorers.reward_functions import RewardModule
from coalign.config.schema import ModelConfig, RewardConfig
from coalign.data.batch import Batch
from coalign.engine.reward import _RewardTerm, combine_rewards
from coalign.rewards.calls import RewardFunction
from coalign.roles import Context
from coalign.types import Stat, Status, Total
from tests.backends.batches import answered
from tests.tiny import tiny_tokenizer

HERE = "tests.backends.functions:"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return str(path)


@pytest.fixture
def build(tokenizer_dir):
    modules = []

    def build(*rewards, tokenizer=tokenizer_dir):
        entries = tuple(RewardConfig(**{"retries": 0} | reward) for reward in rewards)
        modules.append(RewardModule(ModelConfig(module="reward"), Context(rewards=entries, tokenizer=tokenizer)))
        modules[-1].setup()
        return modules[-1]

    yield build
    for module in modules:
        module.close()


def batch(*responses, prompt="<|im_start|>user\n2+2?<|im_end|>\n", n=2, errors=(), **row):
    """Groups of ``n`` responses to one prompt; each response ends with the end-of-turn token."""
    tokenizer, count = tiny_tokenizer(), len(responses)
    return answered(
        [tokenizer(prompt)["input_ids"]] * count,
        [tokenizer(response + "<|im_end|>")["input_ids"] for response in responses],
        group=torch.arange(count) // n,
        index=(torch.arange(count) % n).int(),
        status=torch.tensor([2 if i in errors else 0 for i in range(count)], dtype=torch.uint8),
        rows=[{"answer": "4"} | row] * count,
    )


SEEN = []


def spy(sample):
    SEEN.append(sample)
    return 0.0


def build_spy(build):
    """A module with a function that stays in this process, where it notes what it sees."""
    SEEN.clear()
    module = build({"fn": "exact_match", "name": "spy"})
    module.functions = [RewardFunction("spy", spy)]
    return module


def test_a_column_of_each_function(build):
    module = build(
        {"fn": "math"}, {"fn": HERE + "group_rank", "weight": 0.5, "scale": 3.0}, {"fn": "math", "name": "m"}
    )
    columns = module.forward_step(batch("so 4", "so 5", "#### 4", "#### 3"))
    assert columns["reward/math"].tolist() == columns["reward/m"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert columns["reward/group_rank"].tolist() == [0.0, 3.0, 3.0, 0.0]
    assert set(columns) == set(RewardModule.columns(module.config, module.context))
    assert all(columns[name].dtype == torch.float32 for name in ("reward/math", "reward/group_rank", "reward/m"))


def test_what_a_function_sees(build):
    build_spy(build).forward_step(batch("héllo", n=1, question="2+2?"))
    (sample,) = SEEN
    assert sample.response == "héllo" and sample.raw_response == "héllo<|im_end|>"
    assert sample.prompt == "<|im_start|>user\n2+2?<|im_end|>\n"
    assert sample.meta == {"answer": "4", "question": "2+2?"}
    assert sample.messages[-1] == {"role": "assistant", "content": "héllo"}
    assert int(sample.loss_mask.sum()) == len("héllo".encode()) + 1
    question = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    build_spy(build).forward_step(batch("4", n=1, messages=question))  # from the row where it is there
    assert SEEN[0].messages == [*question, {"role": "assistant", "content": "4"}]


def test_a_failed_sample_is_never_a_number(build, caplog):
    with caplog.at_level(logging.WARNING):
        columns = build({"fn": HERE + "fails_on_words"}).forward_step(batch("0", "word", "nan", "7"))
    assert columns["reward/fails_on_words"].isnan().tolist() == [False, True, True, False]
    assert columns["reward/fails_on_words"][[0, 3]].tolist() == [0.0, 7.0]
    assert columns["reward/failed/raised"] == Total(1.0) and columns["reward/failed/not_finite"] == Total(1.0)
    assert columns["reward/fails_on_words/length"] == Stat(2.0, 2.0)
    assert "'fails_on_words' failed on 2 of 4 samples" in caplog.text and "group 0, index 1" in caplog.text
    assert "could not convert string to float" in caplog.text


@pytest.mark.parametrize("status", [Status.ERROR, Status.PARTIAL])
def test_rows_that_are_not_at_their_end_are_not_scored(build, status):
    module, given = build_spy(build), batch("1", "2", "3")
    given = given.with_(status=torch.tensor([0, status, Status.TRUNCATED], dtype=torch.uint8))
    columns = module.forward_step(given)
    assert {s.response for s in SEEN} == {"1", "3"}
    assert columns["reward/spy"].isnan().tolist() == [False, True, False]
    assert module.forward_step(given.slice(1, 2))["reward/spy"].isnan().all()
    assert len(module.forward_step(given.slice(0, 0))["reward/spy"]) == 0


def test_what_went_wrong_stands_at_its_row(build, caplog):
    given = batch("a", "2", errors=(1,)), batch("1", "2")
    module = build({"fn": HERE + "as_number", "retries": 1})
    with caplog.at_level(logging.WARNING):
        columns = module.forward_step(given[0])  # of a rollout of which more may come, so nothing is raised
    assert columns["reward/as_number"].isnan().all()
    [failure, none] = columns["reward/as_number/failure"]
    assert failure.startswith("raised: ValueError: could not convert string to float: 'a'") and none == ""
    assert "'as_number' failed on 1 of 1 samples (at most 2 attempts each)" in caplog.text
    assert "in as_number" in caplog.text  # the traceback
    assert module.forward_step(given[1])["reward/as_number/failure"] == ["", ""]
    columns = build({"fn": HERE + "as_number", "weight": 0.0}).forward_step(batch("x 4", "x 5"))
    assert columns["reward/as_number"].isnan().all() and columns["reward/failed/raised"] == Total(2.0)


def test_a_part_of_a_roll_out_that_fails_altogether_costs_its_rows_alone(build):
    module, parts = build({"fn": HERE + "as_number"}), [batch("a", "b"), batch("1", "2")]
    told = [module.forward_step(part) for part in parts]
    scored = Batch.concat(
        [
            Batch(part.lengths, {}, {name: columns[name] for name in module.columns(module.config, module.context)})
            for part, columns in zip(parts, told, strict=True)
        ]
    )
    out, stats = combine_rewards(Batch.concat(parts), scored, terms=[_RewardTerm("as_number")], into="reward")
    assert out["status"].tolist() == [Status.ERROR, Status.ERROR, Status.OK, Status.OK]
    assert out["reward"][2:].tolist() == [1.0, 2.0] and stats["reward/as_number/failed"] == Total(2.0)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "names no reward function"),
        (None, "tokenizer"),
        ([{"fn": "maths"}], "math"),
        ([{"fn": HERE + "absent"}], "absent"),
        ([{"fn": "math", "answer": "x"}], r"reward\[0\]\.answer.*'answer_key'"),
    ],
)
def test_bad_configurations_are_refused_at_once(build, rewards, message):
    with pytest.raises(ValueError, match=message):
        build({"fn": "math"}, tokenizer=None) if rewards is None else build(*rewards)
