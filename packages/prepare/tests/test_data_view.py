"""What people are shown of each kind of data."""

import io

from rich.console import Console
from transformers import AutoTokenizer

from coalign import load_config
from coalign.report.display import Display
from coalign_prepare.data_view import describe, show_data, split_groups
from tests.data.reading import TOKENIZER, assistant, batch, user
from tests.runs import settings
from tests.tiny import CHATML, tiny_tokenizer


def shown(made, tokenizer=TOKENIZER, *, styles=False, **options):
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    for group in split_groups(made):
        console.print(describe(group, tokenizer, **options))
    return "\n".join(line.rstrip() for line in console.export_text(styles=styles).splitlines())


def test_a_conversation():
    made = batch("conversations", {"prompt": "hé", "answer": "[b]ü"})
    text = shown(made, tokens=True)
    assert text.startswith(
        "a.jsonl row 0: 29 tokens, 6 trained\n<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n⟦[b]ü<|im_end|>⟧\n"
    )
    assert sum(line.endswith("yes") for line in text.splitlines()) == 6
    assert "\x1b[1;32m⟦[b]ü<|im_end|>⟧" in shown(made, styles=True)


def test_a_prompt_with_tools():
    tokenizer = tiny_tokenizer(chat_template="{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + CHATML)
    made = batch("prompts", {"prompt": "1+1?", "tools": [{"name": "add"}]}, tokenizer=tokenizer)
    assert shown(made, tokenizer).rstrip() == (
        f"a.jsonl row 0: {made.tokens_total} tokens (a prompt)\n"
        '{"name": "add"}\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant'
    )


def test_a_pair_shows_its_prompt_once_and_each_preference():
    made = batch("preferences", {"prompt": "1+1?", "chosen": "2", "rejected": "five", "margin": 0.5})
    assert shown(made) == (
        "a.jsonl row 0: 53 tokens in 2 sequences, 7 trained\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n\n"
        "response 0: preference 1, margin 0.5\n⟦2<|im_end|>⟧\n"
        "response 1: preference 0\n⟦five<|im_end|>⟧"
    )


def test_a_labelled_response():
    made = batch("labelled", {"prompt": "a", "answer": "b", "label": False}, chat_template="none")
    assert shown(made) == "a.jsonl row 0: 3 tokens, 2 trained\nresponse 0: preference 0\na⟦b<|im_end|>⟧"


def test_the_pieces_of_a_document():
    made = batch("documents", {"text": "abcdef"}, {"text": "g"}, max_tokens=4)
    assert shown(made) == (
        "a.jsonl row 0: 8 tokens in 2 sequences, 6 trained\n"
        "piece 0: 4 tokens\na⟦bcd⟧\npiece 1: 4 tokens\nd⟦ef<|im_end|>⟧\n"
        "a.jsonl row 1: 2 tokens, 1 trained\ng⟦<|im_end|>⟧"
    )


def test_the_turns_of_a_conversation_of_which_only_the_last_thinks():
    turns = [user("a?"), {**assistant("a"), "thinking": "A"}, user("b?"), {**assistant("b"), "thinking": "B"}]
    made = batch("conversations", {"messages": turns}, reasoning="last")
    first, second = (f"⟦<think>\n{thought}\n</think>\n\n{answer}<|im_end|>⟧\n" for thought, answer in ("Aa", "Bb"))
    asked = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    assert shown(made) == (
        "a.jsonl row 0: 112 tokens in 2 sequences, 44 trained\n"
        f"piece 0: 44 tokens\n{asked}{first}\n"
        f"piece 1: 68 tokens\n{asked}a<|im_end|>\n{asked.replace('a?', 'b?')}{second}"
    )


def test_labels_stand_where_steps_are_judged():
    row = {"prompt": "p", "steps": ["a", "b"], "labels": [True, 0.25]}
    made = batch("steps", row, chat_template="none", step_separator=";")
    assert shown(made) == "a.jsonl row 0: 6 tokens, 2 judged\npa;⟨1⟩b;⟨0.25⟩<|im_end|>"
    assert [line.split()[-2:] for line in shown(made, tokens=True).splitlines()[-3:]] == [
        ["yes", "1"], ["26", "';'"], ["yes", "0.25"]]  # fmt: skip


def test_data_can_be_looked_at_before_there_is_a_reward(tmp_path, capsys):
    config = settings(tmp_path, "grpo")
    config.pop("reward")
    show_data(load_config(config), 1, Display())
    assert "prompt" in capsys.readouterr().out


def test_where_an_image_stands(load, model, tmp_path):
    row = {"prompt": "See <image>?", "images": ["a.png"], "chosen": "yes", "rejected": "no"}
    text = shown(load(row, kind="preferences").next(), AutoTokenizer.from_pretrained(model))
    text = "".join(text.split())
    assert text.count("<|image_pad|>") == 1
    assert f"<|vision_start|><|image_pad|>⟪{tmp_path}/a.png:6tokens,1x4x6patches⟫<|vision_end|>?" in text
