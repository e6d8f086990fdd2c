"""GSM8K for SmolLM2: conversations without calculator marks, and pairs of a right and a wrong solution.

    GSM8K=DIRECTORY python -m examples.smollm2.data runs/smollm2/data

A solution loses its marks (`<<48/2=24>>`) and ends in `#### 24`. The pairs are of solutions to the questions of the
test file, since the solutions that are known to be wrong are: `pairs_train.jsonl` is of the questions of
`test_seen.jsonl`, `pairs_eval.jsonl` of those of `test_unseen.jsonl`, every fifth.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from examples.gsm8k import HELD_OUT, Row, pairs, read, write


def clean(solution: str) -> str:
    """Take out the calculator's marks, and put the final answer after `####`."""
    return re.sub(r"\nA: *(.*)$", r"\n#### \1", re.sub(r"<<.*?>>", "", solution))


def clean_pairs(rows: list[Row]) -> Iterator[Row]:
    for pair in pairs(rows):
        yield pair | {"chosen": clean(pair["chosen"]), "rejected": clean(pair["rejected"])}


def conversations(rows: list[Row]) -> list[Row]:
    return [{"question": row["question"], "answer": clean(row["answer"])} for row in rows]


def make_data(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    test, solutions = read("gsm8k_test.jsonl"), read("gsm8k_model_solutions.jsonl")
    unseen = {row["question"] for row in solutions[::HELD_OUT]}
    write(directory / "train.jsonl", conversations(read("gsm8k_train.jsonl")))
    write(directory / "test_seen.jsonl", conversations([row for row in test if row["question"] not in unseen]))
    write(directory / "test_unseen.jsonl", conversations([row for row in test if row["question"] in unseen]))
    write(directory / "pairs_train.jsonl", clean_pairs([row for row in solutions if row["question"] not in unseen]))
    write(directory / "pairs_eval.jsonl", clean_pairs([row for row in solutions if row["question"] in unseen]))


if __name__ == "__main__":
    make_data(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2/data"))
