"""What `coalign check` says of the data: it reads the first rows of each source as the run will."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from coalign.backends.pretrained import find_context_length
from coalign.backends.scorers.reward_functions import resolve_reward
from coalign.config import ConfigError
from coalign.config.errors import ConfigProblem, Key, located_at, suggest
from coalign.config.functions import bind, resolve
from coalign.config.schema import RewardConfig, SourceConfig
from coalign.data.examples import MARKS, Example, RowEncoder, RowLimit
from coalign.data.loader import build_encoder
from coalign.data.shuffle import DataPhase
from coalign.data.sources import find_prefix, open_rows
from coalign.data.templates import decode
from coalign.engine.reward import list_reward_models
from coalign.engine.vocabulary import find_tokenizer_name
from coalign.environments.loop import choose_environment
from coalign.hub import find_directory, is_hub_name
from coalign.hub_data import is_dataset, is_url
from coalign.launch.check import DataFindings, RowLengths
from coalign.launch.data_load import find_row_limits, load_tokenizer
from coalign.launch.plan import Plan, PlannedModel
from coalign.roles import Rollout, Trainable
from coalign.types import SOURCE_KEY
from coalign.weights.model_files import has_tokenizer
from coalign_prepare.file_tokenizer import open_file_tokenizer
from coalign_prepare.reward_check import try_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS, TOKENS = 5_000, 500_000  # read from each source: two seconds of one core
SHOWN = 100  # characters of the first row
WARNING = "warning: "  # marks a line as a warning


@dataclass
class _RowSample:
    """The first rows of a source, encoded. ``is_complete``: the source has no other rows."""

    key: Key
    name: str
    encoder: RowEncoder
    is_complete: bool = True
    used: list[list[Example]] = field(default_factory=list)
    raw: set[str] = field(default_factory=set)  # the different values from which the rows' prompts are made

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens of each used row's prompt, or all of them if it has none."""
        return [_find_prompt(examples[0]) for examples in self.used]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((len(example.tokens) for examples in self.used for example in examples), default=0)

    @property
    def largest(self) -> int:
        """Tokens of the row with the most, in all of its sequences."""
        return max((sum(len(example.tokens) for example in examples) for examples in self.used), default=0)

    def describe(self) -> dict[str, Any]:
        """What was read, as JSON has it. ``complete``: there are no other rows."""
        lengths = [len(prompt) for prompt in self.prompts]
        return {
            "split": self.key[1],
            "source": self.name,
            "rows": self.encoder.counts["rows"],
            "complete": self.is_complete,
            "used": len(self.used),
            "report": self.encoder.report(),
            "prompt_tokens": {"median": median(lengths), "max": max(lengths)} if lengths else None,
            "longest": self.longest,
        }


def check_data(plan: Plan, present: Sequence[PlannedModel], simulated: bool = False) -> DataFindings:
    """Read the first rows of the data. ``present``: the models whose directories are there.

    ``simulated``: the run is placed on a cluster that is not there, so a model's config.json is enough.

    Raises ConfigError, with the key and the row's file and line, for what would end the run or teach it nothing.
    """
    findings, samples = DataFindings(), list[_RowSample]()
    findings.lines += _check_sources(plan, present, samples, simulated=simulated)
    stripped = (line.strip() for line in findings.lines)
    findings.warnings += [line.removeprefix(WARNING) for line in stripped if line.startswith(WARNING)]
    findings.sources += [sample.describe() for sample in samples]
    train = [sample for sample in samples if sample.key[1] == "train"]
    if train and len(train) == len(plan.config.data.train):
        longest, largest = (max(getattr(sample, name) for sample in train) for name in ("longest", "largest"))
        findings.lengths = RowLengths(longest, largest)
    return findings


