"""`coalign generate`: responses to the prompts of a file, scored and chosen from where that is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from coalign.backends.engines.native.module import NativeModule
from coalign.commands import pipeline
from coalign.commands.judges import ResponseJudge, ResponseToScore, open_judge
from coalign.commands.resumable import JsonRecord, RecordStream, ResumableOutput
from coalign.commands.score import report_unscored, score_entries, summarise_scores
from coalign.config.schema import GenerateConfig, ModelConfig, SourceConfig
from coalign.data.batch import Batch
from coalign.data.loader import Loader, build_loader
from coalign.data.reader import RowReader
from coalign.data.templates import read_samples
from coalign.report.display import Display
from coalign.roles import Context
from coalign.types import Sample, Status

# Sequences that are generated, and kept, together, for each one that is decoded at once: with fewer, more of the time
# goes into waiting for the longest; with more, a killed call loses more.
AHEAD = 4


def generate(
    config: GenerateConfig, output: Path | Callable[[JsonRecord], None], display: Display, *, round: int = 1
) -> dict[str, float]:
    """Write the responses of ``config.model`` to a file, or hand each to a function; the counts of what came out.

    A record is the prompt's row with `response`, `group` (the draw), `index`, `status`, `tokens`, `logprob`, and
    `score` if there is a judge. ``round`` k draws the prompts that follow those of the rounds before. Goes on where a
    killed call stopped, with the same result: a response depends on seed, group and index, not on what came before.
    Raises ValueError for a directory that is no model, and for what is wrong with the prompts.
    """
    module = _model(config)
    loader = build_loader(config.data, module.tokenizer, kind="prompts", split="train", batch_size=1, seed=config.seed)
    count = config.prompts or loader.rows
    size = max(1, AHEAD * config.native.max_sequences // config.samples)
    bar = display.progress("generating", count * config.samples)
    begun, fresh = time.perf_counter(), 0
    with (
        _judged(config) as judge,
        _kept(config, output, size, round) as partial,
        bar as advance,
    ):
        advance(min(partial.done * size, count) * config.samples)
        for prompts in _draws(loader, (round - 1) * count, count, size, partial.done):
            records = _respond(module, prompts, config.samples, advance)
            fresh += sum(record["tokens"] for record in records)
            partial.add(_chosen(_scored(records, judge, config), config) if judge else records)
        counts = _counts(partial, config)
        partial.finish()
    seconds = time.perf_counter() - begun
    if judge:
        report_unscored(judge, display)
    rate = f"{fresh} tokens in {seconds:.1f} s ({fresh / seconds:.0f} tokens/s)"
    if not display.quiet:
        display.note(f"{counts['responses']} responses, {rate}")
    return counts


def _model(config: GenerateConfig) -> NativeModule:
    model = ModelConfig(
        module="native", load=config.model, dtype=config.dtype, sampling=config.sampling, native=config.native
    )
    module = NativeModule(model, Context(seed=config.seed, device=config.device))
    module.setup()
    return module


def _judged(config: GenerateConfig) -> Any:
    judge = open_judge(config)
    return closing(judge) if judge else nullcontext()


def _kept(
    config: GenerateConfig, output: Path | Callable[[JsonRecord], None], size: int, round: int
) -> ResumableOutput | RecordStream:
    """Where the records go: a file that survives a kill, or a function."""
    if not isinstance(output, Path):
        return RecordStream(output)
    # Finished units are counted, so their size matters here, though `native`, which sets it, changes no response.
    return ResumableOutput(output, {"round": round, "prompts of a unit": size, **pipeline.fingerprint_settings(config)})


def _draws(loader: Loader, first: int, count: int, size: int, done: int) -> Iterator[Batch]:
    """``count`` draws from number ``first`` on, ``size`` at a time, without the ``done`` first batches."""
    for _ in range(first + min(done * size, count)):
        loader.next()
    for start in range(done * size, count, size):
        yield Batch.concat([loader.next() for _ in range(min(size, count - start))])


def _respond(module: NativeModule, prompts: Batch, samples: int, advance: Any) -> list[JsonRecord]:
    """The responses to some prompts, ordered by prompt, then index."""
    finished = 0

    def progress(now: int, total: int, tokens: int) -> None:
        nonlocal finished
        advance(now - finished)
        finished = now

    out = module.generate(prompts, samples=samples, progress=progress)
    return [_record(sample) for sample in read_samples(out, module.tokenizer)]


def _record(sample: Sample) -> JsonRecord:
    return {
        **sample.meta,
        "response": sample.response,
        "group": sample.group,
        "index": sample.index,
        "status": sample.status.name.lower(),
        "tokens": int(sample.loss_mask.sum()),
        "logprob": float(sample.logprobs.sum()),
    }


def _scored(records: list[JsonRecord], judge: ResponseJudge, config: GenerateConfig) -> list[JsonRecord]:
    reader = RowReader(config.data, SourceConfig(path=""))
    answers = [
        ResponseToScore(
            r["messages"],
            [{"role": "assistant", "content": r["response"]}],
            row=r,
            group=r["group"],
            index=r["index"],
            tokens=r["tokens"],
            tools=reader.tools(r),
        )
        for r in records
    ]
    return [record | score_entries(verdict) for record, verdict in zip(records, judge(answers), strict=True)]


def _chosen(records: list[JsonRecord], config: GenerateConfig) -> list[JsonRecord]:
    """All records, or the best of each prompt (of equals the first); none where nothing could be scored."""
    if config.keep == "all":
        return records
    best: dict[int, JsonRecord] = {}
    for record in records:
        before = best.get(record["group"])
        if record["score"] is not None and (before is None or record["score"] > before["score"]):
            best[record["group"]] = record
    return list(best.values())


def _counts(partial: ResumableOutput | RecordStream, config: GenerateConfig) -> dict[str, float]:
    records = [record for unit in partial.units() for record in unit]
    tokens = sum(record["tokens"] for record in records)
    cut = sum(record["status"] == Status.TRUNCATED.name.lower() for record in records)
    counts: dict[str, float] = {"responses": len(records), "tokens": tokens, "truncated": cut}
    if config.reward or config.reward_model:
        counts |= {name: value for name, value in summarise_scores(records).items() if name != "rows"}
    return counts
