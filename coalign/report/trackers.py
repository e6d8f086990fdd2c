"""Sends a run's metrics and samples to experiment trackers: TensorBoard, wandb, MLflow, SwanLab and Trackio.

A tracker never holds a step up and never ends a run: each has a thread, where unsent records wait.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.files import RecordFile, Sink, write_text_atomically
from coalign.threads import CallQueue

if TYPE_CHECKING:
    from coalign.config.schema import TrackerConfig

log = logging.getLogger(__name__)

ATTEMPTS = 20  # sends of one record before it is given up: the tracker may refuse it
END_SECONDS = 60.0  # in which a tracker may send waiting records at the end of a run
IDS = "trackers.json"  # a file in the run folder with the id of the run at each tracker
MLFLOW_PARAMS_PER_REQUEST = 100
_IDS_LOCK = threading.Lock()


class _Tracker(ABC):
    """One run at one tracker. All calls come from one thread; any of them may raise."""

    def __init__(self, settings: TrackerConfig, folder: Path, config: Mapping[str, Any]) -> None:
        """``folder`` is the run's, ``config`` its settings without secrets."""
        self.settings = settings
        self.folder = folder
        self.config = config
        self.name = settings.run or folder.resolve().name

    @abstractmethod
    def start(self, run_id: str | None, step: int) -> str:
        """Begin a run (``run_id`` None) or continue the one of that id after ``step``; return its id."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step."""

    @abstractmethod
    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send samples as a table called ``name``. All rows have the same keys; values are texts and numbers."""

    def rewind(self, step: int) -> None:  # noqa: B027 (most can do nothing)
        """Delete the records after ``step``, if the tracker can. By default they stay, and new points join them."""

    @abstractmethod
    def finish(self, failed: bool) -> None:
        """Send the client's buffered records, and end the run."""


class _TensorBoardTracker(_Tracker):
    """Event files in `tensorboard/`, written here because torch's writer ends at the first error of the disk."""

    def start(self, run_id: str | None, step: int) -> str:
        folder = self.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        now = time.time()
        self._file = RecordFile(folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}")
        self._append(file_version="brain.Event:2")
        if run_id:
            self.rewind(step)
        return folder.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [{"tag": name, "simple_value": number} for name, number in metrics.items()]
        self._append(step=step, summary={"value": values})

    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        cells = [str(cell).encode() for cell in (*rows[0], *(cell for row in rows for cell in row.values()))]
        shape = {"dim": [{"size": len(rows) + 1}, {"size": len(rows[0])}]}
        tensor = {"dtype": "DT_STRING", "string_val": cells, "tensor_shape": shape}  # text in two dimensions: a table
        text = {"tag": name, "tensor": tensor, "metadata": {"plugin_data": {"plugin_name": "text"}}}
        self._append(step=step, summary={"value": [text]})

    def rewind(self, step: int) -> None:
        self._append(step=step + 1, session_log={"status": "START"})  # readers drop what they have from there on

    def finish(self, failed: bool) -> None:
        """Every record is on the disk already."""

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # no stubs
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.append(record.getvalue())


