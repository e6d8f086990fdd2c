"""GSM8K for the examples: a small model with a tokenizer of its own, and preference data from solutions marked right or
wrong.

    GSM8K=DIRECTORY python examples/gsm8k.py runs/gsm8k    # writes model/, pairs, labelled and scored solutions there

DIRECTORY has gsm8k_train.jsonl and gsm8k_model_solutions.jsonl; README.md says where they come from.
The solutions are those that four models of OpenAI gave to the test questions (2110.14168).
Questions, not solutions, are held out: no question of the evaluation files is in the training files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 5  # every fifth question

Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The rows of a file in the directory that the environment variable GSM8K names."""
    if "GSM8K" not in os.environ:
        sys.exit(f"the environment variable GSM8K is not set; set it to the directory of {name} (see README.md)")
    return [json.loads(line) for line in Path(os.environ["GSM8K"], name).read_bytes().splitlines()]


def write(path: Path, rows: Iterator[Row] | list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def solutions(row: Row) -> list[tuple[str, bool]]:
    """(text, right) of every model's solution to one question, without duplicates."""
    given = [value for value in row.values() if isinstance(value, dict)]
    return list({s["solution"].strip(): (s["solution"].strip(), s["is_correct"]) for s in given}.values())


def pairs(rows: list[Row]) -> Iterator[Row]:
    """Every right solution against every wrong one to the same question."""
    for row in rows:
        right = [text for text, good in solutions(row) if good]
        wrong = [text for text, good in solutions(row) if not good]
        yield from ({"prompt": row["question"], "chosen": r, "rejected": w} for r in right for w in wrong)


def labelled(rows: list[Row]) -> Iterator[Row]:
    """Every solution with whether it is right."""
    for row in rows:
        yield from ({"prompt": row["question"], "answer": text, "label": good} for text, good in solutions(row))


def scored(rows: list[Row]) -> Iterator[Row]:
    """Every solution with a score: 1 if it is right."""
    yield from ({**row, "score": float(row["label"])} for row in labelled(rows))


def make_data(directory: Path) -> None:
    """pairs, labelled and scored solutions, each as *_train.jsonl and *_eval.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = read("gsm8k_model_solutions.jsonl")
    parts = {
        "train": [row for i, row in enumerate(rows) if i % HELD_OUT],
        "eval": [row for i, row in enumerate(rows) if i % HELD_OUT == 0],
    }
    for split, part in parts.items():
        for make in (pairs, labelled, scored):
            write(directory / f"{make.__name__}_{split}.jsonl", make(part))


def make_model(directory: Path) -> None:
    """A random model of 4 million parameters, and a BPE tokenizer of GSM8K's training texts that splits numbers."""
    texts = (row["question"] + "\n" + row["answer"] for row in read("gsm8k_train.jsonl"))
    tokenizer = train_tokenizer(texts, 4096, pad="<|endoftext|>", digits=True)
    shape = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 704}
    write_model(directory, tokenizer, vocab=len(tokenizer), longest=1024, **shape)


def train_tokenizer(texts: Iterable[str], vocab: int, *, pad: str, digits: bool = False) -> Any:
    """A byte-level BPE of at most ``vocab`` tokens with a ChatML template; ``digits``: each is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if digits:
        bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bpe.pre_tokenizer])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(dict.fromkeys(["<|endoftext|>", "<|im_start|>", "<|im_end|>", pad])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token=pad)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def write_model(
    directory: Path,
    tokenizer: Any,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    longest: int,
) -> int:
    """Write a random Qwen2-style model and its tokenizer; the number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=intermediate,
            tie_word_embeddings=True,
            max_position_embeddings=longest,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.num_parameters()


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/gsm8k")
    make_data(folder)
    make_model(folder / "model")