def _check_sources(
    plan: Plan, present: Sequence[PlannedModel], samples: list[_RowSample], *, simulated: bool
) -> Iterator[str]:
    """Yield lines that describe the data; add what was read to ``samples``."""
    config = plan.config
    if not config.data.train:
        raise ConfigError([ConfigProblem(("data", "train"), "missing: a file of rows, or a dataset of the hub")])
    name, _ = find_tokenizer_name(config)
    if not is_hub_name(name) and not os.path.exists(name):
        yield f"data: not read, because its tokenizer, that of {name}, is not there yet"
        return
    if simulated and not has_tokenizer(find_directory(name)):
        yield f"data: not read, because {name} has no tokenizer; a run is refused until it has one"
        return
    with located_at("models"):
        judges = {name: plan.configs[name] for name in list_reward_models(plan.rewards)}
        tokenizer = load_tokenizer(config, judges, open_file_tokenizer if config.data.images is None else None)
    limits = find_row_limits(plan, present)
    for split in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, split)):
            key: Key = ("data", split, index)
            if find_prefix(source.path) or is_dataset(source.path) or is_url(source.path):
                yield f"data.{split}: {source.path}: its rows are not read here; `coalign inspect-data` shows them"
                continue
            with located_at(*key):
                sample = _read(key, source, plan, tokenizer, limits)
                for environments in (model.context.environments for model in plan.models.values()):
                    for examples in sample.used if environments else ():
                        choose_environment(environments, examples[0].row)
            _check_prompts(sample, plan, tokenizer)
            _check_answers(sample, plan)
            _check_questions(sample, plan)
            yield from _describe(sample, tokenizer)
            yield from _compare_room(sample, present)
            samples.append(sample)
    if samples:
        yield from _compare_numbers([sample for sample in samples if sample.key[1] == "train"], plan)
    if plan.recipe.source == "prompts":
        rows = [sample.used[0][0].row for sample in samples if sample.used]
        yield from try_rewards(plan.rewards, rows, tokenizer)


def _read(
    key: Key, source: SourceConfig, plan: Plan, tokenizer: PreTrainedTokenizerBase, limits: Sequence[RowLimit]
) -> _RowSample:
    """Encode the first rows. ValueError or OSError for what the run would refuse."""
    config, is_train = plan.config.data, key[1] == "train"
    encoder = build_encoder(plan.recipe.source, config, source, tokenizer, limits)
    sample, tokens = _RowSample(key, source.path, encoder), 0
    phase = DataPhase(config.phases, config.phase) if config.phase and is_train else None
    for entry, _ in open_rows(source.path, source.max_samples, stream=True).read():
        if phase is not None and entry.number not in phase:
            continue
        if encoder.counts["rows"] == ROWS or tokens > TOKENS:
            sample.is_complete = False
            break
        if (examples := encoder.use(entry)) is None:
            continue
        sample.used.append(examples)
        tokens += sum(len(example.tokens) for example in examples)
        row = encoder.reader.add_names(entry.row())
        sample.raw.add(json.dumps(row.get(encoder.reader.prompt_key), default=str))
    if not sample.used:
        none = "no usable rows" if sample.is_complete else f"no usable row among its first {encoder.counts['rows']:,}"
        raise ValueError(f"{source.path} has {none} {encoder.describe_emptiness(encoder.report())}")
    return sample


def _find_prompt(example: Example) -> list[int]:
    if example.loss_mask is None or all(example.loss_mask[1:]):
        return example.tokens
    return example.tokens[: example.columns.get("prompt_length", example.loss_mask.index(True))]


