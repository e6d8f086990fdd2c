"""A run from start to exit code: folder, cluster, engine, resume, signals, hooks."""

from __future__ import annotations

import hashlib
import json
import logging
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from coalign.checkpoint.resume import RunStores, read_checkpoint, resume
from coalign.checkpoint.schedule import Save, SaveInMemory
from coalign.cluster.choice import choose_cluster, start_cluster
from coalign.companions import EXPLAINS, ask, list_modules
from coalign.config import dump, locate_problems
from coalign.config.export import list_written
from coalign.config.schema import RunConfig
from coalign.config.secrets import hide_secrets
from coalign.engine.engine import Engine, Hook
from coalign.engine.fleet import Fleet
from coalign.engine.hooks.evaluation import EarlyStop, EvaluationHook
from coalign.engine.hooks.goodput import Goodput
from coalign.engine.hooks.guards import UNHEALTHY, FlatRewards, Guards
from coalign.engine.hooks.provenance import Provenance
from coalign.engine.hooks.recorder import MetricsRecorder, StructureRecord
from coalign.engine.hooks.run_control import Preempted, RunControl, StopSignals
from coalign.engine.hooks.run_folder import RunFolder, check_folders, flatten_stats
from coalign.engine.hooks.timeline import StepProfiler, Timeline
from coalign.engine.hooks.watchdog import Watchdog, run_watchdog
from coalign.engine.reference import precompute
from coalign.files import RecordFile, RecordHandler, Sink, describe_problem, write_text_atomically
from coalign.launch.data_load import load_data
from coalign.launch.device_plan import check_devices
from coalign.launch.fetch import fetch_sources, write_commits
from coalign.launch.layout import describe_assigned_layout, describe_start
from coalign.launch.plan import prepare
from coalign.launch.trace import trace
from coalign.report.display import Display
from coalign.report.plots import NEEDS_MATPLOTLIB, can_plot, plot_run
from coalign.report.step_line import ROLLOUTS, ROWS
from coalign.resilience.recovery import Recovery
from coalign.types import Stats

log = logging.getLogger(__name__)
FINISHED = (
    "this run is finished: %s has step %d of %d. For more steps raise `runtime.steps` (or `epochs`, `tokens`); to "
    "train anew give another `output`, or `runtime.resume=never`"
)


def train(config: RunConfig, display: Display, hooks: Sequence[Hook] = ()) -> int:
    """Train as the configuration says, once a look at its flow on stand-ins has found nothing wrong.

    Returns the exit code: 0, 3 if the run's guards ended it (runtime.guards), or 128 + the signal that did. ``hooks``
    see each step after evaluation and before it is recorded and saved. Of the processes of torchrun the first trains;
    the others serve its calls.
    """
    if choose_cluster(config) == "torchrun":
        from coalign.cluster.torchrun import TorchrunRank, serve_rank

        if TorchrunRank.read().rank > 0:
            return serve_rank(config.runtime.accelerator)
    with StopSignals(config.runtime.preemption_notice) as signals:
        try:
            return _train(config, display, hooks, signals)
        except KeyboardInterrupt:
            if signals.first is None:  # it came from elsewhere
                raise
            # CPython dies of SIGINT at exit where an interrupt has left an exec of text, until the next such exec.
            exec("")
            display.note(f"{signal.Signals(signals.first).name}: stopped at once, without saving")
            return 128 + signals.first


