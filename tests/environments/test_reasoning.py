"""Episodes of policies that think: what earlier turns keep, by `data.reasoning`."""

from __future__ import annotations

import pytest
import torch

from coalign.data.batch import Batch
from coalign.data.templates import load_template
from coalign.environments.rendering import RenderingError
from coalign.types import Status
from tests.data.families import FAMILIES, RESULT
from tests.environments import helpers
from tests.environments.helpers import TOKENIZER, encode, episode
from tests.environments.test_native import module
from tests.tiny import tiny_model_dir, tiny_tokenizer

SAID = ("<think>\nfirst\n</think>\n\n5", "<think>\nsecond\n</think>\n\nYes", "<think>\nthird\n</think>\n\nNo")
ASKED = "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
SURE = "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


async def chat(one, turns=2, words="Sure?"):
    await one.generate()
    one.reward(0.25)
    for _ in range(turns - 1):
        one.say({"role": "user", "content": words})
        await one.generate()
    one.reward(1.0)


def texts(fn, one, **arguments):
    """What each row of the episode has, and what of it is trained on."""
    rows = helpers.played(fn, one, **arguments).rows
    return [(TOKENIZER.decode(row.tokens), helpers.chosen(row)) for row in rows]


def test_last_makes_each_turn_a_row_with_what_the_policy_reads_then():
    one = episode(*SAID, chat_template=FAMILIES["Qwen3"], reasoning="last")
    rows = texts(chat, one, turns=3)
    before = [ASKED, ASKED + "5<|im_end|>\n" + SURE, ASKED + "5<|im_end|>\n" + SURE + "Yes<|im_end|>\n" + SURE]
    assert rows == [(read + said + "<|im_end|>", said + "<|im_end|>") for read, said in zip(before, SAID, strict=True)]
    for row, asked, read in zip(one.rows, one._policy.asked, before, strict=True):
        assert row.tokens[: row.prompt_length] == encode(read) == asked["tokens"]
    assert len({asked["stream"] for asked in one._policy.asked}) == 3 and one.counts["rows"] == 3
    assert [sum(row.turn_rewards) for row in one.rows] == [0.25, 0.0, 1.0]
    whole = TOKENIZER.apply_chat_template(one.messages, tokenize=False, chat_template=FAMILIES["Qwen3"])
    assert rows[-1][0] + "\n" == whole  # as the family's own template writes it


def test_keep_goes_on_and_trains_every_turn():
    one = episode(*SAID, chat_template="qwen3-training", reasoning="keep")
    [(text, trained)] = texts(chat, one)
    assert text == ASKED + SAID[0] + "<|im_end|>\n" + SURE + SAID[1] + "<|im_end|>"
    assert trained == SAID[0] + "<|im_end|>" + SAID[1] + "<|im_end|>"


async def call(one):
    await one.generate()
    one.say(RESULT)
    await one.generate()


@pytest.mark.parametrize("policy, kept", [("last", True), ("drop", False)])
def test_results_of_tools_end_the_reasoning_of_drop_alone(policy, kept):
    *earlier, (text, trained) = texts(call, episode(*SAID, chat_template="qwen3-training", reasoning=policy))
    assert ("first" in text) == ("first" in trained) == kept and "second" in trained and "3.5" in text
    assert ["first" in row for _, row in earlier] == [True] * (not kept)


def test_a_rewritten_prompt_that_does_not_fit_leaves_the_sample_as_it_was():
    one = episode(*SAID, chat_template=FAMILIES["Qwen3"], reasoning="last")
    one._policy.capacity = len(encode(ASKED + SAID[0])) + 3
    assert texts(chat, one, words="Sure? " * 20) == [(ASKED + SAID[0] + "<|im_end|>", SAID[0] + "<|im_end|>")]
    assert one.status == Status.TRUNCATED and one.rows[0].turn_rewards[-1] == 1.25


def test_what_cannot_be_rewritten_is_refused():
    with pytest.raises(RenderingError, match=r"writes no such block; set data\.reasoning: keep"):
        texts(chat, episode(*SAID, chat_template=FAMILIES["gpt-oss"], reasoning="last"))
    with pytest.raises(RenderingError, match=r"for example data\.chat_template: qwen3-training"):
        texts(chat, episode(*SAID, chat_template=FAMILIES["Qwen3"]))


def test_the_engine_reads_the_rewritten_prompt(tmp_path):
    """Also with one place in the cache, where an earlier turn's keys and values are in the way."""
    directory = tiny_model_dir(tmp_path)
    tokenizer = tiny_tokenizer(directory, chat_template=FAMILIES["Qwen3"])
    prompt = load_template(tokenizer).prompt([{"role": "user", "content": "2+3?"}])
    rows = [{"messages": [{"role": "user", "content": "2+3?"}]}]
    batch = Batch(
        torch.tensor([len(prompt)]), {"tokens": torch.tensor(prompt)}, {"group": torch.tensor([0]), "rows": rows}
    )
    made = []
    for sequences in (8, 1):
        fn, settings = "tests.environments.test_reasoning:short_turns", {"max_sequences": sequences}
        policy = module(directory, fn, samples=3, tokens=40, native=settings, reasoning="last")
        out, stats = policy.generate(batch)
        assert stats["episode/rows"].value == 2.0 and out["branch"].tolist() == [0, 1] * 3
        made.append(out)
    for name in ("tokens", "loss_mask", "rollout_logprobs", "prompt_length"):
        assert torch.equal(made[0][name], made[1][name])
    for row in made[0].select(made[0]["branch"] == 1).rows():
        start = int(row["prompt_length"])
        assert row["loss_mask"].tolist() == [False] * start + [True] * (len(row["tokens"]) - start)
        assert tokenizer.decode(row["tokens"][:start]).endswith(SURE) and start > len(prompt)


async def short_turns(one):
    await one.generate(max_new_tokens=8)
    one.say({"role": "user", "content": "Sure?"})
    await one.generate(max_new_tokens=8)
