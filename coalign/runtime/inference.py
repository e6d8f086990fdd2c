"""What the commands beside training do: evaluate, generate, inspect data."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from coalign.config.schema import DataConfig, ModelConfig, NativeConfig, RunConfig, SamplingConfig, SourceConfig
from coalign.data.batch import Batch
from coalign.data.loader import Loader
from coalign.data.prompts import PromptSource
from coalign.data.sources import Table, open_rows
from coalign.data.templates import load_template
from coalign.runtime.display import Display
from coalign.types import Context, Status

UNLIMITED = 2**31


def evaluate(config: RunConfig, model: Path | None, display: Display) -> None:
    """Print the metrics of a run's evaluation set; ``model`` replaces the directory that the evaluated model loads."""
    from coalign.cluster.start import start
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


@dataclass(frozen=True)
class Job:
    """What `coalign generate` was asked for. ``source`` is a data file, or None for the one ``prompt``."""

    model: Path
    source: Path | None
    prompt: str | None
    output: Path | None
    key: str
    samples: int
    sampling: SamplingConfig
    chat_template: str
    seed: int
    dtype: str


def generate(job: Job, display: Display) -> None:
    """Responses of one model to the prompts of a file (or one prompt), as JSONL or on the screen."""
    from coalign.modules.native import NativeModule

    if not job.model.is_dir():
        raise ValueError(f"{job.model} is not a directory; a Hugging Face model directory is expected")
    config = ModelConfig(module="native", load=str(job.model), dtype=job.dtype, sampling=job.sampling)
    module = NativeModule(config, Context(seed=job.seed))
    module.setup()
    loader = _prompts(job, module.tokenizer)
    begun, total, tokens = time.perf_counter(), 0, 0
    with _writer(job.output, display) as write, display.progress("generating", loader.rows * job.samples) as advance:
        for prompts in loader.all():
            out = module.generate(prompts, samples=job.samples)
            for record in _records(out, module.tokenizer):
                write(record)
            total, tokens = total + len(out), tokens + int(out["loss_mask"].sum())
            advance(len(out))
    seconds = time.perf_counter() - begun
    display.note(f"{total} responses, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s)")


def _prompts(job: Job, tokenizer: Any) -> Loader:
    source = SourceConfig(path=str(job.source or "--prompt"))
    data = DataConfig(eval=[source], prompt_key=job.key, chat_template=job.chat_template, max_prompt_tokens=UNLIMITED)
    rows = open_rows(job.source) if job.source else Table(Path("--prompt"), 1, lambda _: {job.key: job.prompt})
    examples = PromptSource(source.path, rows, data, source, load_template(tokenizer, job.chat_template))
    chunk = max(1, NativeConfig().max_sequences // job.samples)
    return Loader([examples], [1.0], seed=job.seed, shuffle=False, batch_size=chunk)


@contextmanager
def _writer(output: Path | None, display: Display) -> Iterator[Callable[[dict[str, Any]], None]]:
    """How a record is given out: a line of a file that appears whole at the end, or text on the screen."""
    if output is None:
        yield lambda record: display.show(record["response"])
        return
    aside = output.with_name(output.name + ".writing")
    with open(aside, "w") as out:
        yield lambda record: out.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(aside, output)


def inspect(config: RunConfig, rows: int, display: Display) -> None:
    """Show the first rows of the training data as the trainer will see them."""
    from coalign.data.inspect import describe
    from coalign.runtime.build import load_tokenizer, loader, recipe

    tokenizer = load_tokenizer(config)
    data = loader(config, recipe(config.algorithm), tokenizer, "train")
    display.show(data.report())
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