def _train(config: RunConfig, display: Display, hooks: Sequence[Hook], signals: StopSignals) -> int:
    _refuse_namesakes(hooks)
    named, config = config, fetch_sources(config)
    plan = prepare(config)
    config = plan.config
    graph = trace(plan)
    with locate_problems(config):
        check_folders(config)
    with closing(RunFolder(config.output, config.runtime.keep_rollouts)) as folder, _logged(folder, display):
        folder.state.note("running", algorithm=config.algorithm)
        goodput = Goodput(folder.metrics)
        write_commits(folder.path, named, config)
        data = load_data(plan)
        provenance = Provenance(config, data.eval.state_dict() if data.eval else None)
        stores = RunStores.open(folder, config.runtime)
        checkpoint = stores.find(config.runtime.resume)
        if checkpoint is not None:
            state = read_checkpoint(checkpoint, config)
            provenance.compare(state["hooks"].get("Provenance"))
            if state["step"] >= data.steps:
                log.warning(FINISHED, checkpoint, state["step"], data.steps)
                if stores.remote and checkpoint.parent == folder.checkpoints:  # it may have been away at the run's end
                    best = state["hooks"].get("Save", {}).get("best")
                    stores.remote.begin(state["step"], best and best[1])
                    stores.remote.finish()
                folder.state.note("ended", step=state["step"], steps=data.steps)
                display.finish(folder.path)
                return 0
        for line in describe_start(plan, data):
            log.info("%s", line)
        if plan.devices:
            log.info("%s", plan.devices)
        with locate_problems(config):
            check_devices(plan.started, config)
            identity = hashlib.sha256(f"{data.steps} {dump(config)}".encode()).hexdigest()
            for model in plan.models.values():  # before processes compete for the machine
                if model.base_of is None and not model.config.devices:
                    model.module.tune(model.config)
            claim = None
            if choose_cluster(config) == "ray":  # whose processes outlive this one
                from coalign.cluster.survivors.claim import RunClaim

                claim = RunClaim(folder.path, folder.epoch, identity, begins=checkpoint is None, waits=folder.waits)
            cluster = start_cluster(config, plan.started, claim)
            signals.install()
        try:
            if choose_cluster(config) != "local":
                log.info(
                    "placement:\n%s",
                    "\n".join(describe_assigned_layout(cluster.slots, cluster.placements, cluster.nodes)),
                )
            with run_watchdog(cluster, folder.path / "stalls", folder.state, config.runtime.stall) as watchdog:
                log.info("loading %s", ", ".join(plan.started))
                engine = plan.recipe(plan, cluster, data)
                engine.hooks += [provenance, StructureRecord(folder.path, graph)]
                return _learn(engine, folder, stores, checkpoint, display, watchdog, hooks, signals, goodput)
        finally:
            display.close()
            stores.abandon()
            cluster.shutdown()


