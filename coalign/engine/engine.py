"""The engine: models, the flow between them, and the one loop that runs it.

A recipe subclasses ``Engine`` and writes two methods. Everything else is here, once, for synchronous and asynchronous
training alike: steps, weight syncs, and calls of hooks. ``Trainer`` is the training side of the loop; the rollout side
is in environment.py, evaluation in evaluator.py, and references without a separate model in reference.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import torch

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future, WatchedCalls, WorkerLost
from coalign.config.schema import RunConfig
from coalign.data.loader import Loader
from coalign.engine.environment import Environment
from coalign.engine.evaluator import Evaluator, score
from coalign.engine.flow import (
    AbsentScorer,
    FunctionChain,
    PtxTrainer,
    RolloutPolicy,
    chain,
    count_episode_tokens,
)
from coalign.engine.progress import Progress
from coalign.engine.reference import BaseWeights
from coalign.engine.reward import Reward
from coalign.engine.rollouts.bundle import describe_sources
from coalign.engine.rollouts.selection import build_group_selection
from coalign.engine.rollouts.unfinished import CompleteGroups, UnfinishedGroups
from coalign.roles import Rollout, Scorer
from coalign.types import Stats, Total, merge_stats
from coalign.weights.sync.sync import WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from coalign.algorithms.objective import Objective
    from coalign.cluster.cluster import Cluster
    from coalign.cluster.dist import DistModel
    from coalign.launch.plan import Plan

SAMPLING = ("curriculum", "filter", "replay", "rollout")  # sections that choose the samples


@dataclass(frozen=True)
class RunData:
    """The tokenizer and the loaders of a run; ``steps`` is the largest number of steps."""

    tokenizer: PreTrainedTokenizerBase
    train: Loader
    steps: int
    eval: Loader | None = None
    ptx: Loader | None = None


class Hook:
    """Base class of everything that watches the loop. Methods do nothing; hooks run in order, may add to ``stats``."""

    def begin(self, engine: Engine) -> None: ...

    def before_training(self, engine: Engine) -> None:
        """Called when the samples of the next step are there."""

    def refuses(self, engine: Engine, stats: Stats, batch: BatchRef) -> bool:
        """Whether to discard the step just trained: no model gets its weights, and no other hook sees it."""
        return False

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None: ...

    def after_evaluation(self, engine: Engine, stats: Stats) -> None: ...

    def after_rewind(self, state: dict[str, Any], *, repeat: bool) -> None:
        """Called when the engine went back to a checkpoint with this ``state`` of the hook (empty: none).

        ``repeat``: the steps since that checkpoint train again on the same data.
        """
        if repeat and state:
            self.load_state_dict(state)

    def end(self, engine: Engine) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state for a checkpoint, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""


@contextmanager
def contain_errors(
    report: Callable[[Exception], object], errors: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Give what the work of a hook raises to ``report`` in place of raising it.

    A lost process is raised nevertheless: the loop starts it again, and then calls the hook once more.
    """
    try:
        yield
    except WorkerLost:
        raise
    except errors as problem:
        report(problem)


class Trainer:
    """Runs ``flow(batch)`` (an engine's ``train_flow``) and the weight syncs that follow it.

    ``main`` is the model whose metrics get no prefix. ``finds_learned``: whether `step` also returns advantages and
    log-probs of each batch.
    """

    def __init__(
        self,
        cluster: Cluster,
        flow: Callable[[BatchRef], Any],
        syncs: Sequence[WeightSync],
        main: str | None,
        finds_learned: bool,
    ) -> None:
        self.cluster = cluster
        self.flow = flow
        self.main = main
        self.finds_learned = finds_learned
        self.syncs = list(syncs)

    def step(self, batch: BatchRef) -> tuple[Stats, BatchRef | None]:
        """Train on one batch, and wait until every model has taken its step.

        Returns the metrics, and (``finds_learned``) the batch with its advantages and the trainer's log-probs.
        """
        started_at = time.perf_counter()
        with self.cluster.watch() as calls:
            self.flow(batch)
        stats = calls.stats(self.main)
        learned = _find_learned(calls, batch) if self.finds_learned else None
        return merge_stats([stats, {"time/train": Total(time.perf_counter() - started_at)}]), learned

    def sync(self, version: int) -> Stats:
        """Send the weights of ``version`` to every target, which serves them only once they are verified.

        Targets that generate meanwhile may still be loading them when this returns (`finish`). The metrics include the
        moves onto devices and off them since the last sync (`swaps/…`, `memory/device`).
        """
        started_at = time.perf_counter()
        sync_stats = [sync(version) for sync in self.syncs]
        swaps = self.cluster.residency.take_stats()
        return merge_stats([*sync_stats, swaps, {"time/sync": Total(time.perf_counter() - started_at)}])

    def serve_newcomers(self, version: int) -> None:
        """Send the current weights, of ``version``, if a restarted replica waits for its first ones."""
        if any(sync.target.slices is not None and sync.target.slices.joining for sync in self.syncs):
            self.sync(version)

    def finish(self) -> None:
        """Wait until all targets serve the weights sent to them. Raises what a sync raises."""
        for sync in self.syncs:
            sync.finish()

    def reconnect(self) -> None:
        """Treat the next sync as the first one: processes were started again."""
        for sync in self.syncs:
            sync.reconnect()


