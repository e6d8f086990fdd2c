"""The data of a plan: tokenizer and loaders, checked against its models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.examples import RowLimit
from coalign.data.loader import Loader, build_loader
from coalign.engine.engine import RunData
from coalign.engine.reward import check_reward_sources, list_reward_models
from coalign.engine.vocabulary import check_tokens_fit, find_tokenizer_name
from coalign.hub import find_directory
from coalign.launch.plan import Plan, PlannedModel, check_it_learns, find_token_limit
from coalign.roles import Rollout, Trainable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_data(plan: Plan) -> RunData:
    """The tokenizer and the loaders of a run. ValueError for data or models that do not fit each other."""
    check_lengths(plan, plan.models.values())
    config, source = plan.config, plan.recipe.source
    tokenizer = load_tokenizer(config, {name: plan.configs[name] for name in list_reward_models(plan.rewards)})
    limits, fewest, runtime = find_row_limits(plan, plan.models.values()), plan.recipe.min_rows, config.runtime
    train = load_split(config, source, tokenizer, "train", limits, min_rows=fewest)
    if runtime.steps is None and runtime.tokens and config.data.stream:
        steps = runtime.tokens  # a stream that ends by tokens has no other end; each step trains on one at least
    else:
        steps = runtime.steps or train.steps(runtime.epochs)
    ptx = None
    if config.ptx is not None:  # read as `data` says but for its phases
        ptx = build_loader(
            config.data.model_copy(update={"train": config.ptx.data, "phases": {}, "phase": None}),
            tokenizer,
            kind=config.ptx.kind,
            split="train",
            batch_size=config.ptx.rows_per_step,
            seed=config.seed,
            allow_changed="data" in runtime.allow_changed,
            limits=[limit for model in plan.learning for limit in list_limits(model)],
        )
    held_out = load_split(config, source, tokenizer, "eval", limits, min_rows=fewest) if config.data.eval else None
    for name, rows in (held_out.count_by_source() if held_out else {}).items():
        if rows < fewest:
            raise ValueError(f"data.eval: {rows} usable row is of '{name}', and `{config.algorithm}` needs {fewest}")
    check_reward_sources(plan.rewards, train, held_out)
    for model in plan.learning:
        check_it_learns(model.name, model.config, steps)
    return RunData(tokenizer, train, steps, held_out, ptx)


def check_lengths(plan: Plan, models: Iterable[PlannedModel]) -> None:
    """Refuse responses and rows that are longer than what ``models`` read at once, by their config.json.

    Where prompts are continued, the engine ends sequences in time.
    """
    from coalign.backends import pretrained  # and transformers

    for model in models:
        if model.role is Rollout and model.config.load:
            pretrained.check_context(model.config, model.name)
        elif model.role is Trainable and model.config.load and plan.recipe.source != "prompts":
            pretrained.check_row_length(model.config, model.name, plan.config.data.max_tokens)


def load_tokenizer(
    config: RunConfig, rewards: Mapping[str, ModelConfig], light: Callable[[Path], Any] | None = None
) -> PreTrainedTokenizerBase:
    """The run's tokenizer. ValueError names the directory if it has none, or a model without rows for its ids.

    ``rewards``: the models of the reward; those with a chat template read text, by a tokenizer of their own.
    ``light`` reads a directory's tokenizer without transformers, or returns None.
    """
    from coalign.backends.pretrained import open_tokenizer

    name, trust = find_tokenizer_name(config)
    if not (directory := find_directory(name)).is_dir():
        raise ValueError(f"models: `load: {name}` is not a directory (a Hugging Face model directory is expected)")
    tokenizer = (light and light(directory)) or open_tokenizer(directory, trust_remote_code=trust)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    reads_text = {name for name, model in rewards.items() if model.chat_template}
    for name, model in config.models.items():
        if name not in reads_text:
            check_tokens_fit(f"models.{name}.load", model, highest=highest)
    return tokenizer


def load_split(
    config: RunConfig,
    row_type: str,
    tokenizer: PreTrainedTokenizerBase,
    split: Literal["train", "eval"],
    limits: Sequence[RowLimit] = (),
    *,
    min_rows: int = 1,
) -> Loader:
    """The training or evaluation data of a run. A batch of either gives as many sequences, and ``min_rows`` rows."""
    runtime, rows = config.runtime, config.runtime.prompts_per_step
    if split == "eval":
        rows = max(1, rows * runtime.samples_per_prompt // runtime.eval_samples)
    return build_loader(
        config.data,
        tokenizer,
        kind=row_type,
        split=split,
        batch_size=rows,
        batch_tokens=runtime.tokens_per_step,
        min_rows=min_rows,
        limits=limits,
        seed=config.seed,
        allow_changed="data" in runtime.allow_changed,
    )


# ---- how long a row may be


def find_row_limits(plan: Plan, models: Iterable[PlannedModel]) -> list[RowLimit]:
    """Find the limits that ``models``, whose directories are there, set to a row of the plan's data.

    Policies read prompts, and need room for a token of the response; trainers and scorers read whole rows of data.
    """
    if plan.recipe.source != "prompts":
        return [limit for model in models if model.role is not Rollout for limit in list_limits(model)]
    policies = [m for m in models if m.role is Rollout and m.config.load]
    readers = {m.name: limit for m in plan.models.values() if (limit := find_token_limit(m, plan.compared)) is not None}
    key = "models.{}.max_tokens_per_micro, for prompt and response"
    return [
        *(limit for policy in policies for limit in policy.module.list_limits(policy.config, f"models.{policy.name}")),
        *(RowLimit(limit - 1, key.format(name)) for name, limit in readers.items()),
    ]


def list_limits(model: PlannedModel) -> Iterator[RowLimit]:
    """Yield a model's limits on rows: on one sequence, and on the sequences that its loss compares in a micro-batch.

    A model that reads text cuts it, so it has no limit.
    """
    from coalign.backends.pretrained import find_context_length

    config = model.config
    if not config.load or config.chat_template or config.judge:
        return
    for limit in model.module.list_limits(config, f"models.{model.name}"):
        yield limit
        if limit.scope == "sequence" and model.objective is not None and model.objective.per == "group":
            yield replace(limit, scope="row")
    if (context := find_context_length(config)) is not None:
        yield RowLimit(context, f"max_position_embeddings of models.{model.name}")
