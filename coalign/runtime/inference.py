"""What the commands beside training do: evaluate, generate, inspect data."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from coalign.config.schema import DataConfig, ModelConfig, NativeConfig, RunConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.runtime.display import Display
from coalign.types import Context, Status


def evaluate(config: RunConfig, model: Path | None, display: Display) -> None:
    """Print the metrics of a run's evaluation set; ``model`` replaces the directory that the evaluated model loads."""
    from coalign.cluster import start
    from coalign.runtime.build import build, recipe
    from coalign.runtime.folder import flatten

    names = recipe(config.algorithm).evaluates
    if not config.data.eval:
        raise ValueError("data.eval: there is nothing to evaluate on; name a file")
    if model is not None:
        models = {n: m.model_copy(update={"load": str(model), "init": "load"}) for n, m in config.models.items()}
        config = config.model_copy(update={"models": models})
    cluster = start(config)
    try:
        engine = build(config, cluster, only=names)
        stats, _ = engine.evaluator.evaluate()
    finally:
        cluster.shutdown()
    display.table("evaluation", flatten(stats))


def generate(
    model: Path,
    *,
    source: Path | None,
    prompt: str | None,
    output: Path | None,
    key: str,
    samples: int,
    sampling: SamplingConfig,
    chat_template: str,
    seed: int,
    dtype: str,
    display: Display,
) -> None:
    """Responses of one model to the prompts of a JSONL file (or one prompt), as JSONL or on the screen."""
    from transformers import AutoTokenizer

    from coalign.data.loader import build_loader
    from coalign.modules.native import NativeModule

    begun = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if source is None:
        source = _single(prompt, key)
    loader = build_loader(
        DataConfig(eval=[{"path": str(source)}], prompt_key=key, chat_template=chat_template, max_prompt_tokens=2**20),
        tokenizer,
        kind="prompts",
        split="eval",
        batch_size=NativeConfig().max_sequences // samples or 1,
        seed=seed,
    )
    engine = NativeModule(
        ModelConfig(module="native", load=str(model), dtype=dtype, sampling=sampling), Context(seed=seed)
    )
    engine.setup()
    total, tokens = 0, 0
    with _lines(output, display) as write, display.progress("generating", len(loader) * samples) as advance:
        for prompts in loader.all(None):
            out = engine.generate(prompts, samples=samples)
            tokens += int(out["loss_mask"].sum())
            for record in _records(out, tokenizer):
                write(record)
                total += 1
            advance(len(out))
    seconds = time.perf_counter() - begun
    display.note(f"{total} responses, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s)")


def inspect(config: RunConfig, rows: int, display: Display) -> None:
    """Show the first rows of the training data as the trainer will see them."""
    from coalign.data.inspect import describe
    from coalign.runtime.build import load_tokenizer, loader, recipe

    tokenizer = load_tokenizer(config)
    data = loader(config, recipe(config.algorithm), tokenizer, "train")
    display.note(data.report())
    batch = data.next()
    for row in islice(batch.rows(), rows):
        display.show(describe(row, tokenizer))


def _records(out: Batch, tokenizer: Any) -> Iterator[dict[str, Any]]:
    for row in out.rows():
        tokens, start = row["tokens"], int(row["prompt_length"])
        yield {
            **(row["rows"] or {}),
            "response": tokenizer.decode(tokens[start:], skip_special_tokens=True),
            "index": int(row["index"]),
            "status": Status(int(row["status"])).name.lower(),
            "tokens": len(tokens) - start,
            "logprob": float(row["rollout_logprobs"].sum()),
        }