def _find_learned(calls: WatchedCalls, batch: BatchRef) -> BatchRef:
    """Return ``batch`` with the columns `advantages` and `old_logprobs`, if the calls of its step computed them."""
    newest: dict[str, BatchRef] = {}
    for future in calls.futures:
        result = future.result()
        if not isinstance(result, BatchRef) or not torch.equal(result.lengths, batch.lengths):
            continue
        if result.group is None or batch.group is None or torch.equal(result.group, batch.group):
            newest |= {name: result for name in ("advantages", "old_logprobs") if name in result.columns}
    return BatchRef.join([newest.pop("advantages", batch), *newest.values()])


class Engine:
    """Models, the flow between them, and the loop.

    ``models`` names every model of the recipe and its role (Rollout, Scorer, Trainable). Each is an attribute
    (``self.policy``) whose methods return Futures. In a run that does not use it, a scorer adds no columns, and another
    model is None. ``sync`` lists (source, target) pairs: after each step the target gets the source's weights.
    ``source`` is a key of coalign.data.kinds, and decides how rows of data are encoded. ``evaluates`` names the models
    that ``eval_flow`` calls. ``defaults`` has the shape of the YAML, whose values replace it. ``unread`` names sections
    that the flows do not use, which templates of configurations leave out; `coalign check` finds out by itself.
    ``min_rows``: the fewest rows of data in a step, or in a batch of the evaluation.
    """

    models: ClassVar[Mapping[str, type]] = {}
    sync: ClassVar[list[tuple[str, str]]] = []
    source: ClassVar[str] = "prompts"
    policy: RolloutPolicy
    reward: Reward
    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    training: Trainer
    evaluator: Evaluator | None
    ptx_loader: Loader | None = None
    evaluates: ClassVar[tuple[str, ...]] = ("policy", "reward")
    defaults: ClassVar[dict[str, Any]] = {}
    unread: ClassVar[tuple[str, ...]] = ()
    min_rows: ClassVar[int] = 1

    def __init__(self, plan: Plan, cluster: Cluster, data: RunData | None = None) -> None:
        """Start the models of ``plan`` on ``cluster``, and prepare the loop over ``data``.

        Without ``data`` only the flows can be called (`coalign check`). ValueError for a model whose name the engine
        uses itself.
        """
        self.plan = plan
        self.config = plan.config
        self.cluster = cluster
        self.progress = Progress()
        self.last = data.steps if data else 1
        self.pending_notifications: deque[Callable[[], None]] = deque()  # calls of hooks that are due
        self.hooks: list[Hook] = []
        self.phase_listeners: list[Callable[[str], None]] = []  # called with what the loop waits for
        self.learning = [model.name for model in plan.learning]  # the main one, the run's product, first
        self.sections_read: set[str] = set()  # sections that the flows have read
        rollout = self.config.rollout
        rollouts = UnfinishedGroups if rollout.round_tokens is not None or rollout.oversample > 1 else CompleteGroups
        self.unfinished = rollouts(cluster, rollout, self.config.runtime.samples_per_prompt)
        self.running = self._start_models()
        self.rewards: Reward | None = None  # the sum behind self.reward
        models: dict[str, Any] = self.running | {
            name: BaseWeights(self.running[model.base_of]) for name, model in plan.models.items() if model.base_of
        }
        if plan.rewards:
            models["reward"] = self.rewards = Reward(cluster, plan.rewards, dict(models))
        if "policy" in models:
            models["policy"] = RolloutPolicy(models["policy"], self.unfinished)
        self._set_models(
            {name: AbsentScorer() if role is Scorer else None for name, role in self.models.items()} | models
        )
        if data is not None:
            self._prepare_loop(data)

    def _start_models(self) -> dict[str, DistModel[Any]]:
        planned = [model for model in self.plan.models.values() if model.base_of is None]
        main = self.learning[:1] if self.logs_tokens else []
        return {
            m.name: self.cluster.spawn(
                m.name, m.config, replace(m.context, steps=self.last, records_logprobs=m.name in main)
            )
            for m in planned
        }

    def _set_models(self, models: Mapping[str, Any]) -> None:
        reserved = {*vars(self), *Engine.__annotations__} - {"policy", "reward"}
        for name, model in models.items():
            if name in reserved or getattr(type(self), name, None):
                raise ValueError(f"models.{name}: {type(self).__name__} has an attribute of that name; rename it")
            setattr(self, name, model)

    def _prepare_loop(self, data: RunData) -> None:
        config = self.config
        if self.source == "prompts":  # their flows join and filter
            self.cluster.expect_functions()
        self.tokenizer = data.tokenizer
        self.ptx_loader = data.ptx
        if config.ptx is not None and data.ptx is not None:
            main = self.learning[0]
            setattr(self, main, PtxTrainer(self.running[main], self.cluster, data.ptx, config.ptx.coef))
        syncs = [self._sync_between(*pair) for pair in self.plan.syncs]
        main = next(iter(self.learning), None)
        self.training = Trainer(self.cluster, self.train_flow, syncs, main, finds_learned=self.logs_tokens)
        serve = lambda: self.training.serve_newcomers(self.step)  # noqa: E731
        selection = build_group_selection(self.plan, self.cluster, data.train)
        options = {"max_staleness": config.runtime.max_staleness, "last": data.steps, "on_wait": serve}
        self.environment = Environment(self.cluster, self.env_flow, data.train, self.unfinished, selection, **options)
        if config.runtime.max_staleness:
            for target in {target for _, target in self.plan.syncs if self.plan.models[target].role is Rollout}:
                self.running[target].generate_continuously()
        limit = config.runtime.eval_prompts
        self.evaluator = Evaluator(self.cluster, self.eval_flow, data.eval, limit, serve) if data.eval else None

    def _sync_between(self, source: str, target: str) -> WeightSync:
        config = self.config
        directory = Path(config.sync.directory or Path(config.output) / "sync", f"{source}-{target}")
        settings = config.sync.model_copy(update={"directory": str(directory.absolute())})
        overlap = config.runtime.max_staleness > 0
        return WeightSync(self.running[source], self.running[target], settings, overlap=overlap)

    # ---- what a recipe writes --------------------------------------------------------------------------------------

    def env_flow(self, prompts: BatchRef) -> Any:
        """Turn prompts into samples with the columns that the other models add."""
        return prompts

    def train_flow(self, batch: BatchRef) -> Any:
        """Compute the advantages of a batch, and train on it once."""
        raise TypeError(f"{type(self).__name__} has no train_flow")

    def eval_flow(self, prompts: BatchRef) -> Any:
        """Compute metrics on held-out prompts; by default mean@n and pass@k of the policy's rewards."""
        samples = self.config.runtime.eval_samples
        out = self.policy.generate(prompts, samples=samples, **self.eval_sampling)
        scored = self.apply(score, out, self.reward.forward_step(out), prompts=len(prompts), samples=samples)
        return self.apply(describe_sources, scored, by_environment=True) if self.config.rollout.environments else scored

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a flow of an earlier version."""
        raise TypeError(f"{type(self).__name__}: `self.generate` is gone; call `self.policy.generate(prompts)`")

    def after_step(self, stats: Stats) -> None:
        """Adapt the state that the recipe keeps from step to step (a KL coefficient, say)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe's state for a checkpoint, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""

    @classmethod
    def roles(cls, config: RunConfig, loss: Objective | None) -> Mapping[str, type]:
        """Return the models that this configuration needs; a recipe leaves out those it would not call."""
        return cls.models

    @classmethod
    def check(cls, config: RunConfig, loss: Objective | None) -> None:
        """Refuse (ValueError) a configuration that the schema cannot judge, before anything loads."""

    @classmethod
    def list_unread(cls) -> tuple[str, ...]:
        """List the sections that this recipe does not read."""
        return (*(() if cls.source == "prompts" else SAMPLING), *cls.unread)

    @classmethod
    def check_sections(cls, config: RunConfig) -> None:
        """Refuse (ValueError) sections that this recipe does not read."""
        why = "does not read it" if cls.source == "prompts" else "learns from data, not from samples of a policy"
        for name in cls.list_unread():
            if getattr(config, name) != RunConfig.model_fields[name].default:
                raise ValueError(f"{name}: `{config.algorithm}` {why}; leave it out")

    # ---- what a flow uses ------------------------------------------------------------------------------------------

    def read_section(self, name: str) -> Callable[..., Any] | None:
        """Return the function that a section names, with its arguments; None without the section.

        `coalign check` refuses a section that is set and that no flow reads.
        """
        self.sections_read.add(name)
        return getattr(self.plan, name)

    @property
    def shaping(self) -> Callable[..., Any] | None:
        """A function of columns that changes rewards before the advantages are computed (a KL penalty, say)."""
        return None

    @property
    def advantage(self) -> Callable[..., Any] | FunctionChain:
        """The sections `truncated`, `advantage` and `covariance`, with the recipe's ``shaping`` after the first.

        ValueError without the section `advantage`.
        """
        if (function := self.read_section("advantage")) is None:
            raise ValueError(f"advantage: `{self.config.algorithm}` needs it; name a function (`group`, `gae`, …)")
        truncated, covariance = self.read_section("truncated"), self.read_section("covariance")
        rollout = self.config.rollout
        in_rows = count_episode_tokens if rollout.fn != "single_turn" or rollout.environments else None
        return chain(truncated, self.shaping, function, covariance, in_rows, main=function)

    def apply(self, fn: Callable[..., Any] | FunctionChain, *batches: BatchRef | Future, **arguments: Any) -> Future:
        """Run a pure function on the columns of the batches (same sequences); see docs/design.md §4."""
        if isinstance(fn, FunctionChain):
            for function in fn.functions:
                batches = (self.apply(function, *batches, **(arguments if function is fn.main else {})),)
            return cast(Future, batches[0])
        if isinstance(fn, partial):
            fn, arguments = fn.func, {**fn.keywords, **arguments}
        return self.cluster.apply(fn, *batches, **arguments)

    def transform(self, fn: Callable[..., Any], *batches: BatchRef | Future, **arguments: Any) -> Future:
        """Run a pure function from whole batches to another batch: other rows, or other tokens."""
        return self.cluster.transform(fn, *batches, **arguments)

    def join(self, *batches: BatchRef | Future) -> Future:
        """Merge the columns of several batches of the same sequences into one batch."""
        return self.cluster.join(*batches)

    @property
    def eval_sampling(self) -> dict[str, Any]:
        """The sampling settings of evaluation that replace the policy's."""
        return self.config.runtime.eval_sampling.model_dump(exclude_none=True)

    # ---- the loop --------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The steps that the run has taken."""
        return self.progress.step

    @property
    def stop(self) -> str | None:
        """Why the loop ends before its last step; `progress.request_stop` sets it."""
        return self.progress.stop_reason

    @property
    def complete(self) -> bool:
        """Whether the run has taken all its steps, or trained on all its tokens (`runtime.tokens`)."""
        budget = self.config.runtime.tokens
        return self.step >= self.last or (budget is not None and self.progress.tokens >= budget)

    @property
    def logs_tokens(self) -> bool:
        """Whether the run folder gets tokens of samples, with their advantages."""
        runtime = self.config.runtime
        return self.source == "prompts" and min(runtime.log_samples, runtime.keep_rollouts) > 0

    @property
    def served(self) -> int:
        """The weight version that the generators got last, by the schedule (`sync.every`)."""
        return self.step - self.step % self.config.sync.every

    def phase(self, name: str) -> None:
        """Call all phase listeners with the phase that begins."""
        for listener in self.phase_listeners:
            listener(name)

    def snapshot(self) -> dict[str, Any]:
        """Return the loop's state for a checkpoint, without waiting: batches of samples stay where they are."""
        return {
            "step": self.step,
            "tokens": self.progress.tokens,
            "environment": self.environment.snapshot(),
            "ptx": self.ptx_loader.state_dict() if self.ptx_loader else None,
            "rewards": self.rewards.snapshot() if self.rewards else None,
            "recipe": self.state_dict(),
        }

    def return_to(self, snapshot: dict[str, Any]) -> None:
        """Restore everything outside of the models from a ``snapshot``."""
        self.environment.load_state_dict(self.environment.fetch_state(snapshot["environment"]))
        if self.ptx_loader:
            self.ptx_loader.load_state_dict(snapshot["ptx"])
        if self.rewards:
            self.rewards.load_state_dict(self.rewards.fetch_state(snapshot["rewards"]))
        self.load_state_dict(snapshot["recipe"])
        self.environment.events.resumed(self.step, self.environment)

    def learn(self, recover: Callable[[WorkerLost], None] | None = None) -> None:
        """Train until the run is complete, or a hook asks for its end (`progress.request_stop`).

        After a loss of processes ``recover`` takes the engine back to a state that it can go on from, or raises.
        """
        self.phase("start")  # models load before their weights can move, and samplers compile
        self.training.sync(self.step)
        policies = {name: model.module for name, model in self.plan.models.items() if model.role is Rollout}
        # A user's class without `compares_itself` is not compared with its trainer: it need not have a generator.
        if unchecked := [name for name, module in policies.items() if not getattr(module, "compares_itself", True)]:
            from coalign.engine.sampler_comparison import compare_samplers  # imports transformers

            compare_samplers(self, unchecked)
        self.progress.keep_state(self.snapshot())
        self.pending_notifications.extend(partial(hook.begin, self) for hook in self.hooks)
        while self.pending_notifications or not (self.complete or self.stop):
            try:
                self.phase("hooks")
                while self.pending_notifications:
                    self.pending_notifications[0]()
                    self.pending_notifications.popleft()
                if not (self.complete or self.stop):
                    self._take_step()
            except WorkerLost as lost:
                if recover is None:
                    raise
                recover(lost)
        self.training.finish()
        for hook in self.hooks:
            hook.end(self)

    def _take_step(self) -> None:
        """Train once, send the weights, and queue the notifications of hooks, unless one refuses the step."""
        started_at = time.perf_counter()
        self.progress.begin_step()
        self.phase("rollout")
        batch, rollout = self.environment.next(self.step, self.served)
        for hook in self.hooks:
            hook.before_training(self)
        self.phase("train")
        with self.cluster.defer_errors() as error:
            if error is not None:  # a rollout failed; no weight has changed yet
                raise error
            self.progress.keep_state(None)  # weights change from here on
            trained, learned = self.training.step(batch)
        if self.ptx_loader is not None and not self.ptx_loader.drawn:
            raise ValueError(
                f"ptx: train_flow never calls `self.{self.learning[0]}.train_step`, which mixes its rows in"
            )
        stats = self.progress.count_step(int(trained.get("tokens/trained", Total(0.0)).value), [rollout, trained])
        if any(hook.refuses(self, stats, batch) for hook in self.hooks):
            return  # before anyone generates with such weights
        self.after_step(stats)
        self.progress.end_step(self.snapshot(), stats, learned)
        self.pending_notifications.extend(partial(hook.after_step, self, stats, batch) for hook in self.hooks)
        self.phase("sync")
        try:
            if self.served == self.step or self.complete:
                stats |= merge_stats([stats, self.training.sync(self.step)])
        finally:
            if restarts := self.cluster.take_restarts():
                stats["faults/restarts"] = Total(restarts)
            stats |= _compute_rates(stats, time.perf_counter() - started_at)


def _compute_rates(stats: Stats, seconds: float) -> Stats:
    """Return the step's wall time (s) and its rates (tokens/s, samples/s)."""
    rates = {f"throughput/{what}": stats.get(f"tokens/{what}") for what in ("generated", "trained")}
    rates["throughput/samples"] = stats.get("samples/count")
    totals = {name: Total(n.value / seconds) for name, n in rates.items() if n and n.value}
    return {"time/step": Total(seconds), **totals}
