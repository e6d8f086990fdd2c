"""How often graders pay wrong answers and refuse right ones: `python benchmarks/graders.py`.

Truths are the final answers in `packages/graders/tests/answers.txt`. Wrong answers are a truth with one of its numbers
changed by one, a sign or a relation turned, a bracket opened, an element left out. Right ones are the truth in other
notations. `answer_pairs.jsonl` beside it has the pairs that two graders are tested with by their authors, and ours.
Where an author's name ends in "responses" the answer stands in a whole response, which only the reward itself reads.

Peers are measured if they are installed: Math-Verify (`math-verify`), and the grader of PRM800K with the normalisation
of Hendrycks et al., which `mathruler` ships (`pip install mathruler pylatexenc tqdm`). Prints Markdown tables; the
figures in docs/rewards.md are from here.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from coalign.types import Sample
from coalign_graders.answers import contains, exact_match, f1
from coalign_graders.choice import multiple_choice
from coalign_graders.math_answer import is_same_answer, math

DATA = Path(__file__).resolve().parents[1] / "packages" / "graders" / "tests"
Grader = Callable[[str, str], bool]


def read_answers() -> dict[str, list[str]]:
    """The truths of each data set, by its name."""
    sets: dict[str, list[str]] = {}
    answers: list[str] = []
    for line in (DATA / "answers.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            answers = sets.setdefault(line.removeprefix("# ").split(" (")[0], [])
        elif line:
            answers.append(line)
    return sets


def read_pairs() -> list[tuple[str, str, str, bool]]:
    """(whose test it is, truth, answer, whether they are equal)."""
    lines = (DATA / "answer_pairs.jsonl").read_bytes().splitlines()
    return [(author, gold, answer, bool(equal)) for author, gold, answer, equal in map(json.loads, lines)]


def make_wrong(truth: str) -> list[str]:
    """Answers that differ from a truth in one place."""
    wrong = []
    for number in re.finditer(r"[0-9]+", truth):
        digits = number[0]
        changed = f"{int(digits) + 1:0{len(digits)}d}"
        wrong.append(truth[: number.start()] + changed + truth[number.end() :])
    if relation := re.search(r"\\ge|\\le(?!ft)|\\neq|[<>]", truth):
        turned = {r"\ge": r"\le", r"\le": r"\ge", r"\neq": "=", "<": ">", ">": "<"}[relation[0]]
        if truth.count(relation[0]) == 1:
            wrong.append(truth.replace(relation[0], turned))
    if re.search(r"^\W*(?:left)?[(\[].*,.*[)\]]\W*$", truth) and truth.count(",") == 1 and "(" + truth[1:] != truth:
        wrong.append("(" + truth[1:] if truth[0] == "[" else truth)
    if not re.search(r"[\\a-z(\[]", truth) and "," in truth and ",\\!" not in truth:
        wrong.append(truth.rpartition(",")[0])
    if re.fullmatch(r"-?[0-9.]+|\\frac\{[0-9]+\}\{[0-9]+\}|[0-9]*\\sqrt\{[0-9]+\}|[0-9]*\\pi", truth) and truth != "0":
        wrong.append(truth[1:] if truth[0] == "-" else "-" + truth)
    words = {"even": "odd", "east": "west", "Evelyn": "Carla", "Navin": "Luka", "ellipse": "circle", "Yes": "No"}
    words |= {"(B)": "(C)", "(E)": "(D)", "(C)": "(B)", "No": "Yes"}
    wrong += [truth.replace(word, other) for word, other in words.items() if word in truth and "NO" not in truth]
    return [one for one in dict.fromkeys(wrong) if one != truth]


def make_right(truth: str) -> list[str]:
    """A truth in other notations."""
    bare = truth.strip("$")
    right = [f"${bare}$", f" {bare} ", bare.replace(r"\frac", r"\dfrac")]
    right += [
        bare.replace(r"\frac", r"\tfrac"),
        bare.replace(" ", ""),
        bare.replace(" ", r"\,") if "\\" in bare else bare,
    ]
    right += [bare.replace(r"\left", "").replace(r"\right", ""), re.sub(r"\^(\w)(?!\w)", r"^{\1}", bare)]
    right += [
        re.sub(r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", bare)
        if re.fullmatch(r"-?\\frac\{\d+\}\{\d+\}", bare)
        else bare
    ]
    right += [re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", bare), bare.replace(r"\cup", "∪").replace(r"\pi", "π")]
    if re.fullmatch(r"-?[0-9]+", bare):
        number = int(bare)
        right += [f"x = {number}", f"{number}.0", rf"{number} \text{{ ways}}", f"{number} units", rf"\text{{{number}}}"]
        right += [f"{number:,}", f"{number:,}".replace(",", r",\!"), f"{number:,}".replace(",", "{,}"), f"{{{number}}}"]
        right += [rf"{number}^\circ", rf"{number}\%"]
        if number % 100 == 0 and number:
            right.append(rf"{number // 100} \times 10^2")
    if base := re.fullmatch(r"([0-9]+)_\{?([0-9])\}?", bare):
        right += [f"{base[1]}_{{{base[2]}}}", rf"{base[1]}_{base[2]}"]
    if re.fullmatch(r"[^\\()\[\]a-zA-Z]+(?:[,;][^\\()\[\]a-zA-Z]+)+", bare) and r"\!" not in bare:
        parts = re.split(r"\s*[,;]\s*", bare)
        right += [", ".join(parts[::-1]), rf"\{{{','.join(parts[::-1])}\}}", " and ".join(parts[::-1])]
    if re.fullmatch(r"\([^()]*\)(?:,\s*\([^()]*\))+", bare):
        right.append(", ".join(re.findall(r"\([^()]*\)", bare)[::-1]))
    if r"\cup" in bare and "\\{" not in bare:
        right.append(r" \cup ".join(bare.split(r"\cup")[::-1]))
    if found := re.fullmatch(r"([0-9]+)\s*\\pm\s*([^{}]*\\sqrt\{[0-9]+\})", bare):
        right += [
            f"{found[1]} + {found[2]}, {found[1]} - {found[2]}",
            f"{found[1]} - {found[2]}, {found[1]} + {found[2]}",
        ]
    if found := re.fullmatch(r"([0-9]*)\s*\\sqrt\{([0-9]+)\}", bare):
        right.append(rf"\sqrt{{{int(found[1] or 1) ** 2 * int(found[2])}}}")
    if found := re.fullmatch(r"\\frac\{([0-9]+)\}\{([0-9]+)\}", bare):
        right.append(rf"\frac{{{3 * int(found[1])}}}{{{3 * int(found[2])}}}")
        if 10**6 % int(found[2]) == 0:
            right.append(f"{int(found[1]) / int(found[2]):.12g}")
    if found := re.fullmatch(r"x \\in (.*)", bare):
        right.append(found[1])
    if found := re.fullmatch(r"([a-z]|f\([xn]\)) ?=([^,;=]*)", bare):
        right.append(found[2].strip())
    if r"\begin{pmatrix}" in bare:
        right.append(bare.replace("pmatrix", "bmatrix"))
    if r"\text{(" in bare:
        right += [bare[7:8], f"({bare[7:8]})"]
    elif found := re.fullmatch(r"\\text\{(\w+)\}", bare):
        right += [found[1], found[1].capitalize(), rf"\textbf{{{found[1]}}}"]
    return [one for one in dict.fromkeys(right) if one != truth]


def find_graders() -> dict[str, Grader]:
    graders: dict[str, Grader] = {"Coalign": is_same_answer}
    if importlib.util.find_spec("math_verify"):
        import logging

        from math_verify import parse, verify

        logging.disable(logging.ERROR)

        def math_verify(gold: str, answer: str) -> bool:
            both = [parse(rf"\boxed{{{one.strip('$')}}}", parsing_timeout=None) for one in (gold, answer)]
            return bool(verify(*both, timeout_seconds=None))

        graders["Math-Verify"] = math_verify
    if importlib.util.find_spec("mathruler"):
        grader: Any = importlib.import_module("mathruler.grader")
        normalise: Any = importlib.import_module("mathruler.math_normalize").normalize_answer
        graders["PRM800K"] = lambda gold, answer: bool(grader.grade_answer(answer, gold))
        graders["Hendrycks"] = lambda gold, answer: normalise(gold) == normalise(answer)
    return graders


def measure(grader: Grader, wrong: list[tuple[str, str]], right: list[tuple[str, str]]) -> tuple[list, list, float]:
    """The wrong pairs that are paid, the right ones that are refused, and milliseconds for each pair."""

    def ask(pair: tuple[str, str]) -> bool:
        try:
            return grader(*pair)
        except Exception:
            return False

    begun = time.perf_counter()
    paid, refused = [pair for pair in wrong if ask(pair)], [pair for pair in right if not ask(pair)]
    return paid, refused, 1000 * (time.perf_counter() - begun) / max(1, len(wrong) + len(right))


def print_rows(name: str, pairs: tuple[list, list], graders: dict[str, Grader], show: bool) -> None:
    for grader, function in graders.items():
        paid, refused, pace = measure(function, *pairs)
        shares = " | ".join(
            f"{100 * len(bad) / len(all_) if all_ else 0:.1f} % of {len(all_)}"
            for bad, all_ in zip((paid, refused), pairs, strict=True)
        )
        print(f"| {name} | {grader} | {shares} | {pace:.1f} |", flush=True)
        if show:
            for title, bad in (("paid", paid), ("refused", refused)):
                for pair in bad:
                    print(f"    {title}: {pair}")


def list_reward_cases() -> Iterator[tuple[str, Any, str, str, bool]]:
    """(reward, function, truth, response, whether it is right) for the graders of text."""
    names = ["Paris", "New York", "the Seine", "Marie Curie", "1789", "carbon dioxide", "yes", "Henry VIII"]
    says = ["The answer is {}.", "Answer: {}", r"\boxed{{\text{{{}}}}}", "#### {}", "**Answer:** {}", "A: {}"]
    for i, truth in enumerate(names):
        for other in names:
            for template in says:
                yield "math, of words", math, truth, template.format(other), other == truth
        yield "math, of words", math, truth, rf"\boxed{{{truth}}}. The answer is correct.", True
        yield "math, of words", math, truth, rf"not {truth}: \boxed{{{names[i - 1]}}}", False
        for response in (truth, f" {truth}\n"):
            yield "exact_match", exact_match, truth, response, True
        for response in (truth[:-1], truth + "s", f"It is {truth}.", names[i - 1], ""):
            yield "exact_match", exact_match, truth, response, False
        yield "contains", contains, truth, f"It is {truth}, I think.", True
        yield "contains", contains, truth, f"It is {names[i - 1]}.", names[i - 1] == truth
        for response in (truth, truth.upper() + ".", f"The {truth}!"):
            yield "f1 (1.0 or not)", f1, truth, response, True
        for response in (names[i - 1], f"{truth} or {names[i - 1]}", ""):
            yield "f1 (1.0 or not)", f1, truth, response, False
    commits = [
        "The answer is {}.",
        "Answer: ({})",
        r"\boxed{{{}}}",
        "#### {}",
        "**{}**",
        "So the correct option is {}.",
    ]
    for truth in "ABCDE":
        for other in "ABCDE":
            for template in commits:
                yield "multiple_choice", multiple_choice, truth, template.format(other), other == truth
                yield "multiple_choice", multiple_choice, truth, template.format(f"{truth} or {other}"), False


def grade(function: Any, truth: str, response: str) -> bool:
    sample = cast(Sample, SimpleNamespace(response=response, meta={"answer": truth}))
    value = function(sample)
    return (asyncio.run(value) if asyncio.iscoroutine(value) else value) == 1.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split(":")[0])
    options.add_argument("--show", action="store_true", help="print the pairs that a grader gets wrong")
    options.add_argument("--only", help="one grader")
    arguments = options.parse_args()
    graders = {name: one for name, one in find_graders().items() if arguments.only in (None, name)}
    print("| answers | grader | wrong ones paid | right ones refused | ms a pair |\n|---|---|---|---|---|")
    for name, truths in read_answers().items():
        wrong = [(truth, answer) for truth in truths for answer in make_wrong(truth)]
        several = [pair for pair in wrong if len(re.findall("[0-9]+", pair[0])) > 1]
        right = [(truth, answer) for truth in truths for answer in make_right(truth)]
        print_rows(name, (wrong, right), graders, arguments.show)
        print_rows(f"{name}, several numbers", (several, []), graders, False)
    for author in dict.fromkeys(pair[0] for pair in read_pairs()):
        pairs = [pair[1:] for pair in read_pairs() if pair[0] == author]
        sides = [(g, a) for g, a, equal in pairs if not equal], [(g, a) for g, a, equal in pairs if equal]
        readers = {"Coalign": partial(grade, math)} if author.endswith("responses") else graders
        print_rows(f"pairs of {author}", sides, readers, arguments.show)
    print("\n| reward | wrong ones paid | right ones refused |\n|---|---|---|")
    cases = list(list_reward_cases())
    for name in dict.fromkeys(case[0] for case in cases):
        results = [(grade(*case[1:4]), case[4]) for case in cases if case[0] == name]
        wrong, right = [paid for paid, equal in results if not equal], [not paid for paid, equal in results if equal]
        shares = " | ".join(f"{100 * sum(bad) / len(bad):.1f} % of {len(bad)}" for bad in (wrong, right))
        print(f"| {name} | {shares} |")


if __name__ == "__main__":
    main()