class _WandbTracker(_Tracker):
    """Metrics are drawn over the metric `step`: wandb's own counter refuses the steps that a rollback repeats."""

    def start(self, run_id: str | None, step: int) -> str:
        import wandb  # pyright: ignore[reportMissingImports]  # an optional package

        server: dict[str, Any] = {"base_url": self.settings.url} if self.settings.url else {}
        self._run = wandb.init(
            project=self.settings.project,
            name=self.name,
            id=run_id,
            resume="allow" if run_id else None,
            dir=self.folder,
            config=dict(self.config),
            allow_val_change=True,
            mode="offline" if self.settings.offline else None,
            reinit="create_new",
            settings=wandb.Settings(console="off", **server),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._table = wandb.Table
        return self._run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data: Any = [list(row.values()) for row in rows]
        table = self._table(columns=list(rows[0]), data=data, allow_mixed_types=True)
        self._run.log({name: table, "step": step})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MlflowTracker(_Tracker):
    """Samples are CSV files among the artifacts, which MLflow shows as tables."""

    def start(self, run_id: str | None, step: int) -> str:
        if self.settings.offline:  # the small client has no database; MLflow imports the files into one
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]  # an optional package
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric = Metric
        here = (self.folder / "mlflow").absolute().as_uri()
        self._client = MlflowClient(here if self.settings.offline else self.settings.url)
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            self._id = run_id
        else:
            experiment = self._client.get_experiment_by_name(self.settings.project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(self.settings.project)
            self._id = self._client.create_run(number, run_name=self.name).info.run_id
            texts = [Param(name, text[:500]) for name, text in _flatten(self.config) if text]
            for first in range(0, len(texts), MLFLOW_PARAMS_PER_REQUEST):
                self._client.log_batch(self._id, params=texts[first : first + MLFLOW_PARAMS_PER_REQUEST])
        self._client.log_dict(self._id, dict(self.config), f"config_from_step_{step}.yaml")
        return self._id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        points = [self._metric(_clean_mlflow_name(name), number, now, step) for name, number in metrics.items()]
        for first in range(0, len(points), 1000):
            self._client.log_batch(self._id, metrics=points[first : first + 1000])

    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
        self._client.log_text(self._id, text.getvalue(), f"{name}/step_{step:07}.csv")

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class _SwanlabTracker(_Tracker):
    """Its client leaves out a step that it has sent, until the run is opened again: so ``rewind`` does that."""

    def start(self, run_id: str | None, step: int) -> str:
        import swanlab  # pyright: ignore[reportMissingImports]  # an optional package

        host = self.settings.url
        server: dict[str, Any] = {"api_host": host, "web_host": host} if host else {}
        client_settings = swanlab.Settings
        settings = client_settings(
            interactive=False,
            terminal=client_settings.Terminal(proxy_type="none"),
            probe=client_settings.Probe(requirements=False),  # a list of all packages takes pip seconds
            **server,
        )
        if self.settings.offline:
            (self.folder / "swanlab").mkdir(exist_ok=True)
        self._client = swanlab
        self._id = swanlab.init(
            project=self.settings.project,
            name=self.name,
            id=run_id or secrets.token_hex(8),
            resume="allow",
            config=dict(self.config),
            mode="offline" if self.settings.offline else None,
            log_dir=str(self.folder / "swanlab") if self.settings.offline else None,
            settings=settings,
        ).id
        return self._id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._client.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._client.echarts.Table().add(list(rows[0]), [list(row.values()) for row in rows])
        self._client.log({name: table}, step=step)

    def rewind(self, step: int) -> None:
        self.finish(failed=False)
        self.start(self._id, step)

    def finish(self, failed: bool) -> None:
        self._client.finish("crashed" if failed else "success")


class _TrackioTracker(_Tracker):
    """Trackio resumes runs by name, so the id is a name with a random end. Spaces that it makes are private."""

    def start(self, run_id: str | None, step: int) -> str:
        import trackio  # pyright: ignore[reportMissingImports]  # an optional package

        url = None if self.settings.offline else self.settings.url
        server: dict[str, Any] = {"server_url" if url.startswith("http") else "space_id": url} if url else {}
        self._table = trackio.Table
        self._run = trackio.init(
            self.settings.project,
            name=run_id or f"{self.name}-{secrets.token_hex(3)}",
            resume="allow",
            config=dict(self.config),
            private=True,
            embed=False,
            **server,
        )
        return self._run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data: Any = [dict(row) for row in rows]  # the annotation knows lists only
        self._run.log({name: self._table(data=data)}, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish()


CLASSES: Mapping[str, type[_Tracker]] = {
    "tensorboard": _TensorBoardTracker,
    "wandb": _WandbTracker,
    "mlflow": _MlflowTracker,
    "swanlab": _SwanlabTracker,
    "trackio": _TrackioTracker,
}


class TrackerFeed:
    """Sends records to one tracker from a thread. A record that cannot be sent waits, and is sent with the next one."""

    def __init__(self, name: str, tracker: _Tracker, ids: Path, step: int) -> None:
        """``ids`` is the file of run ids: the id at this tracker is read from it, or added once the run has begun."""
        self.name, self._tracker, self._ids, self._step = name, tracker, ids, step
        self._has_started = False
        self._submitted = self._sent = self._failures = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._sink = Sink(f"the metrics in {name}")
        self._queue = CallQueue(f"tracker-{name}")
        self._queue.submit(self._flush)

    def send(self, call: Callable[[_Tracker], None]) -> None:
        """Have ``call`` send something, after all that was sent before."""
        self._submitted += 1
        self._queue.submit(partial(self._send, partial(call, self._tracker)))

    def close(self, failed: bool) -> None:
        """End the tracker's run, and wait a little for it."""
        self.send(lambda tracker: tracker.finish(failed))
        self._queue.close()
        self._queue.join(END_SECONDS)
        if left := self._submitted - self._sent:
            message = "%s: %d records were not sent; metrics.jsonl and samples.jsonl have them"
            log.warning(message, self.name, left)

    def _send(self, record: Callable[[], None]) -> None:
        self._waiting.append(record)
        self._flush()

    def _flush(self) -> None:
        with self._sink.survive(Exception):
            if not self._has_started:
                self._begin()
            while self._waiting:
                try:
                    self._waiting[0]()
                    self._sent += 1
                except Exception:
                    self._failures += 1
                    if self._failures < ATTEMPTS:
                        raise
                self._failures = 0
                self._waiting.popleft()

    def _begin(self) -> None:
        run_id = self._tracker.start(_read_ids(self._ids).get(self.name), self._step)
        self._has_started = True
        with _IDS_LOCK:
            write_text_atomically(self._ids, json.dumps({**_read_ids(self._ids), self.name: run_id}, indent=1))


def _read_ids(path: Path) -> dict[str, str]:
    """Read the ids of a run at its trackers; none if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {}


def start_trackers(
    settings: Sequence[TrackerConfig], folder: Path, config: Mapping[str, Any], step: int
) -> list[TrackerFeed]:
    """Begin or continue, after ``step``, the run of a folder at each tracker. ``config`` holds no secrets."""
    ids = folder / IDS
    return [
        TrackerFeed(tracker.name, CLASSES[tracker.name](tracker, folder, config), ids, step) for tracker in settings
    ]


def _clean_mlflow_name(name: str) -> str:
    """Replace what MLflow refuses in names: `eval/mean@4` becomes `eval/mean_at_4`."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))


def _flatten(value: Any, key: str = "") -> list[tuple[str, str]]:
    """List (dotted key, text) of all settings."""
    if isinstance(value, Mapping):
        return [pair for name, item in value.items() for pair in _flatten(item, f"{key}.{name}" if key else str(name))]
    return [(_clean_mlflow_name(key), str(value))]


def check_trackers(trackers: Sequence[TrackerConfig]) -> None:
    """Raise ImportError for a tracker whose client is not installed."""
    for tracker in trackers:
        if find_spec(tracker.name) is None:
            raise ImportError(
                f"runtime.trackers has '{tracker.name}', which is not installed: "
                f"pip install 'coalign[{tracker.name}]', or leave it out"
            )
