"""Predicts a whole step: its phases on the device groups, and the idleness between them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from coalign_plan.constants import Constants
from coalign_plan.generation import EngineReplica
from coalign_plan.gpus import ClusterSpec
from coalign_plan.job import JobShape, ModelWork
from coalign_plan.simulation import ReplicaSimulation, SimulatedSteps, StepRules, simulate_steps
from coalign_plan.training import PassTime, TokenBatch, TrainingModel
from coalign_plan.transfer import predict_move, predict_sync


@dataclass(frozen=True)
class StepPhase:
    """What one model does in one stretch of a step, on the devices of one group; seconds from the step's begin.

    ``name``: generate, reward, score, train, sync, load, offload or overhead.
    """

    name: str
    model: str
    group: str
    start: float
    end: float
    devices: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step in steady state: its seconds, and who is busy when.

    ``idle`` is by device group the share of its device-seconds in which no model computes; ``bubble`` by trainer the
    share of its time in which its pipeline waits; ``mfu`` the FLOPs of training, scoring and generation, without
    recomputation, over what all devices could do in bf16, and ``trainer_mfu`` those of training over what its devices
    could do while they train. ``passes`` splits the time of each trainer and scorer.
    """

    seconds: float
    phases: tuple[StepPhase, ...]
    tokens_per_second: float
    mfu: float
    trainer_mfu: float
    idle: dict[str, float]
    bubble: dict[str, float]
    passes: dict[str, PassTime]
    rollouts: SimulatedSteps | None

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of each kind of phase: of models beside each other, those of the longest."""
        totals: dict[tuple[str, str], float] = defaultdict(float)
        for phase in self.phases:
            totals[phase.name, phase.group] += phase.seconds
        longest: dict[str, float] = {}
        for (name, _), seconds in totals.items():
            longest[name] = max(longest.get(name, 0.0), seconds)
        return longest


def predict_step(job: JobShape, cluster: ClusterSpec, constants: Constants) -> StepPrediction:
    """Predict one step of ``job`` in steady state on ``cluster``.

    Raises ValueError for a layout that cannot be: more devices than there are, weights that leave no room.
    """
    return _StepModel(job, cluster, constants).predict()


@dataclass(frozen=True)
class _StepModel:
    job: JobShape
    cluster: ClusterSpec
    constants: Constants

    def predict(self) -> StepPrediction:
        devices = self._count_devices()
        sequences = self.job.sequences
        batch = self._token_batch([(share * sequences, n) for share, n in self.job.responses.shares(sequences)])
        passes = {work.name: self._predict_pass(work, batch) for work in self.job.models if work.role != "rollout"}
        engine = next((work for work in self.job.models if work.role == "rollout"), None)
        moves = {work.name: self._predict_moves(work) for work in self.job.models}
        sync = self._predict_sync(engine)
        overhead = self.constants.step + self.job.overhead_seconds
        if engine and self.job.max_staleness == 0:  # otherwise hidden behind generation
            overhead += self.constants.sample * self.job.sequences
        after = self._lay_out_passes(passes, moves, devices, engine)
        after_seconds = max((phase.end for phase in after), default=0.0) + overhead
        rollouts = None
        generated = 0.0
        if engine:
            rollouts = self._simulate(engine, after_seconds, sync + sum(moves[engine.name]))
            generated = rollouts.generation
        period = rollouts.period if rollouts else after_seconds
        phases = self._assemble(engine, generated, moves, after, sync, overhead, period, devices)
        return self._summarise(period, phases, passes, devices, rollouts, engine, batch)

    # ---- what goes through the models ------------------------------------------------------------------------------

    def _count_devices(self) -> dict[str, int]:
        """Return the devices of each group. Raises ValueError if there are more than the cluster has."""
        devices: dict[str, int] = {}
        for work in self.job.models:
            devices[work.group] = max(devices.get(work.group, 0), work.layout.gpus)
        if (total := sum(devices.values())) > self.cluster.gpus:
            groups = ", ".join(f"{name} {count}" for name, count in devices.items())
            raise ValueError(f"the models need {total} devices ({groups}); the cluster has {self.cluster.gpus}")
        return devices

    def _token_batch(self, lengths: list[tuple[float, float]]) -> TokenBatch:
        """Describe a batch by (count, response tokens) of its sequences, shortest first."""
        job = self.job
        prompt = job.prompt_tokens
        if job.is_padded:
            lengths = [(count, lengths[-1][1]) for count, _ in lengths]
        tokens = sum(count * (prompt + length) for count, length in lengths)
        squares = sum(count * (prompt + length) ** 2 for count, length in lengths)
        computed = tokens - (job.prompts * (job.samples - 1) * prompt if job.shares_prompts else 0.0)
        answered = sum(count * length for count, length in lengths)
        return TokenBatch(computed, squares / tokens, prompt + lengths[-1][1], answered / computed)

    def _predict_pass(self, work: ModelWork, batch: TokenBatch) -> PassTime:
        model = TrainingModel(work, self.cluster, self.constants)
        if work.role == "scorer":
            return model.forward(batch).times(work.passes)
        return model.train(batch, self.job.mini_batches).times(work.passes)

    def _predict_moves(self, work: ModelWork) -> tuple[float, float]:
        """Return the seconds of loading a model before its turn and of taking it away after."""
        if not work.is_moved:
            return 0.0, 0.0
        seconds = predict_move(work, self.constants)
        if work.role == "trainer":
            return seconds, seconds
        return seconds, 0.0  # what does not change in its turn is there already

    def _predict_sync(self, engine: ModelWork | None) -> float:
        trainer = next((work for work in self.job.models if work.role == "trainer" and not work.head_outputs), None)
        if not engine or not trainer:
            return 0.0
        return predict_sync(trainer, engine, self.cluster, self.constants) / self.job.sync_every

    # ---- the order of things ---------------------------------------------------------------------------------------

    def _lay_out_passes(
        self,
        passes: dict[str, PassTime],
        moves: dict[str, tuple[float, float]],
        devices: dict[str, int],
        engine: ModelWork | None,
    ) -> list[StepPhase]:
        """Return the phases after generation, from 0: scorers, then trainers; within a group one after another."""
        free: dict[str, float] = defaultdict(float)
        phases: list[StepPhase] = []
        begin = self.job.reward_seconds
        if begin and engine:
            phases.append(StepPhase("reward", "", engine.group, 0.0, begin, 0))
        for role, name in (("scorer", "score"), ("trainer", "train")):
            works = [work for work in self.job.models if work.role == role]
            for work in works:
                load, offload = moves[work.name]
                time = max(begin, free[work.group])
                for phase, seconds in (("load", load), (name, passes[work.name].seconds), ("offload", offload)):
                    if seconds:
                        phases.append(
                            StepPhase(phase, work.name, work.group, time, time + seconds, devices[work.group])
                        )
                    time += seconds
                free[work.group] = time
            begin = max([begin, *(free[work.group] for work in works)])
        return phases

    def _simulate(self, engine: ModelWork, after_seconds: float, sync: float) -> SimulatedSteps:
        job = self.job
        prices = EngineReplica(engine, self.cluster, self.constants)
        replicas = engine.layout.data
        counts = [
            (share * job.sequences * job.oversample, length) for share, length in job.responses.shares(job.sequences)
        ]
        batch = [(count / replicas, job.prompt_tokens, length) for count, length in counts]
        replica = ReplicaSimulation(prices, engine.max_sequences, job.samples)
        rules = StepRules(
            needed=job.sequences / replicas,
            train_seconds=after_seconds,
            sync_seconds=sync,
            staleness=job.max_staleness,
            in_order=job.in_order,
            carries=job.partial_rollout,
            oversample=job.oversample,
        )
        return simulate_steps(replica, batch, rules)

    def _assemble(
        self,
        engine: ModelWork | None,
        generated: float,
        moves: dict[str, tuple[float, float]],
        after: list[StepPhase],
        sync: float,
        overhead: float,
        period: float,
        devices: dict[str, int],
    ) -> tuple[StepPhase, ...]:
        phases: list[StepPhase] = []
        begin = 0.0
        if engine:
            load = moves[engine.name][0]
            if load:
                phases.append(StepPhase("load", engine.name, engine.group, 0.0, load, devices[engine.group]))
            length = generated if self.job.max_staleness == 0 else max(0.0, period - sync - load)
            phases.append(StepPhase("generate", engine.name, engine.group, load, load + length, devices[engine.group]))
            begin = load + length if self.job.max_staleness == 0 else 0.0
        phases += [replace(phase, start=begin + phase.start, end=begin + phase.end) for phase in after]
        end = max((phase.end for phase in phases if phase.name != "generate"), default=begin)
        end = max(end, begin)
        group = next((work.group for work in self.job.models if work.role == "trainer"), "all")
        phases.append(StepPhase("overhead", "", group, end, end + overhead, 0))
        if engine and sync:
            start = end + overhead if self.job.max_staleness == 0 else period - sync
            phases.append(StepPhase("sync", engine.name, engine.group, start, start + sync, devices[engine.group]))
        return tuple(phases)

    def _summarise(
        self,
        period: float,
        phases: tuple[StepPhase, ...],
        passes: dict[str, PassTime],
        devices: dict[str, int],
        rollouts: SimulatedSteps | None,
        engine: ModelWork | None,
        batch: TokenBatch,
    ) -> StepPrediction:
        job, peak = self.job, self.cluster.gpu.bf16_tflops * 1e12
        busy: dict[str, float] = dict.fromkeys(devices, 0.0)
        for phase in phases:
            if phase.name in ("train", "score"):
                busy[phase.group] += phase.seconds * self._share(phase.model, devices) - passes[phase.model].bubble
        if engine and rollouts:
            busy[engine.group] += rollouts.replica_busy * period * self._share(engine.name, devices)
        flops = sum(time.flops for time in passes.values())
        if engine:
            flops += engine.size.forward_flops(batch.length) * batch.tokens
        trainers = [work for work in job.models if work.role == "trainer"]
        trained = sum(passes[work.name].flops for work in trainers)
        could = sum(passes[work.name].seconds * work.layout.gpus * peak for work in trainers)
        return StepPrediction(
            seconds=period,
            phases=phases,
            tokens_per_second=job.tokens / period,
            mfu=flops / (period * sum(devices.values()) * peak),
            trainer_mfu=trained / could if could else 0.0,
            idle={group: max(0.0, 1 - seconds / period) for group, seconds in busy.items()},
            bubble={work.name: passes[work.name].bubble / passes[work.name].seconds for work in trainers},
            passes=passes,
            rollouts=rollouts,
        )

    def _share(self, name: str, devices: dict[str, int]) -> float:
        """Return the share of its group's devices that a model uses."""
        work = next(work for work in self.job.models if work.name == name)
        return work.layout.gpus / devices[work.group]