def _learn(
    engine: Engine,
    folder: RunFolder,
    stores: RunStores,
    checkpoint: Path | None,
    display: Display,
    watchdog: Watchdog,
    hooks: Sequence[Hook],
    signals: StopSignals,
    goodput: Goodput,
) -> int:
    config, runtime = engine.config, engine.config.runtime
    save, save_in_memory = Save(stores, runtime), SaveInMemory(stores, runtime.save_in_memory_every)
    record = MetricsRecorder(folder, display, config)
    guards = Guards(runtime.guards, folder, save, record.write)
    timeline = Timeline(folder.path / "timeline", runtime.timeline_every)
    profile = [StepProfiler(runtime.profile, folder.path / "profile", engine)] if runtime.profile else []
    journal = []
    if runtime.journal:
        from coalign.engine.hooks.journal_hook import JournalHook

        journal = [JournalHook(folder.journal, stores.disk.steps)]
    engine.cluster.on_end = timeline.note
    flat = [FlatRewards()] if engine.rewards else []
    engine.hooks.extend([guards, *flat, timeline, *profile, *_evaluation(engine, record), *hooks])
    control = RunControl(folder.path, save.save_now, Fleet(runtime.autoscale, save_in_memory.save_models))
    engine.hooks.extend([goodput, record, *journal, save, save_in_memory, control])
    _refuse_namesakes(engine.hooks)
    resume(engine, stores, checkpoint, folder)
    if runtime.plots and not can_plot():
        log.warning("runtime.plots: no curves will be drawn: %s", NEEDS_MATPLOTLIB)
    first = engine.step
    folder.begin(dump(config), engine.step)
    write_text_atomically(folder.path / "written.json", json.dumps(list_written(config), indent=1))
    if runtime.trackers:
        from coalign.report.trackers import start_trackers

        settings = hide_secrets(config.model_dump())
        record.trackers += start_trackers(runtime.trackers, folder.path, settings, engine.step)
    log.info("%s", engine.environment.loader.report())
    folder.state.note("running", step=engine.step or None, steps=engine.last)
    precompute(engine, display)
    waiting = ROLLOUTS if engine.source == "prompts" else ROWS
    display.start(engine.step, engine.last, waiting=waiting, every=runtime.log_every)
    watching = (goodput, watchdog, display, timeline, signals, *profile)
    engine.phase_listeners.extend(listener.phase for listener in watching)
    signals.engine = engine
    try:
        engine.learn(Recovery(engine, stores, folder).recover)
    except Exception as error:
        if engine.progress.consistent_state is not None and max(first, record.newest) < engine.step:
            record.write(engine.step, engine.progress.stats)
        save.save_after_error(engine, error)
        preempted = isinstance(error, Preempted)
        record.close(failed=not preempted)
        if not preempted:
            raise
        folder.state.note("ended", reason=engine.stop)
        display.note("\n".join(error.__notes__))
        return 128 + signal.SIGTERM
    record.close(failed=False)
    folder.state.note("failed" if guards.ended else "ended", reason=None if engine.complete else engine.stop)
    if config.data.stream:  # only now is it known what became of the rows
        log.info("%s", engine.environment.loader.report())
    if runtime.plots and can_plot():
        with Sink("plots").survive():
            plot_run(folder.path)
    if runtime.plots and config.data.images is not None:
        from coalign.report.contact_sheet import write_sample_sheet  # which no run without images needs

        with Sink("plots").survive():
            write_sample_sheet(folder.path)
    display.finish(folder.path, flatten_stats(goodput.measure()))
    if guards.ended:
        return UNHEALTHY
    if control.stopped:
        return 128 + signal.SIGTERM  # as a signal would have ended it
    return 128 + signals.first if signals.first else 0


def _refuse_namesakes(hooks: Sequence[Hook]) -> None:
    """Refuse (ValueError) hooks of one name: a checkpoint keeps the state of each by the name of its class."""
    for name, count in Counter(type(hook).__name__ for hook in hooks).items():
        if count > 1:
            raise ValueError(f"hooks: {count} of them are called {name}; give each class a name of its own")


def _evaluation(engine: Engine, record: MetricsRecorder) -> list[Hook]:
    if engine.evaluator is None:
        return []
    runtime = engine.config.runtime

    def report(step: int, stats: Stats, batches: list[Any]) -> None:
        if stats:
            record.write(step, stats)
        record.record_evaluation(engine, batches)

    stopping = [EarlyStop(runtime.early_stop)] if runtime.early_stop else []
    return [EvaluationHook(runtime.eval_every, runtime.eval_at_start, report), *stopping]


@contextmanager
def _logged(folder: RunFolder, display: Display) -> Iterator[None]:
    """Send the library's log to the screen and to log.txt."""
    roots = [logging.getLogger(name) for name in list_modules()]
    to_file = RecordHandler(RecordFile(folder.path / "log.txt"), hide_secrets)
    screen = display.handler()
    for root in roots:
        root.setLevel(logging.INFO)
        for handler in (to_file, screen):
            root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        for root in roots:
            root.removeHandler(screen)  # whoever catches it says it there
        if explanation := ask(EXPLAINS, "ending", error, folder.path):
            error.add_note(explanation)
        text = hide_secrets(describe_problem(error)).partition("\n")[0]
        folder.state.note("ended" if isinstance(error, KeyboardInterrupt) else "failed", reason=text)
        log.exception("the run ended with an error")
        raise
    finally:
        for root in roots:
            for handler in (to_file, screen):
                root.removeHandler(handler)
