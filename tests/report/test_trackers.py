"""Trackers: every client for real, offline; two sessions of one run; and a tracker that fails."""

from __future__ import annotations

import csv
import json
import logging
import struct
import time
from operator import methodcaller
from pathlib import Path

import pytest

from coalign import load_config
from coalign.config.errors import ConfigError
from coalign.config.schema import TrackerConfig
from coalign.report import trackers
from coalign.report.trackers import TrackerFeed, _clean_mlflow_name, _read_ids, _Tracker, start_trackers
from tests.runs import run, settings

SAMPLES = [
    {"step": 1, "prompt": "1+1|\n", "response": "ü", "reward": 1.0},
    {"step": 1, "prompt": "2", "response": "", "reward": None},
]


def read_blocks(data: bytes) -> list[bytes]:
    """The records of a file in LevelDB's log format, behind wandb's header of 7 bytes."""
    records, at = [], 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        chunk, at = data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 2):
            records.append(chunk)
        else:
            records[-1] += chunk
    return records


def read_tensorboard(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    [table, *_] = [event.tensor_proto for event in found.Tensors("samples/train")]
    shape = [dim.size for dim in table.tensor_shape.dim]
    texts = [cell.decode() for cell in table.string_val]
    return [(e.step, e.value) for e in found.Scalars("loss/value")], [texts[i : i + shape[1]] for i in (0, shape[1])]


def read_wandb(folder: Path):
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in read_blocks(file.read_bytes()):
            record = Record.FromString(data)
            own = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
            if "loss/value" in own:
                points.append((own["step"], own["loss/value"]))
    table = json.loads(next(folder.rglob("train_1_*.table.json")).read_text())
    return points, [table["columns"], table["data"][0]]


def read_mlflow(folder: Path):
    from mlflow.tracking import MlflowClient

    client = MlflowClient((folder / "mlflow").as_uri())
    [found] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert found.info.run_name == folder.name and found.info.status == "FINISHED"
    assert found.data.params["models.policy.load"] == "tiny"
    assert client.get_metric_history(found.info.run_id, "eval/mean_at_4")[0].value == 0.5
    points = client.get_metric_history(found.info.run_id, "loss/value")
    [header, first, _] = csv.reader(next(folder.rglob("step_0000001.csv")).read_text().splitlines(keepends=True))
    return [(point.step, point.value) for point in points], [header, first]


def read_swanlab(folder: Path):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    points = []
    for file in sorted(folder.glob("swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            text = Record.FromString(data)
            if text.WhichOneof("record_type") == "scalar" and text.scalar.key == "loss/value":
                points.append((text.scalar.step, text.scalar.value.number))
    table = json.loads(next(folder.rglob("echarts/001-*.json")).read_text())
    return points, [[each["field"] for each in table["colDefs"]], list(table["rowData"][0].values())]


def read_trackio(folder: Path):
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("sums", _read_ids(folder / "trackers.json")["trackio"])
    assert SQLiteStorage.get_runs("sums") == [_read_ids(folder / "trackers.json")["trackio"]]
    [table, *_] = [each["samples/train"]["_value"] for each in logs if "samples/train" in each]
    return [(e["step"], e["loss/value"]) for e in logs if "loss/value" in e], [list(table[0]), list(table[0].values())]


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
    "trackio": read_trackio,
}


def log_steps(name: str, folder: Path, points: list[tuple[int, float]]) -> str:
    """One session of a run at a tracker, in which steps may come again; its id."""
    offline = name != "tensorboard"
    tracker = TrackerConfig(name=name, project="sums", offline=offline)
    [feed] = start_trackers([tracker], folder, {"models": {"policy": {"load": "tiny"}}}, points[0][0] - 1)
    newest = 0
    for step, loss in points:
        if step <= newest:
            feed.send(methodcaller("rewind", step - 1))
        newest = step
        feed.send(methodcaller("log", {"loss/value": loss, "eval/mean@4": 0.5, "odd": float("nan")}, step))
        feed.send(methodcaller("log_samples", "samples/train", SAMPLES, step))
    feed.close(failed=False)
    return _read_ids(folder / "trackers.json")[name]


@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tmp_path, monkeypatch, caplog, name):
    """Step 3 is undone by a resume, step 4 by a rollback. TensorBoard forgets them, the others keep both points."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when the client is imported
    pytest.importorskip(name)
    with caplog.at_level(logging.WARNING, "coalign"):
        first = log_steps(name, tmp_path, [(1, 1.0), (2, 2.0), (3, 3.0)])
        time.sleep(1.0 if name in ("wandb", "swanlab") else 0.0)  # their folders are named by the second
        assert log_steps(name, tmp_path, [(3, 30.0), (4, 4.0), (4, 40.0)]) == first
    assert "cannot be written" not in caplog.text and "not sent" not in caplog.text
    every = [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 4.0), (4, 40.0)]
    kept = [point for point in every if name != "tensorboard" or point not in ((3, 3.0), (4, 4.0))]
    end = time.monotonic() + 20
    while (found := READERS[name](tmp_path))[0] != kept and time.monotonic() < end:
        time.sleep(0.1)  # wandb's own process writes the end of the file a little after `finish` has returned
    points, [header, row] = found
    assert points == kept
    assert header == list(SAMPLES[0]) and [str(cell) for cell in row] == ["1", "1+1|\n", "ü", "1.0"]


class Unreliable(_Tracker):
    """Fails as often as ``fails`` says, and refuses the step 13."""

    def __init__(self, fails: int) -> None:
        self.fails, self.sent = fails, []

    def start(self, run_id, step):
        self._fail()
        return "it"

    def log(self, metrics, step):
        self._fail()
        if step == 13:
            raise ValueError("13")
        self.sent.append(step)

    def log_samples(self, name, rows, step): ...

    def finish(self, failed):
        self.sent.append("failed" if failed else "finished")

    def _fail(self):
        self.fails -= 1
        if self.fails >= 0:
            raise ConnectionError("away")


def feed_steps(tmp_path, tracker, steps):
    feed = TrackerFeed("it", tracker, tmp_path / "ids.json", 0)
    for step in steps:
        feed.send(methodcaller("log", {"loss": 1.0}, step))
    feed.close(failed=True)
    return tracker.sent


def test_what_could_not_be_sent_waits(tmp_path, caplog):
    """The start fails three times (at once, with steps 1 and 2), then the first record once."""
    assert feed_steps(tmp_path, Unreliable(fails=4), range(1, 7)) == [1, 2, 3, 4, 5, 6, "failed"]
    assert caplog.text.count("cannot be written: away") == 1 and caplog.text.count("can be written again") == 1


def test_a_record_that_is_refused_is_given_up(tmp_path, caplog):
    assert feed_steps(tmp_path, Unreliable(fails=0), range(10, 60)) == [10, 11, 12, *range(14, 60), "failed"]
    assert "1 records were not sent" in caplog.text


def test_a_tracker_that_never_answers_ends_no_run(tmp_path, caplog):
    assert feed_steps(tmp_path, Unreliable(fails=10**6), range(5)) == []
    assert "6 records were not sent" in caplog.text


def test_a_tracker_that_hangs_is_left_behind(tmp_path, monkeypatch, caplog):
    import threading

    held = threading.Event()
    monkeypatch.setattr(trackers, "END_SECONDS", 0.1)
    monkeypatch.setattr(Unreliable, "start", lambda self, run_id, step: held.wait(30) and "it")
    assert feed_steps(tmp_path, Unreliable(fails=0), range(3)) == []
    assert "4 records were not sent" in caplog.text
    held.set()


def test_a_run_resumes_its_trackers_and_begins_anew_with_never(tmp_path):
    config = settings(tmp_path, "sft", steps=2, eval_at_start=False, trackers=["tensorboard"])
    assert run(config) == 0 and run(config, "runtime.steps=4") == 0
    folder = Path(config["output"])
    assert _read_ids(folder / "trackers.json") == {"tensorboard": "tensorboard"}
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert run(config, "runtime.resume=never", "runtime.steps=1") == 0
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert (folder / "tensorboard.before-1").exists() and (folder / "trackers.json.before-1").exists()


def test_a_rollback_is_told_to_the_trackers(tmp_path):
    from coalign.engine.hooks.recorder import MetricsRecorder
    from coalign.engine.hooks.run_folder import RunFolder
    from coalign.report.display import Display
    from coalign.types import Stat

    recorder = MetricsRecorder(RunFolder(tmp_path), Display(quiet=True), load_config(settings(tmp_path, "sft")))
    recorder.trackers += start_trackers([TrackerConfig(name="tensorboard")], tmp_path, {}, 0)
    for step, loss in ((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0)):
        recorder.write(step, {"loss/value": Stat(loss)})
    recorder._send("log_samples", "samples/train", SAMPLES, 3)
    recorder.close(failed=False)
    assert read_tensorboard(tmp_path)[0] == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0)]


@pytest.mark.parametrize(
    "runtime, message",
    [
        ({"wandb": "sums"}, r"runtime\.wandb: unknown key; trackers are listed in `runtime\.trackers`"),
        ({"tensorboard": False}, r"runtime\.tensorboard: unknown key"),
        ({"trackers": ["wandb", "wandb"]}, r"runtime\.trackers\[1\]: 'wandb' is listed twice"),
        ({"trackers": {"name": "wandb", "url": "http://a", "offline": True}}, "`offline` sends nothing"),
        ({"trackers": "wanb"}, "did you mean 'wandb'"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path, runtime, message):
    with pytest.raises(ConfigError, match=message):
        load_config(settings(tmp_path, "sft", **runtime))


def test_names_for_mlflow():
    assert _clean_mlflow_name("eval/gsm8k/mean@4") == "eval/gsm8k/mean_at_4"
