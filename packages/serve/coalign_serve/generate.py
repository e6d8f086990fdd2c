"""`coalign generate`: responses to the prompts of a file, optionally scored and reduced to the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

from coalign.backends.engines.rollout_module import RolloutModule
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig, SourceConfig, VisionConfig
from coalign.data.batch import Batch
from coalign.data.loader import Loader, build_loader
from coalign.data.reader import RowReader
from coalign.data.templates import read_samples
from coalign.report.display import Display
from coalign.roles import Context
from coalign.types import Sample, Status
from coalign_serve.config.stages import GenerateConfig
from coalign_serve.judges import ResponseJudge, ResponseToScore, choose_device, open_judge
from coalign_serve.resumable import (
    JsonRecord,
    RecordStream,
    ResumableOutput,
    fingerprint_settings,
    list_inputs,
    require_writable,
)
from coalign_serve.run_model import choose_template, fetch_in_dtype, find_model
from coalign_serve.score import report_unscored, summarise_scores, verdict_entries

# A unit of work, which is generated and kept together, has this many sequences for each one that is decoded at once.
# With fewer, more of the time goes into waiting for the longest response; with more, a killed call loses more.
SEQUENCES_PER_SLOT = 4


def generate(
    config: GenerateConfig,
    output: Path | Callable[[JsonRecord], None],
    display: Display,
    *,
    round: int = 1,
    overwrite: bool = False,
) -> dict[str, float]:
    """Write the responses of ``config.model`` to a file, or hand each to a function; return the counts.

    A record is the prompt's row with `response`, `group` (the draw), `index`, `status`, `tokens`, `logprob`, and
    `score` if there is a judge. ``round`` k draws the prompts that follow those of earlier rounds. Continues where a
    killed call stopped, with the same result: a response depends on seed, group and index, not on what came before.
    Raises ValueError for a directory that is no model, for invalid prompts, and for an output that is an input;
    FileExistsError for a file that another command has written, unless ``overwrite`` says that it may be replaced.
    """
    if isinstance(output, Path):
        require_writable(output, config, overwrite)
    device = choose_device(config.device)
    config = _fit_to_run(config)
    settings = config.model_dump(include={"module", "sampling", "native", "transformers"})
    images = config.data.images
    model = ModelConfig(load=config.model, vision=None if images is None else VisionConfig(), **settings)
    model = fetch_in_dtype(model, config.dtype, device)
    module: RolloutModule = resolve_class(config.module, "coalign.backends")(
        model, Context(seed=config.seed, device=device, images=images, tokens_only=True)
    )
    module.setup()
    limits = module.list_limits(model, "model")
    loader = build_loader(
        config.data, module.tokenizer, kind="prompts", split="train", batch_size=1, seed=config.seed, limits=limits
    )
    count = config.prompts or loader.rows
    size = max(1, SEQUENCES_PER_SLOT * config.native.max_sequences // config.samples)
    has_judge = bool(config.reward or config.reward_model)
    bar = display.progress("generating", count * config.samples)
    started_at, fresh = time.perf_counter(), 0
    with (
        closing(open_judge(config, images)) if has_judge else nullcontext() as judge,
        _open_output(config, output, size, round, overwrite) as partial,
        bar as advance,
    ):
        advance(min(partial.done * size, count) * config.samples)
        for prompts in _draw_prompts(loader, (round - 1) * count, count, size, partial.done):
            records = _respond(module, prompts, config.samples, advance)
            fresh += sum(record["tokens"] for record in records)
            partial.add(_keep(_score(records, judge, config), config) if judge else records)
        counts = _count_results(partial, has_judge)
        partial.finish()
    seconds = time.perf_counter() - started_at
    if judge:
        report_unscored(judge, display)
    if not display.quiet:
        rate = f"{fresh} tokens in {seconds:.1f} s ({fresh / seconds:.0f} tokens/s, {model.dtype})"
        display.note(f"{counts['responses']} responses, {rate}")
    return counts


def _fit_to_run(config: GenerateConfig) -> GenerateConfig:
    """Take the model of a run folder, and the template that a run trained it with, unless the settings name another."""
    name, data = config.model or "", config.data
    given = data.chat_template if "chat_template" in data.model_fields_set else None
    chosen = choose_template(name, given, data.chat_template_kwargs)
    keys = {"chat_template": chosen.chat_template, "chat_template_kwargs": chosen.chat_template_kwargs}
    keys["reasoning"] = data.reasoning or chosen.reasoning
    return config.model_copy(update={"model": find_model(name), "data": data.model_copy(update=keys)})


def _open_output(
    config: GenerateConfig, output: Path | Callable[[JsonRecord], None], size: int, round: int, overwrite: bool
) -> RecordStream:
    if not isinstance(output, Path):
        return RecordStream(output)
    # Finished units are counted, so their size matters here, though `native`, which sets it, changes no response.
    fingerprint = {"round": round, "prompts of a unit": size, **fingerprint_settings(config)}
    return ResumableOutput(output, fingerprint, list_inputs(config), overwrite=overwrite)


def _draw_prompts(loader: Loader, first: int, count: int, size: int, done: int) -> Iterator[Batch]:
    """Yield ``count`` draws from number ``first`` on, ``size`` at a time, without the ``done`` first batches."""
    for _ in range(first + min(done * size, count)):
        loader.next()
    for start in range(done * size, count, size):
        yield Batch.concat([loader.next() for _ in range(min(size, count - start))])


def _respond(module: RolloutModule, prompts: Batch, samples: int, advance: Callable[[int], None]) -> list[JsonRecord]:
    """Return the responses to some prompts, ordered by prompt, then index."""
    finished = 0

    def progress(now: int, total: int, tokens: int) -> None:
        nonlocal finished
        advance(now - finished)
        finished = now

    out = module.generate(prompts, samples=samples, progress=progress)
    assert isinstance(out, Batch)  # statistics come with partial rollouts only
    return [_make_record(sample) for sample in read_samples(out, module.tokenizer)]


def _make_record(sample: Sample) -> JsonRecord:
    return {
        **sample.meta,
        "response": sample.response,
        "group": sample.group,
        "index": sample.index,
        "status": sample.status.label,
        "tokens": int(sample.loss_mask.sum()),
        "logprob": float(sample.logprobs.sum()),
    }


def _score(records: list[JsonRecord], judge: ResponseJudge, config: GenerateConfig) -> list[JsonRecord]:
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
            truncated=r["status"] == Status.TRUNCATED.label,
            locate="{_source} row {_row}".format_map(r).__str__,
        )
        for r in records
    ]
    return [record | verdict_entries(verdict) for record, verdict in zip(records, judge(answers), strict=True)]


def _keep(records: list[JsonRecord], config: GenerateConfig) -> list[JsonRecord]:
    """Return all records, or the best of each prompt (the first of equal ones). Without a score none is best."""
    if config.keep == "all":
        return records
    best: dict[int, JsonRecord] = {}
    for record in records:
        best_so_far = best.get(record["group"])
        if record["score"] is not None and (best_so_far is None or record["score"] > best_so_far["score"]):
            best[record["group"]] = record
    return list(best.values())


def _count_results(partial: RecordStream, has_judge: bool) -> dict[str, float]:
    records = [record for unit in partial.units() for record in unit]
    tokens = sum(record["tokens"] for record in records)
    truncated = sum(record["status"] == Status.TRUNCATED.label for record in records)
    counts: dict[str, float] = {"responses": len(records), "tokens": tokens, "truncated": truncated}
    if has_judge:
        counts |= {name: value for name, value in summarise_scores(records).items() if name != "rows"}
    return counts