def _check_prompts(sample: _RowSample, plan: Plan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a format or a template that makes the same prompt of different rows."""
    prompts = {tuple(prompt) for prompt in sample.prompts}
    if len(prompts) != 1 or len(sample.raw) < 2 or plan.config.rollout.has_episodes:
        return
    if "{" in plan.config.data.prompt_format:
        key, remedy = ("data", "chat_template"), "a template writes the texts of `messages`"
    else:
        key, remedy = ("data", "prompt_format"), "write {prompt} where the text of a row belongs"
    same = _shorten(decode(tokenizer, list(prompts.pop())))
    message = f"makes the same prompt of all {len(sample.used)} rows of {sample.name}, {same}; {remedy}"
    raise ConfigError([ConfigProblem(key, message)])


def _compare_room(sample: _RowSample, present: Sequence[PlannedModel]) -> Iterator[str]:
    """Yield a warning for prompts that leave a policy less room than the longest response needs."""
    for model in present:
        if model.role is not Rollout or not model.config.load:
            continue
        limits = find_context_length(model.config), model.context.sample_tokens
        room, response = min(limit for limit in (*limits, 2**31) if limit), model.config.sampling.max_new_tokens
        if short := sum(len(prompt) + response > room for prompt in sample.prompts):
            yield (
                f"{WARNING}after {short} of these prompts a response ends before its {response} tokens "
                f"(models.{model.name}.sampling.max_new_tokens): {room} are all that is read at once"
            )


def _check_answers(sample: _RowSample, plan: Plan) -> None:
    """Refuse a reward for all sources that compares with a key (its argument `answer_key`) that no row has."""
    rows = [examples[0].row for examples in sample.used]
    for index, reward in enumerate(plan.rewards):
        if reward.fn is None or reward.sources or not rows:
            continue
        answer_key = resolve_reward(reward, f"reward.{index}")[1].get("answer_key")
        if answer_key is not None and all(row.get(answer_key) is None for row in rows):
            names = [name for name in rows[0] if name not in (*MARKS, SOURCE_KEY)]
            message = (
                f"`{reward.called}` compares with a row's '{answer_key}', which no row of {sample.name} has"
                f"{suggest(answer_key, names)}; name the key by data.answer_key, or by the reward's argument answer_key"
            )
            raise ConfigError([ConfigProblem(("reward", index), message)])


def _check_questions(sample: _RowSample, plan: Plan) -> None:
    """Refuse the first row that does not say what a judge is to be asked: a rubric, say."""
    for index, reward in enumerate(plan.rewards):
        if (check := _find_row_check(reward, index, plan)) is None:
            continue
        for row in (examples[0].row for examples in sample.used):
            if reward.sources and row.get(SOURCE_KEY) not in (None, *reward.sources):
                continue
            try:
                check(row)
            except ValueError as error:
                message = f"`{reward.called}` cannot judge {sample.name} row {row['_row']}: {error}"
                raise ConfigError([ConfigProblem(("reward", index), message)]) from None


def _find_row_check(reward: RewardConfig, index: int, plan: Plan) -> Callable[[dict[str, Any]], None] | None:
    """The attribute `check_row` of a reward function, or of the questions of a judge; None if it has none."""
    if reward.model is None:
        fn, arguments = resolve_reward(reward, f"reward.{index}")
        return partial(fn.check_row, **arguments) if hasattr(fn, "check_row") else None
    if (judge := plan.configs[reward.model].judge) is None:
        return None
    cls = resolve(judge.fn, judge.home)
    return getattr(cls(**bind(cls, judge.arguments, f"models.{reward.model}.judge")), "check_row", None)


def _compare_numbers(samples: Sequence[_RowSample], plan: Plan) -> Iterator[str]:
    """Yield warnings about settings that ask for more rows than there are."""
    runtime, rows = plan.config.runtime, sum(len(sample.used) for sample in samples)
    if runtime.tokens_per_step is not None:
        return
    if samples and all(sample.is_complete for sample in samples) and runtime.prompts_per_step > rows:
        yield (
            f"{WARNING}runtime.prompts_per_step is {runtime.prompts_per_step}, and data.train has {rows} rows: a step "
            "repeats some"
        )
    for model in plan.models.values():
        updates = model.config.updates_per_batch
        if model.role is Trainable and updates > runtime.prompts_per_step:
            yield (
                f"{WARNING}models.{model.name}.updates_per_batch is {updates}, and a step has "
                f"{runtime.prompts_per_step} rows (runtime.prompts_per_step): some updates learn nothing"
            )


def _describe(sample: _RowSample, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield what was read, how long it is, and how the first row begins."""
    read = sample.encoder.counts["rows"]
    rows = f"{read} rows" if sample.is_complete else f"of the first {read} rows"
    yield f"data.{sample.key[1]}: {sample.name}: {rows}, {sample.encoder.report()}"
    if sample.encoder.first_long:
        yield f"  {WARNING}{sample.encoder.describe_left_out()}"
    if not sample.used:
        return
    lengths = [len(prompt) for prompt in sample.prompts]
    total = f"; with responses {sample.longest}" if sample.longest > max(lengths) else ""
    first = _shorten(decode(tokenizer, sample.used[0][0].tokens))
    yield f"  prompts of {median(lengths):g} tokens (median), {max(lengths)} at most{total}; the first row: {first}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")
