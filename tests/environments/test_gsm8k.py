"""The calculator's environment on GSM8K: everything is computed again from the token log."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from coalign.backends.engines.native.native_engine import NativeModule
from coalign.config.schema import ModelConfig, RolloutConfig
from coalign.data.batch import Batch
from coalign.data.templates import load_template, read_samples
from coalign.environments.conversation import find_environment
from coalign.environments.parsers import ToolRequest
from coalign.roles import Context
from coalign.types import Sample, Status
from coalign_graders.math_answer import math
from tests.environments.helpers import TOOLS_CHATML
from tests.gsm8k import TEST
from tests.tiny import tiny_model_dir, tiny_tokenizer

HEADER = "<|im_start|>assistant\n"
END = "<|im_end|>"  # the other special token ends no turn: stops are not found in its name
STOPS = "abcdefghijklmnopqrstuvwxyz"
PER_TURN, TURNS = 8, 3


def two_calls(turn):
    """A policy of random weights writes no calls, so each of its turns is taken for two, of its own token ids."""
    a, b = int(turn.tokens[0]), int(turn.tokens[-1])
    return "", [ToolRequest("calculator", {"expression": wish}) for wish in (f"{a}*{b}", f"{a}+{b}")]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(batch, rows, tokenizer, model) of eight questions, four episodes each."""
    if not TEST.exists():
        pytest.skip("GSM8K is not here")
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    tokenizer = tiny_tokenizer(path, chat_template=TOOLS_CHATML)
    rows = [json.loads(line) for line in TEST.read_bytes().splitlines()[:8]]
    for row in rows:
        row["messages"] = [{"role": "user", "content": row["question"]}]
    tokens = [load_template(tokenizer).prompt(row["messages"]) for row in rows]
    flat = torch.tensor([token for prompt in tokens for token in prompt], dtype=torch.int32)
    prompts = Batch(
        torch.tensor([len(prompt) for prompt in tokens]), {"tokens": flat}, {"group": torch.arange(8), "rows": rows}
    )
    sampling = {"max_new_tokens": 60, "stop": list(STOPS)}
    rollout = {"fn": "tool_use", "tools": ["calculator"], "parser": "tests.environments.test_gsm8k:two_calls"}
    rollout |= {"max_turns": TURNS, "tokens_per_turn": PER_TURN, "timeout": 60.0}
    module = NativeModule(
        ModelConfig(module="native", load=str(path), sampling=sampling),
        Context(
            samples_per_prompt=4, seed=3, tokenizer=str(path), environment=find_environment(RolloutConfig(**rollout))
        ),
    )
    module.setup()
    batch, _ = module.generate(prompts)
    return batch, rows, tokenizer, AutoModelForCausalLM.from_pretrained(path)


def turns_of(tokens: list[int], tokenizer) -> list[tuple[int, int]]:
    """(start, stop) of what the policy said: after each header, to an end, a stop or the limit of a turn."""
    header = tokenizer(HEADER, add_special_tokens=False)["input_ids"]
    ends = {tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in (END, *STOPS)}
    turns, at = [], 0
    while at <= len(tokens) - len(header):
        if tokens[at : at + len(header)] != header:
            at += 1
            continue
        start = at + len(header)
        last = min(start + PER_TURN, len(tokens))
        stop = next((i + 1 for i in range(start, last) if tokens[i] in ends), last)
        turns.append((start, stop))
        at = stop
    return turns


def test_masks_and_what_the_tools_said(played):
    batch, rows, tokenizer, _ = played
    assert len(batch) == 32 and Status.ERROR not in batch["status"].tolist()
    many = 0
    for row in batch.rows():
        tokens = row["tokens"].tolist()
        turns = turns_of(tokens, tokenizer)
        mask = [any(start <= i < stop for start, stop in turns) for i in range(len(tokens))]
        assert row["loss_mask"].tolist() == mask
        assert (row["versions"] == torch.where(row["loss_mask"], 0, -1)).all()
        assert int(row["prompt_length"]) == turns[0][0]
        prompt = tokenizer.decode(tokens[: turns[0][0]])
        assert '"calculator"' in prompt and rows[int(row["group"])]["question"] in prompt
        for (start, stop), (following, _) in pairwise(turns):
            a, b = tokens[start], tokens[stop - 1]
            results = "".join(f"<|im_start|>tool\n{result}<|im_end|>\n" for result in (a * b, a + b))
            end = "" if tokenizer.decode([b]) == END else END
            assert tokenizer.decode(tokens[stop:following]) == f"{end}\n{results}{HEADER}"
        assert turns[-1][1] == len(tokens)  # nothing is written behind the last turn
        many += len(turns) > 1
    assert many >= 8


def test_log_probs(played):
    batch, _, _, model = played
    for row in batch.rows():
        tokens, chosen = row["tokens"].long(), row["loss_mask"][1:]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(row["rollout_logprobs"][1:][chosen], expected[chosen], rtol=0, atol=2e-5)
        assert not row["rollout_logprobs"][1:][~chosen].any()


def test_rewards(played):
    """The answer of GSM8K is never guessed by chance; where a last turn has a number, that number would be right."""
    batch, _, tokenizer, _ = played
    numbers = 0
    for row, sample in zip(batch.rows(), read_samples(batch, tokenizer), strict=True):
        tokens = row["tokens"].tolist()
        start, stop = turns_of(tokens, tokenizer)[-1]
        said = tokenizer.decode(tokens[start:stop], skip_special_tokens=True)
        assert sample.response == said
        gold = sample.meta["answer"].split("####")[1].strip()
        found = re.fullmatch(r"[^\d.,/%$-]*(\d+)[^\d.,/%$-]*", said)
        assert value(sample) == float(found is not None and found[1] == gold)
        if found:
            numbers += 1
            sample.meta["answer"] = f"It is so. #### {found[1]}"
            assert value(sample) == 1.0
    assert numbers >= 2


def value(sample: Sample) -> float:
    answer = asyncio.run(math(sample))
    return answer["reward"] if isinstance(answer, dict) else answer
