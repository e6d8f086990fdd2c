"""Ending a run when an evaluation metric no longer improves."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from coalign.checkpoint.folder import CheckpointFolder
from coalign.checkpoint.resume import RunStores
from coalign.checkpoint.schedule import Save
from coalign.config.schema.runtime import EarlyStopConfig, RuntimeConfig
from coalign.engine.hooks.evaluation import EarlyStop
from coalign.engine.progress import Progress
from coalign.types import Stat
from tests.runs import metrics, run, run_to_end, settings


def stopped_after(values: list[float], **config) -> int | None:
    """At which of the evaluations (from 1) the hook ends the run."""
    hook, engine = EarlyStop(EarlyStopConfig(metric="eval/x", **config)), SimpleNamespace(progress=Progress())
    for i, value in enumerate(values, 1):
        hook.after_evaluation(engine, {"eval/x": Stat(value)})
        if engine.progress.stop_reason:
            return i
    return None


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "config", "expected"),
    [
        ([3, 2, 2.5, 2.4, 1.9, 2, 2], {"patience": 3}, None),
        ([3, 2, 2.5, 2.4, 2.1, 1], {"patience": 3}, 5),
        ([3, 3], {"patience": 1}, 2),
        ([0.1, 0.2, 0.3, 0.2, 0.1], {"patience": 2, "mode": "max"}, 5),
        ([0.1, 0.2, 0.3], {"patience": 2, "mode": "min"}, 3),
        # 0.1 down a step: the third value is 0.2 away from the first one
        ([1.0, 0.9, 0.8, 0.7, 0.6], {"patience": 2, "min_delta": 0.15}, None),
        ([1.0, 0.9, 0.8, 0.7, 0.6], {"patience": 2, "min_delta": 0.25}, 3),
        ([1.0, 0.75, 0.5], {"patience": 1, "min_delta": 0.25}, 2),  # exactly as much is none
        ([NAN, NAN], {"patience": 2}, 2),
        ([NAN, 1.0, NAN, 0.5], {"patience": 2}, None),
        ([1.0, NAN, NAN], {"patience": 2}, 3),
    ],
)
def test_a_run_stops_after_evaluations_in_a_row_without_an_improvement(values, config, expected):
    assert stopped_after(values, **config) == expected


def test_a_metric_that_is_not_reported_is_named_with_those_that_are():
    hook = EarlyStop(EarlyStopConfig(metric="eval/loss"))
    with pytest.raises(ValueError) as error:
        stats = {"eval/loss/value": Stat(1.0), "time/eval": Stat(1.0)}
        hook.after_evaluation(SimpleNamespace(progress=Progress()), stats)
    assert "runtime.early_stop.metric: evaluation reports no 'eval/loss'" in str(error.value)
    assert str(error.value).endswith("it reports eval/loss/value")


def test_the_run_ends_with_a_checkpoint_and_stays_ended(tmp_path, caplog):
    stop = {"metric": "eval/loss/value", "patience": 2}
    config = settings(tmp_path, "sft", steps=9, eval_every=1, early_stop=stop)
    config["models"]["trainer"]["optimizer"] = {"lr": 0.0}  # no evaluation improves on the first one
    assert [line["step"] for line in run_to_end(config)] == [0, 1, 2]
    assert "stopping early: eval/loss/value has not improved on" in (Path(config["output"]) / "log.txt").read_text()
    state = json.loads((Path(config["output"]) / "checkpoints" / "step_2" / "state.json").read_text())
    assert state["hooks"]["EarlyStop"]["waited"] == 2
    assert run(config) == 0  # resumed: nothing left to do
    assert [line["step"] for line in metrics(config)] == [0, 1, 2]
    assert [line["step"] for line in run_to_end(config, "runtime.early_stop.patience=3")] == [0, 1, 2, 3]


def make_save(path: Path, **settings: str) -> Save:
    folder = CheckpointFolder(path / "checkpoints", keep=1)
    return Save(RunStores(folder, folder), RuntimeConfig(best="eval/x", **settings))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("mode", "expected"), [("max", (5.0, 2)), ("min", (1.0, 3))])
def test_the_best_checkpoint_in_either_direction_is_known_after_a_restart(tmp_path, mode, expected):
    save, again = make_save(tmp_path, best_mode=mode), make_save(tmp_path, best_mode=mode)
    engine = SimpleNamespace(step=0, complete=False, stop=None, progress=Progress(), phase=lambda name: None)
    save.disk.begin = lambda step, fill: None
    for engine.step, value in enumerate([float("nan"), 5.0, 1.0, 3.0], 1):
        save.after_step(engine, {"eval/x": Stat(value)}, None)
    again.load_state_dict(json.loads(json.dumps(save.state_dict())))
    assert save.best == again.best == expected
