"""GSM8K for the examples: its files, preference data from solutions marked right or wrong, and a small random model.

    python examples/gsm8k.py             # downloads GSM8K (5 MB) to runs/gsm8k, and makes the rest there
    python examples/gsm8k.py --made      # without a network: problems of the same form, made by a program

GSM8K is of OpenAI (2110.14168, MIT licence), with solutions of four of its models to the test questions. If the
environment variable GSM8K names a directory that has the files (gsm8k_train.jsonl and so on), nothing is downloaded.
Questions, not solutions, are held out: no question of the evaluation files is in the training files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 5  # every fifth question
FOLDER = Path("runs/gsm8k")
SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
FILES = {
    "gsm8k_train.jsonl": "train.jsonl",
    "gsm8k_test.jsonl": "test.jsonl",
    "gsm8k_model_solutions.jsonl": "example_model_solutions.jsonl",
}

Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The rows of a file of GSM8K, which is downloaded if it is not there."""
    path = Path(os.environ.get("GSM8K", FOLDER), name)
    if not path.exists() and name in FILES and "GSM8K" not in os.environ:
        from coalign.hub_data import fetch_data

        (fetched,) = fetch_data(SOURCE + FILES[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fetched, path)
    return [json.loads(line) for line in path.read_bytes().splitlines()]


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


def main() -> None:
    from coalign.report.display import Display

    options = argparse.ArgumentParser(description="GSM8K for the examples, in runs/gsm8k")
    options.add_argument("--made", action="store_true", help="problems made by a program, in place of GSM8K")
    if options.parse_args().made:
        if "GSM8K" in os.environ:
            sys.exit("--made: the environment variable GSM8K names other files; unset it")
        if any((FOLDER / name).exists() for name in FILES):
            sys.exit(f"--made: {FOLDER} has problems already; move it away")
        from word_problems import write_files

        write_files(FOLDER)
    try:
        for name in FILES:
            read(name)
    except (OSError, ValueError) as error:
        sys.exit(f"{error}\nGSM8K=DIRECTORY takes its files from there; --made makes problems without a network.")
    make_data(FOLDER)
    make_model(FOLDER / "model")
    Display().show(f"{FOLDER}: {', '.join(sorted(path.name for path in FOLDER.iterdir()))}")


if __name__ == "__main__":
    main()
