"""Word problems with worked solutions in the files and the form of GSM8K, made by a program: for machines offline.

They are of a dozen patterns with other names and numbers, so they show how a run works, not how well a model reasons.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("Ann", "Ben", "Carla", "Dmitri", "Emeka", "Farida", "Goro", "Hana", "Ines", "Jakob", "Kim", "Lena")
THINGS = ("apples", "stamps", "marbles", "pencils", "books", "tickets", "shells", "cards", "stickers", "coins")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")  # as OpenAI names its solvers

Steps = list[tuple[str, str, int]]  # what a number is, how it is computed, and the number


def gain_and_lose(draw: random.Random, name: str, other: str, thing: str) -> tuple[str, Steps]:
    a, b = draw.randint(20, 90), draw.randint(5, 40)
    c = draw.randint(2, a + b - 1)
    text = f"{name} has {a} {thing}. {name} buys {b} more and gives {c} to {other}. How many {thing} are left?"
    return text, [(f"{thing} after buying", f"{a}+{b}", a + b), (f"{thing} left", f"{a + b}-{c}", a + b - c)]


def boxes(draw: random.Random, name: str, other: str, thing: str) -> tuple[str, Steps]:
    a, b, c = draw.randint(3, 12), draw.randint(4, 15), draw.randint(2, 11)
    text = f"{name} packs {thing} into {a} boxes of {b}. {c} {thing} do not fit. How many {thing} does {name} have?"
    return text, [(f"{thing} in boxes", f"{a}*{b}", a * b), (f"{thing} in all", f"{a * b}+{c}", a * b + c)]


def share(draw: random.Random, name: str, other: str, thing: str) -> tuple[str, Steps]:
    a, b, c = draw.randint(2, 9), draw.randint(3, 14), draw.randint(1, 20)
    total = a * b - c if a * b > c else a * b + c
    text = f"{name} and {other} have {total} and {a * b - total} {thing}"
    if total > a * b:
        total, c = a * b, 0
        text = f"{name} has {total} {thing}"
    text += f". All of them go to {a} children in equal parts. How many {thing} does a child get?"
    steps = [(f"{thing} together", f"{total}+{a * b - total}", a * b)] if total < a * b else []
    return text, [*steps, (f"{thing} of a child", f"{a * b}/{a}", b)]


def price(draw: random.Random, name: str, other: str, thing: str) -> tuple[str, Steps]:
    a, b = draw.randint(2, 12), draw.randint(2, 9)
    paid = a * b + draw.randint(1, 30)
    text = f"{name} buys {a} {thing} at ${b} each and pays with ${paid}. How many dollars does {name} get back?"
    return text, [(f"dollars for the {thing}", f"{a}*{b}", a * b), ("dollars back", f"{paid}-{a * b}", paid - a * b)]


def twice(draw: random.Random, name: str, other: str, thing: str) -> tuple[str, Steps]:
    a, b = draw.randint(4, 40), draw.randint(2, 5)
    text = f"{name} has {a} {thing}. {other} has {b} times as many. How many {thing} do they have together?"
    return text, [(f"{thing} of {other}", f"{a}*{b}", a * b), (f"{thing} together", f"{a}+{a * b}", a + a * b)]


def weeks(draw: random.Random, name: str, other: str, thing: str) -> tuple[str, Steps]:
    a, b, c = draw.randint(2, 9), draw.randint(2, 6), draw.randint(5, 13)
    text = f"{name} collects {a} {thing} a day for {b} weeks, and loses {c}. How many {thing} are left?"
    days, total = 7 * b, 7 * a * b
    steps = [("days", f"7*{b}", days), (f"{thing} collected", f"{a}*{days}", total)]
    return text, [*steps, (f"{thing} left", f"{total}-{c}", total - c)]


PATTERNS: tuple[Callable[..., tuple[str, Steps]], ...] = (gain_and_lose, boxes, share, price, twice, weeks)


def make_problem(draw: random.Random) -> tuple[str, Steps]:
    name, other = draw.sample(NAMES, 2)
    return draw.choice(PATTERNS)(draw, name, other, draw.choice(THINGS))


def solve(steps: Steps, end: str) -> str:
    """Write a worked solution; ``end`` stands before its answer."""
    lines = [f"The number of {what} is {how} = <<{how}={value}>>{value}." for what, how, value in steps]
    return "\n".join(lines) + f"\n{end}{steps[-1][2]}"


def spoil(draw: random.Random, steps: Steps) -> Steps:
    """Make the last number wrong."""
    what, how, value = steps[-1]
    return [*steps[:-1], (what, how, max(0, value + draw.choice([-10, -2, -1, 1, 2, 10])) if value else 1)]


def write_files(directory: Path, *, train: int = 4000, test: int = 400, seed: int = 0) -> None:
    """Write gsm8k_train.jsonl, gsm8k_test.jsonl, and gsm8k_model_solutions.jsonl of the test's problems."""
    draw, problems = random.Random(seed), dict[str, Steps]()
    while len(problems) < train + test:
        problems.update([make_problem(draw)])
    rows = [{"question": text, "answer": solve(steps, "#### ")} for text, steps in problems.items()]
    solutions = []
    for text, steps in list(problems.items())[train:]:
        row: dict[str, Any] = {"question": text, "ground_truth": solve(steps, "A: ")}
        for model in MODELS:
            tried = spoil(draw, steps) if draw.random() < 0.5 else steps
            row[model] = {"is_correct": tried[-1][2] == steps[-1][2], "solution": solve(tried, "A: ")}
        solutions.append(row)
    directory.mkdir(parents=True, exist_ok=True)
    files = {"train": rows[:train], "test": rows[train:], "model_solutions": solutions}
    for name, content in files.items():
        (directory / f"gsm8k_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
