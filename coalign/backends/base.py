"""The base classes of all backends: ``Module``, any model of a run, and ``TrainableModule``, one that learns.

``TrainableModule`` owns the order of events inside a training step: cut the batch into updates, count the global
denominators, cut each update into micro-batches, forward and backward, optimizer step. It is long, so that a step can
be read from top to bottom in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from coalign.algorithms.divergence import mismatch_stats
from coalign.algorithms.objective import FunctionLoss, Loss, Objective
from coalign.algorithms.segments import LossTotals, segment_count, sequence_shares
from coalign.backends.optim import compute_learning_rate
from coalign.backends.packing import get_loss_mask
from coalign.config.errors import located_at, parse_key
from coalign.config.functions import bind, resolve
from coalign.config.schema import LossConfig, ModelConfig
from coalign.data.batch import Batch
from coalign.data.examples import RowLimit
from coalign.devices import move_tensors, seed_generator
from coalign.memory import PARTS, Arena, release_free_heap
from coalign.roles import Context
from coalign.types import TOKEN_COLUMNS, LossInput, Stat, Stats, Total, merge_stats

# Field of LossInput -> the column that it comes from, if the batch has that column.
FIELDS = {
    "old": "old_logprobs",
    "rollout": "rollout_logprobs",
    "ref": "ref_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "old_values": "values",
}


def build_objective(config: LossConfig, section: str = "loss") -> Objective:
    """The loss that ``section`` (a dotted path) of the configuration describes. Raises ConfigError for wrong arguments,
    ValueError for a loss that is not there, for settings that it refuses, or for an aggregation without a meaning for
    it."""
    with located_at(*parse_key(section), "fn"):
        fn = resolve(config.fn, config.home)
    settings = bind(fn, config.arguments, section)
    loss = fn(**settings) if isinstance(fn, type) and issubclass(fn, Loss) else FunctionLoss(fn, settings)
    return Objective(loss, config.aggregation, config.constant_length or 1, config.fn, section)


@cache
def _build_named(loss: str) -> Objective:
    """For calls that name another loss than the configured one."""
    return build_objective(LossConfig(fn=loss))


def loss_input(micro: Batch, outputs: Mapping[str, Tensor]) -> LossInput:
    """Build what a loss reads: the trained tokens of ``micro`` and the model's outputs, on their device. Without an
    ``old_logprobs`` column the anchor of the importance ratio is the current policy itself."""
    mask = get_loss_mask(micro)
    device = next(iter(outputs.values())).device
    groups = _groups_of(micro)
    token = {("column", name): column[mask] for name, column in micro.token.items()}
    sequence = {("column", name): column for name, column in micro.sequence.items() if isinstance(column, Tensor)}
    derived = {("derived", "segment"): micro.segment[mask], ("derived", "group"): groups}
    moved = move_tensors(token | sequence | derived, device)
    columns = {**micro.sequence, **{name: tensor for (source, name), tensor in moved.items() if source == "column"}}
    fields = {field: columns.get(column) for field, column in FIELDS.items()}
    if fields["old"] is None and "logprobs" in outputs:
        fields["old"] = outputs["logprobs"].detach()
    return LossInput(
        segment=moved["derived", "segment"],
        sequences=len(micro),
        group=moved["derived", "group"],
        groups=int(groups[-1]) + 1 if len(groups) else 0,
        columns=columns,
        **fields,
        **outputs,
    )


def _groups_of(batch: Batch) -> Tensor:
    """i64[N], from 0: the number of each sequence's group, a run of equal neighbours in the column ``group``. Without
    that column each sequence is a group."""
    if "group" not in batch:
        return torch.arange(len(batch))
    return torch.unique_consecutive(cast(Tensor, batch["group"]), return_inverse=True)[1]


# What a model computes from one micro-batch: logprobs [T] (and entropy [T]) | values [T] | scores [N].
Outputs = dict[str, Tensor]
Measure = Callable[[Batch, Outputs], Tensor]
# head -> (its output, the column that it scores a batch with)
HEADS = {"lm": ("logprobs", "ref_logprobs"), "value": ("values", "values"), "reward": ("scores", "reward")}
EXPERTS = "routed_experts"  # the column of experts that the sampler chose
# Keeps a rank without work in step with the others: every parameter gets a gradient of zero.
IDLE = Batch(torch.tensor([2]), {"tokens": torch.zeros(2, dtype=torch.int32), "loss_mask": torch.tensor([False, True])})


class Module:
    """One process of one model. Subclasses override the methods and the class attributes below.

    ``spmd``: the processes of a trainable model form one group, whose ranks call every method together; otherwise they
    are independent replicas. ``exclusive``: a call computes, so no other model computes on its devices meanwhile; False
    for modules that mostly wait (rewards). ``adopts``: ``load_weights(…, adopt=True)`` uses the given tensors without a
    copy. ``parallel``: the keys of coalign.config.schema.PARALLEL that it supports. ``exact``: it supports `reduction:
    exact`. ``adapters``: low-rank adapters can be sent or received beside the weights (Context.adapter_rank).
    ``reads_images``: it computes rows with images. ``needs``: for each method, the components of the model
    (coalign.memory.PARTS) that it computes with; a method that is not listed needs all of them on the device.
    """

    spmd: ClassVar[bool] = False
    exclusive: ClassVar[bool] = True
    adopts: ClassVar[bool] = False
    parallel: ClassVar[Sequence[str]] = ()
    exact: ClassVar[bool] = False
    adapters: ClassVar[bool] = False
    reads_images: ClassVar[bool] = False
    needs: ClassVar[Mapping[str, Sequence[str]]] = {"begin_saves": (), "finish_saves": ()}
    weights_dtype: torch.dtype | None = None  # if all weights have one dtype: load_weights casts to it
    unfit: str | None = None  # why this replica must not serve (coalign.weights)

    @classmethod
    def columns(cls, config: ModelConfig, context: Context) -> tuple[str, ...]:
        """The columns that ``forward_step`` adds. No weights are read (`coalign check` runs flows on them)."""
        return (HEADS[config.head][1],)

    @classmethod
    def one_group(cls, config: ModelConfig) -> bool:
        """Whether the processes of a model form one group. Frozen models that each process holds whole do not."""
        return cls.spmd and (not config.frozen or any(getattr(config, key) > 1 for key in cls.parallel))

    # What ``setup`` refuses before it reads weights. `coalign check` calls the same three methods.

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ValueError, naming a key of ``models.<name>``, for settings that this backend does not support on
        ``device``. No file is read."""
        if config.reduction == "exact" and not cls.exact:
            raise ValueError(
                f"models.{name}.reduction is exact: module `{config.module}` adds gradients in an order that depends "
                "on the number of processes; use `reduction: fast`, or `module: fsdp`"
            )
        if config.vision is not None and not cls.reads_images:
            raise ValueError(
                f"models.{name}.module is `{config.module}`, which reads no images yet (data.images); a "
                "trainer that does is `fsdp`, a policy `native`, `transformers` or `vllm` (docs/images.md)"
            )

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        """Raises ValueError or NotImplementedError if this backend cannot compute the architecture in ``config.load``,
        or cannot cut or adapt it as ``config`` says. No weights are read."""

    @classmethod
    def check_machine(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ImportError, ValueError or RuntimeError for packages, compilers and kernels that the model needs and
        this machine lacks."""

    @classmethod
    def check_routing_replay(cls, config: ModelConfig, name: str) -> None:
        """Raises ValueError if this backend cannot record or replay the experts of the model in ``config.load``, as its
        context says (`routing_replay`). No weights are read."""
        raise ValueError(
            f"rollout.routing_replay is true, and models.{name}.module, `{config.module}`, cannot record or replay the "
            "experts of tokens; leave it out, or use `native` for the policy and `fsdp`, `deepspeed` or `megatron` for "
            "its trainer"
        )

    @classmethod
    def list_limits(cls, config: ModelConfig, section: str) -> list[RowLimit]:
        """The limits on one row (for a policy: on one prompt) of the model at ``section``. No weights are read."""
        return []

    @classmethod
    def limit_micro(cls, config: ModelConfig, device: str, *, longest: int, widest: int) -> int | None:
        """The most tokens of a micro-batch on a ``device`` of this type. ``longest``: tokens of the longest unit that
        cannot be cut; ``widest``: the most outputs of a matrix of the layers, per token."""
        return config.max_tokens_per_micro

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        """Remarks of `coalign check` on how this machine will compute the model. No weights are read."""
        return ()

    @classmethod
    def tune(cls, config: ModelConfig) -> None:
        """Time the alternatives of the model's processes on this CPU, and store the result. No weights are read."""

    def __init__(self, config: ModelConfig, context: Context) -> None:
        self.config = config
        self.context = context
        self.arena = Arena(context.device)  # a worker replaces it by the one that all models of its device share
        self.links: dict[str, Any] = {}  # what weight transports keep here from one sync to the next

    def check_before_setup(self) -> None:
        """Raises what `check_settings` and `check_machine` raise for this process."""
        for check in (self.check_settings, self.check_machine):
            check(self.config, self.context.model, torch.device(self.context.device))
        if self.context.routing_replay:
            self.check_routing_replay(self.config, self.context.model)

    @property
    def exports(self) -> bool:
        """Whether ``export_weights`` yields anything on this rank. Several ranks may, each some of the weights."""
        return self.context.rank == 0

    def setup(self) -> None:
        """Build or load the model. Called once in the worker's process, before any other method."""

    def close(self) -> None:
        """Release what ``setup`` took."""

    def forget_calls(self) -> None:
        """Drop the state of unfinished calls: nobody will ask for their results."""

    def check_fit(self) -> None:
        """Raises RuntimeError while this replica must not serve."""
        if self.unfit:
            raise RuntimeError(f"model '{self.context.model}' does not serve: {self.unfit}")

    # ---- memory (docs/design.md §8): `tensors` is enough, unless an engine has an allocator of its own

    @property
    def constant(self) -> Sequence[str]:
        """The components of the model that never change."""
        return ()

    def tensors(self, component: str) -> Iterable[Tensor]:
        """The live tensors of one component of the model (coalign.memory.PARTS), between two calls."""
        return ()

    def move(self, to: str, components: Sequence[str]) -> None:
        """Move these components to the ``host`` or to the ``device``. They come back bit for bit the same. Raises
        coalign.memory.OutOfDeviceMemory if they do not fit."""
        if to == "host":
            self.arena.offload(self.context.model, components, constant=self.constant)
        else:
            self.arena.reload(self.context.model, components)

    def measure_memory(self) -> Mapping[str, int]:
        """Bytes on the device, by component of the model. Called after each call."""
        for component in PARTS:
            self.arena.settle(self.context.model, component, self.tensors(component))
        return self.arena.list_resident(self.context.model)

    def begin_saves(self) -> bool:
        """Let the next `save`, `save_hf` and `save_adapter` return once they have copied what they write. A collective.
        A thread then writes the copies; `coalign.files.read_report` of each directory tells when it is complete. False
        from a backend without it, whose saves return when everything is written."""
        return False

    def finish_saves(self) -> None:
        """Wait for what is written since `begin_saves`; raise its first error. Later saves write at once again."""


class TrainableModule(Module):
    """A model that scores and learns (coalign.roles.Trainable), on the methods that a backend supplies. Each rank gets
    a shard of the batch, and all ranks call the same method. ``version`` counts the finished train_steps, ``updates``
    the optimizer steps tried, ``tokens`` the tokens trained on, over all ranks."""

    spmd = True
    needs = {
        **dict.fromkeys(("forward_step", "top_logprobs", "eval_step", "save_adapter"), ("weights",)),
        **dict.fromkeys(("save", "load", "save_hf"), ("weights", "optimizer")),  # averages belong to the optimizer
        **Module.needs,
    }
    version = 0
    updates = 0
    tokens = 0

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        self._batch_shards = len(set(config.shares(context.world_size)))  # ranks may compute rows together

    @property
    def constant(self) -> Sequence[str]:
        return ("weights",) if self.config.frozen else ()

    @classmethod
    def list_limits(cls, config: ModelConfig, section: str) -> list[RowLimit]:
        limits = []
        if config.max_tokens_per_micro is not None:
            limits.append(RowLimit(config.max_tokens_per_micro, f"{section}.max_tokens_per_micro"))
        if config.vision is not None and config.max_patches_per_micro is not None:
            key = f"{section}.max_patches_per_micro"
            limits.append(RowLimit(config.max_patches_per_micro, key, "patches"))
        return limits

    # ---- what a backend supplies

    def run(self, micros: Sequence[Batch], loss: Measure | None = None, *, needs: Sequence[str] = ()) -> list[Outputs]:
        """Forward over each micro-batch, without dropout or gradient; with ``loss``, in training mode, and add the
        gradient of each loss. ``needs`` names outputs beyond the head's own (entropy, candidate_logprobs, collision).
        A collective: every rank passes the same number of micro-batches."""
        raise NotImplementedError

    def optimizer_step(self) -> float:
        """Clip, apply and clear the accumulated gradient; returns its norm before clipping. A gradient that is not
        finite is cleared without touching weights or optimizer."""
        raise NotImplementedError

    def export_weights(self, *, changing: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor), one at a time. A collective.

        Ranks with ``exports`` yield, each different weights; the rest take part and yield nothing. In one process the
        tensors are the live parameters, which later training steps change. A weight with an adapter is yielded merged,
        as a new tensor. ``changing``: only what training changes.
        """
        raise NotImplementedError

    def base_weights(self) -> AbstractContextManager[None]:
        """A context in which the model computes without its adapters. ValueError for a model that has none."""
        name = self.context.model
        raise ValueError(f"model '{name}' has no adapters to leave out: models.{name}.lora is not set")

    def save(self, dir: str | Path) -> None:
        """Write everything that a bit-for-bit continuation needs into ``dir``. A collective."""
        raise NotImplementedError

    def load(self, dir: str | Path) -> None:
        """Continue from what `save` wrote; ValueError names what does not fit this model. A collective."""
        raise NotImplementedError

    def save_hf(self, dir: str | Path, *, average: bool = False) -> None:
        """Write a Hugging Face directory of the weights, or of their ``average`` (ModelConfig.ema). A collective.
        ValueError for the average of a model that keeps none."""
        raise NotImplementedError

    def save_adapter(self, dir: str | Path) -> None:
        """Write the adapters alone, in peft's format. A collective."""
        raise NotImplementedError

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current optimizer step, whose tokens are counted already."""
        config, context = self.config, self.context
        if config.optimizer.unit == "tokens":
            return compute_learning_rate(self.tokens - 1, config.optimizer, total=context.tokens or 0)
        total = (context.steps - config.learns_after) * config.updates_per_batch * config.epochs_per_batch
        return compute_learning_rate(self.updates, config.optimizer, total=total)

    @property
    def progress(self) -> dict[str, int]:
        """The counts that a checkpoint stores beside the tensors."""
        return {"version": self.version, "updates": self.updates, "tokens": self.tokens}

    def restore_progress(self, progress: Mapping[str, int]) -> None:
        """Take over the counts of a checkpoint."""
        self.version, self.updates, self.tokens = (progress[name] for name in ("version", "updates", "tokens"))

    def token_budget(self, longest: int) -> int | None:
        """The most tokens of one micro-batch; ``longest``: tokens of the longest unit that cannot be cut."""
        return self.config.max_tokens_per_micro

    def describe_routing(self) -> Stats:
        """Statistics of the routers since the last call (coalign.algorithms.routing); none without experts. A
        collective."""
        return {}

    def all_reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        """The ``sum`` or ``max`` of each value over the ranks of this model."""
        return list(values)

    # ---- what the rest of Coalign calls

    def forward_step(self, batch: Batch, *, into: str | None = None, base: bool = False) -> dict[str, Tensor]:
        """One column for ``batch``: ref_logprobs or values f32[sum T], 0.0 outside of the loss mask, or reward f32[N].
        ``into`` gives it another name; ``base`` leaves the model's adapters out."""
        output, column = HEADS[self.config.head]
        batch = batch.without(EXPERTS) if base else batch
        with self.base_weights() if base else nullcontext():
            computed = self.compute_outputs(batch)
        result = torch.zeros(len(batch) if output == "scores" else batch.tokens_total)
        for micro, out in computed:
            positions = micro["row"] if output == "scores" else micro.token["token"][get_loss_mask(micro)]
            result[positions] = out[output].float().cpu()
        return {into or column: result}

    def top_logprobs(self, batch: Batch) -> dict[str, Tensor]:
        """The columns of a teacher (ModelConfig.candidates): its likeliest tokens and their log-probs. candidates
        i32[sum T, K] and teacher_logprobs f32[sum T, K], 0 outside of the loss mask."""
        computed = self.compute_outputs(batch, needs=("top",))
        columns = {}
        for name in ("candidates", "teacher_logprobs"):
            width = computed[0][1][name].shape[1]
            columns[name] = torch.zeros(batch.tokens_total, width, dtype=TOKEN_COLUMNS[name])
            for micro, out in computed:
                columns[name][micro.token["token"][get_loss_mask(micro)]] = out[name].cpu().to(TOKEN_COLUMNS[name])
        return columns

    def compute_outputs(self, batch: Batch, *, needs: Sequence[str] = ()) -> list[tuple[Batch, Outputs]]:
        """The micro-batches of ``batch`` with the model's outputs for each. A collective. They are not in the order of
        ``batch``: their columns `row` i64[N] and `token` i64[T] say where each sequence and each token stands there."""
        token = {**batch.token, "token": torch.arange(batch.tokens_total)}
        micros = self._micros(Batch(batch.lengths, token, {**batch.sequence, "row": torch.arange(len(batch))}))
        pairs = zip(micros, self.run(micros, needs=needs), strict=True)
        return [(micro, out) for micro, out in pairs if micro is not IDLE]

    def train_step(
        self, batch: Batch, *, loss: str | None = None, ptx: Batch | None = None, ptx_coef: float = 1.0
    ) -> dict[str, Any]:
        """Train on ``batch``: epochs_per_batch passes, each cut into updates_per_batch optimizer steps.

        Updates are consecutive rows of the batch, with groups whole and tokens balanced, or as the column `update`
        says. The first `learns_after` calls learn nothing: they return only how far the sampler is from this model.

        ``loss`` names another loss than the configured one. ``ptx`` holds rows of other data, cut over the updates as
        ``batch`` is: each adds ``ptx_coef`` times the mean negative log-likelihood of its tokens (2203.02155, eq. 2).

        Returns loss/value, loss/grad_norm, loss/lr (means over the updates), loss/skipped_updates, tokens/trained, the
        loss's own statistics as loss/<name>, and loss/ptx; loss/not_finite counts updates skipped for their gradient;
        with experts, router/<name> (coalign.algorithms.routing).

        With `Context.records_logprobs` also the column old_logprobs f32[sum T]: this model's log-probs before the first
        update, NaN or 0.0 where no token is trained on.
        """
        name = self.context.model
        if self.config.frozen:
            raise ValueError(f"model '{name}' is frozen: to train it, set models.{name}.frozen to false")
        if ptx is not None and self.config.head != "lm":
            raise ValueError(f"model '{name}' has no language-model head, so no data to mix in (ptx)")
        if self.version < self.config.learns_after:
            self.version += 1
            return self._compare_with_sampler(batch)
        objective = self._objective(loss)
        batch = batch if objective.compares else self._with_old_logprobs(batch)
        logprobs = _TrainedLogprobs(batch) if self.context.records_logprobs and self.config.head == "lm" else None
        batch = batch if logprobs is None else logprobs.batch
        updates, epochs = self.config.updates_per_batch, self.config.epochs_per_batch
        batches = epochs * _split_updates(batch, updates)
        if objective.compares:  # there is no anchor, and the weights of later updates are not those that sampled
            batches[1:] = [update.without("rollout_logprobs") for update in batches[1:]]
        mixed_in = epochs * ([None] * updates if ptx is None else _split_updates(ptx, updates))
        pairs = zip(batches, mixed_in, strict=True)
        stats = merge_stats(self._update(update, objective, rows, ptx_coef, logprobs) for update, rows in pairs)
        self.version += 1
        return stats if logprobs is None else {**stats, "old_logprobs": logprobs.values}

    def eval_step(self, batch: Batch, *, loss: str | None = None) -> Stats:
        """loss/value and loss/<name> over ``batch``, as means that merge exactly; nothing is learned."""
        objective = self._objective(loss)
        totals = self._count_totals(batch)
        micros, measure, seen = self._prepare(batch, objective, totals)
        outputs = self.run(micros, needs=objective.needs)
        for micro, out in zip(micros, outputs, strict=True):
            measure(micro, out)
        stats = merge_stats(seen)
        value, count = stats["loss/value"], objective.count(totals)
        assert isinstance(value, Stat)
        return stats | {"loss/value": Stat(value.sum * count, count)}

    # ---- one update

    def _update(
        self, batch: Batch, objective: Objective, ptx: Batch | None, ptx_coef: float, logprobs: _TrainedLogprobs | None
    ) -> Stats:
        first = float(self.context.rank == 0)
        if self.config.reduction == "exact" and self.context.world_size > 1 and "leaf" not in batch:
            raise ValueError("`reduction: exact` needs the column `leaf`, which says how an update is cut")
        totals = self._count_totals(batch)
        if totals.tokens == 0:  # nothing to learn; a step on momentum alone would still move the weights
            return {"loss/skipped_updates": Total(first)}
        micros, measure, seen = self._prepare(batch, objective, totals, logprobs)
        # Dropout depends on the position in the run, not on what ran before in this process: no RNG state to save.
        with seed_generator(self.context.device, hash((self.context.seed, self.context.rank, self.updates))):
            self.run(micros, measure, needs=objective.needs)
            if ptx is not None:
                seen.append(self._mix_in(ptx, ptx_coef))
        self.tokens += int(totals.tokens)
        lr = self.learning_rate
        norm = self.optimizer_step()
        if self.context.device == "cpu":
            release_free_heap()
        self.updates += 1
        finite = math.isfinite(norm)
        step: Stats = {
            "loss/lr": Stat(lr),
            "loss/grad_norm": Stat(norm if finite else 0.0, float(finite)),
            "loss/skipped_updates": Total(first * (not finite)),
            "tokens/trained": Total(float(get_loss_mask(batch).sum())),
        }
        if not finite:
            step["loss/not_finite"] = Total(first)
        return merge_stats([step, self.describe_routing(), *seen])

    def _mix_in(self, batch: Batch, coef: float) -> Stats:
        """Add the gradient of ``coef`` times the mean negative log-likelihood per token, at temperature 1."""
        totals = self._count_totals(batch)
        if totals.tokens == 0:
            return {}
        micros, measure, seen = self._prepare(batch, self._objective("sft"), totals)
        self.run(micros, lambda micro, outputs: coef * measure(micro, outputs), needs=("plain",))
        return {"loss/ptx": merge_stats(seen).get("loss/nll", Stat(0.0, 0.0))}

    def _count_totals(self, batch: Batch) -> LossTotals:
        segment, group = batch.segment[get_loss_mask(batch)], _groups_of(batch)
        sequences = float(sequence_shares(segment, len(batch), batch.get("episode_tokens")).sum())
        groups = int(group.max()) + 1 if len(group) else 0
        return LossTotals(*self.all_reduce([float(len(segment)), sequences, float(groups)]))

    def _prepare(
        self, batch: Batch, objective: Objective, totals: LossTotals, logprobs: _TrainedLogprobs | None = None
    ) -> tuple[list[Batch], Measure, list[Stats]]:
        """The micro-batches, the function from (micro-batch, outputs) to a loss, and the list it adds statistics to.
        ``logprobs`` records those of the trained tokens."""
        seen: list[Stats] = [{"loss/value": Stat(0.0)}]

        def measure(micro: Batch, outputs: Outputs) -> Tensor:
            if micro is IDLE:
                return sum((out.sum() for out in outputs.values()), torch.zeros(())) * 0.0
            if logprobs is not None:
                logprobs.note(micro, outputs)
            value, stats = objective(loss_input(micro, outputs), totals)
            seen.append({f"loss/{name}": stat for name, stat in stats.items()})
            # Statistics of data-parallel ranks are averaged when they are merged; the loss is a sum over the ranks.
            seen.append({"loss/value": Stat(value.item() * self._batch_shards, 0.0)})
            return value

        if objective.per == "token":  # a row without trained tokens adds nothing and would cost as much as any other
            batch = batch.select(segment_count(batch.segment[get_loss_mask(batch)], len(batch)) > 0)
        return self._micros(batch, objective.per), measure, seen

    def _micros(self, batch: Batch, per: str = "token") -> list[Batch]:
        """This rank's micro-batches, filled up with idle ones to the greatest number of any rank: forward and backward
        of a sharded model are collectives. ``per``: the rows that a loss compares stay in one micro-batch."""
        batch = batch if self.context.routing_replay else batch.without(EXPERTS)
        if per == "batch":
            if self.context.world_size > 1:
                raise ValueError("this loss compares all rows of an update: train on one process (num_process: 1)")
            return [batch] if len(batch) else []
        if "leaf" in batch:
            update = cast(Tensor, batch["update"])
            batches = [batch.select(update == number) for number in update.unique().tolist()]
            micros = [micro for update_batch in batches for micro in self._take_leaves(update_batch)]
        else:
            micros = self._pack_micros(batch, keep_groups=per == "group")
        (count,) = self.all_reduce([float(len(micros))], "max")
        return micros + [IDLE] * (int(count) - len(micros))

    def _take_leaves(self, update: Batch) -> list[Batch]:
        """The leaves of one update that this rank computes, in order; idle ones where nothing of a leaf is trained."""
        leaf = cast(Tensor, update["leaf"])
        numbers = range(self.context.rank, int(leaf.max()) + 1, self.context.world_size)
        if self.config.frozen:  # nothing is added up over the ranks
            numbers = leaf.unique().tolist()
        return [micro if len(micro := update.select(leaf == number)) else IDLE for number in numbers]

    def _pack_micros(self, batch: Batch, *, keep_groups: bool) -> list[Batch]:
        sizes = torch.bincount(_groups_of(batch) if keep_groups else torch.arange(len(batch)), batch.lengths)
        budget = self.token_budget(int(sizes.max()) if len(sizes) else 0)
        patches = None if "images" not in batch else self.config.max_patches_per_micro
        return batch.micro(budget, keep=_group_column(batch), intact=keep_groups, max_patches=patches)

    def _objective(self, name: str | None) -> Objective:
        """The loss of the configuration, or the one called ``name``. ValueError without any."""
        if name is not None:
            return _build_named(name)
        if self.context.loss is None:
            model = self.context.model
            raise ValueError(f"model '{model}' is to be trained, and there is no `loss` and no `models.{model}.loss`")
        return self.context.loss

    def _compare_with_sampler(self, batch: Batch) -> Stats:
        if self.config.head != "lm" or "rollout_logprobs" not in batch:
            return {}
        logprobs, mask = self.forward_step(batch, into="old_logprobs")["old_logprobs"], get_loss_mask(batch)
        stats = mismatch_stats(logprobs[mask], batch.token["rollout_logprobs"][mask])
        return {f"loss/{name}": stat for name, stat in stats.items()}

    def _with_old_logprobs(self, batch: Batch) -> Batch:
        """Add the anchor of the importance ratio, where it will differ from the policy that is being updated."""
        if self.config.head != "lm" or "rollout_logprobs" not in batch or "old_logprobs" in batch:
            return batch
        versions = batch.token.get("versions")
        stale = versions is not None and bool((versions[get_loss_mask(batch)] < self.version).any())
        several = self.config.updates_per_batch * self.config.epochs_per_batch > 1
        (needed,) = self.all_reduce([float(stale or several)], "max")
        return batch.with_(**self.forward_step(batch, into="old_logprobs")) if needed else batch


class _TrainedLogprobs:
    """Records the log-probs of a batch's trained tokens before the first update, which a training step computes anyway.
    ``values`` f32[T], NaN where there is none. ``batch`` is the one to cut into micro-batches."""

    def __init__(self, batch: Batch) -> None:
        recorded = batch.token.get("old_logprobs")
        self.values = torch.full((batch.tokens_total,), torch.nan) if recorded is None else recorded
        token = {**batch.token, "token": torch.arange(batch.tokens_total)}
        self.batch = batch if recorded is not None else Batch(batch.lengths, token, batch.sequence)

    def note(self, micro: Batch, outputs: Outputs) -> None:
        """Record the log-probs of a micro-batch, unless an update came between: the first ones count."""
        if "token" in micro.token:
            positions = micro.token["token"][get_loss_mask(micro)]
            first = self.values[positions].isnan()
            self.values[positions[first]] = outputs["logprobs"].detach().float().cpu()[first]


def _split_updates(batch: Batch, count: int) -> list[Batch]:
    if "update" not in batch:
        return batch.split(count, keep=_group_column(batch))
    update = cast(Tensor, batch["update"])
    return [batch.select(update == number) for number in range(count)]


def _group_column(batch: Batch) -> str | None:
    """The column whose equal neighbours stay together: groups and pairs, where there are any."""
    return "group" if "group" in batch else None
