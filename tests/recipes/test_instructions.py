"""The demo's task: what its reward pays, and that training and evaluation share nothing."""

import json

import pytest
import torch

from coalign import Sample, load_config
from examples.instructions import follows, list_words, make_data
from tests.runs import ROOT

QUESTION = {"data_source": "question", "topic": "the moon", "word": "today"}
BEGIN = {"data_source": "begin", "topic": "a cat", "word": "today"}
CONTAIN = BEGIN | {"data_source": "contain"}
SHORT = BEGIN | {"data_source": "short"}
PLAIN = BEGIN | {"data_source": "plain"}


@pytest.mark.parametrize(
    ("row", "response", "paid"),
    [
        (QUESTION, "Is the moon made of cheese?", 1),
        (QUESTION, "The moon is made of cheese.", 0),
        (QUESTION, "Is the sun made of cheese?", 0),  # another topic
        (QUESTION, "What is it? Is the moon made of cheese?", 0),  # two sentences
        (QUESTION, "Is the moon made of", 0),  # cut off
        (QUESTION, "The moon?", 0),
        (BEGIN, "Today all cats sleep in the sun.", 1),
        (BEGIN, "All cats sleep in the sun today.", 0),
        (CONTAIN, "All cats sleep in the sun today.", 1),
        (CONTAIN, "All cats sleep in the sun.", 0),
        (SHORT, "Our old cat sleeps all day in the warm sun.", 1),
        (SHORT, "Our old cat sleeps all day long in the warm sun.", 0),
        (PLAIN, "Our old cat sleeps all day.", 1),
        (PLAIN, "Our old cat, as cats do, sleeps all day.", 0),
        (PLAIN, "", 0),
    ],
)
def test_a_sentence_is_paid_if_it_is_about_the_topic_and_follows_the_instruction(row, response, paid):
    nothing = torch.zeros(0)
    sample = Sample(group=0, index=0, tokens=nothing, loss_mask=nothing, logprobs=nothing, response=response, meta=row)
    assert follows(sample) == paid


def test_evaluation_has_other_topics_and_other_words(tmp_path):
    make_data(tmp_path)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_bytes().splitlines()]
        for name in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (200, 70)
    for key in ("topic", "word"):
        assert not {row[key] for row in train} & {row[key] for row in held_out}
    assert all(row["topic"].split()[-1] in list_words(row["prompt"]) for row in train + held_out)


def test_the_demo_is_a_configuration_that_loads(tmp_path, monkeypatch):
    make_data(tmp_path / "data")
    monkeypatch.setenv("DEMO", str(tmp_path))
    monkeypatch.setenv("SMOLLM2", str(tmp_path))
    config = load_config(ROOT / "examples" / "instructions_grpo.yaml", planned=True)
    assert 0 < config.runtime.eval_every <= config.runtime.steps / 2  # the end is evaluated, too
