"""Rollouts that are kept with a curve, so that a curve depends on training alone.

A sampler turns the last bit of a logit into another token now and then, and another processor rounds differently. So a
golden run trains on the rollouts of the file, whatever its own engine draws, and the engine is checked apart: it has to
draw the same tokens, up to the first one that a rounding error could have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coalign.backends.engines.rollout_module import RolloutModule
from coalign.backends.engines.sampling import stream_key, truncate, uniforms
from coalign.config.schema import SamplingConfig
from coalign.data.batch import Batch

COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "versions", "group", "index", "prompt_length", "status")
OF_EPISODES = ("turn_rewards", "turn_states")
MARGIN = 1e-4  # of probability: a draw that is nearer to another token may fall to that one on another processor
LOGPROB = 2e-3  # how far log-probs of the same tokens may differ after some steps of training


@dataclass
class Rollouts:
    """The answers to the calls of ``generate``, in order, and how many of their tokens were compared when replayed."""

    calls: list[Batch] = field(default_factory=list)
    compared: int = 0
    generated: int = 0

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        columns = {
            f"{i}/{name}": column
            for i, batch in enumerate(self.calls)
            for name, column in {"lengths": batch.lengths, **{name: batch[name] for name in _columns(batch)}}.items()
        }
        save_file(columns, path)

    @classmethod
    def read(cls, path: Path) -> Rollouts:
        columns = load_file(path)
        count = len({name.partition("/")[0] for name in columns})
        return cls(
            [
                Batch(columns[f"{i}/lengths"]).with_(
                    **{name: columns[key] for name in COLUMNS + OF_EPISODES if (key := f"{i}/{name}") in columns}
                )
                for i in range(count)
            ]
        )


@contextmanager
def recorded() -> Iterator[Rollouts]:
    """Within this context, what policies of this process generate is kept."""
    rollouts = Rollouts()

    def keep(module: RolloutModule, batch: Batch, sampling: SamplingConfig) -> Batch:
        rollouts.calls.append(batch)
        return batch

    with _after_generating(keep):
        yield rollouts


@contextmanager
def replayed(rollouts: Rollouts) -> Iterator[None]:
    """Within this context policies of this process answer with ``rollouts``, after they have drawn their own.

    AssertionError where these are others than rounding explains, and for a call more or less.
    """
    calls = iter(rollouts.calls)

    def replace(module: RolloutModule, batch: Batch, sampling: SamplingConfig) -> Batch:
        kept = next(calls, None)
        assert kept is not None, f"a call of generate more than the {len(rollouts.calls)} that were recorded"
        for name in ("group", "index", "prompt_length"):
            assert torch.equal(kept[name], batch[name]), f"{name} of the samples is not as it was recorded"
        _compare(module, kept, batch, sampling, rollouts)
        others = {name: column for name, column in batch.sequence.items() if name not in COLUMNS}
        return kept.with_(**others)

    with _after_generating(replace):
        yield
    assert next(calls, None) is None, "fewer calls of generate than were recorded"


@contextmanager
def _after_generating(change: Any) -> Iterator[None]:
    """Hand what a RolloutModule generates through ``change(module, batch, sampling)``."""
    generate = RolloutModule.generate_in_parts

    def changed(self: RolloutModule, parts: int, prompts: Batch, **options: Any) -> Iterator[Any]:
        overrides = {name: value for name, value in options.items() if name in SamplingConfig.model_fields}
        sampling = SamplingConfig(**{**self.config.sampling.model_dump(), **overrides})
        for answer in generate(self, parts, prompts, **options):
            if isinstance(answer, tuple):  # with the statistics of episodes
                yield change(self, answer[0], sampling), answer[1]
            else:
                yield change(self, answer, sampling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutModule, "generate_in_parts", changed)
        yield


def _columns(batch: Batch) -> list[str]:
    return [name for name in COLUMNS + OF_EPISODES if name in batch]


def _compare(module: RolloutModule, kept: Batch, drawn: Batch, sampling: SamplingConfig, rollouts: Rollouts) -> None:
    """Tokens are equal up to the first one of a small margin, and so are log-probs, nearly."""
    for old, new in zip(kept.rows(), drawn.rows(), strict=True):
        begin = int(old["prompt_length"])
        assert torch.equal(old["tokens"][:begin], new["tokens"][:begin]), "a prompt is not as it was recorded"
        length = min(len(old["tokens"]), len(new["tokens"]))
        differ = (old["tokens"][:length] != new["tokens"][:length]).nonzero().flatten()
        same = int(differ[0]) if len(differ) else length
        where = f"group {int(new['group'])}, index {int(new['index'])}, token {same - begin} of the response"
        if len(differ):
            margin = _margin(module, new, same, sampling)
            assert margin < MARGIN, f"{where}: drawn with a margin of {margin:.1e}, and it is another than was recorded"
        else:
            assert len(old["tokens"]) == len(new["tokens"]), f"{where}: equal tokens, but another end"
            assert int(old["status"]) == int(new["status"]), f"{where}: equal tokens, but another status"
        difference = (old["rollout_logprobs"][begin:same] - new["rollout_logprobs"][begin:same]).abs()
        assert not len(difference) or float(difference.max()) < LOGPROB, f"{where}: log-probs of other weights"
        rollouts.compared += same - begin
        rollouts.generated += len(old["tokens"]) - begin


@torch.inference_mode()
def _margin(module: RolloutModule, row: dict[str, Tensor], place: int, sampling: SamplingConfig) -> float:
    """How much of probability lay between the draw of ``row``'s token at ``place`` and another token."""
    engine, tokens = module.engine.model, row["tokens"][:place].long()
    inputs: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
    if engine.images is not None:
        inputs = engine.images.list_plain_inputs(tokens, row.get("images", ()))
    model = engine.module
    parts = {"": model.config} | {key: getattr(model.config, key) for key in model.config.sub_configs}
    before = {key: part._attn_implementation for key, part in parts.items()}
    model.set_attn_implementation("eager")
    logits = engine.forbid(model(**inputs).logits[:, -1].double())[0]
    model.set_attn_implementation(before)
    if sampling.temperature == 0:
        first, second = logits.softmax(-1).topk(2).values.tolist()
        return first - second
    probs = truncate((logits / sampling.temperature).softmax(-1)[None], sampling)[0]
    bounds = (probs / probs.sum()).cumsum(-1)
    key = stream_key(module.context.seed, int(row["group"]), int(row["index"]))
    uniform = uniforms(torch.tensor([key]), torch.tensor([place]))
    return float((bounds - uniform).abs().min())
