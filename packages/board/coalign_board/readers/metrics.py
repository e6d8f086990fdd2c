"""Curves of a run for the pages run and compare, in as many points as a picture needs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from coalign.run_files.metric_table import describe_metric
from coalign.run_files.records import is_number
from coalign_board.catalog import find_within
from coalign_board.curves import FEWEST_BUCKETS, MetricCurves, round_value
from coalign_board.readers import read_list

_MAX_RUNS = 16  # runs whose curves are kept in memory
_MAX_NAMES = 200  # metrics in one request
_READ_SECONDS = 0.1  # then an answer is sent with what has been read


class CurveReader:
    """Keeps the curves of the runs that were looked at last, and reads on where it ended."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, tuple[Lock, MetricCurves]] = OrderedDict()
        self._lock = Lock()

    def read(self, folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the curves of the metrics `names` (a list in JSON), between the steps `from` and `to` if given.

        `since` is "generation:width:bucket" of an earlier answer: of the same buckets, only those from this one are
        sent. `complete` is false while a long file is being read: ask again. Points have `steps`, `tokens` and
        `seconds`; each series has the `mean` of its buckets, and `low` and `high` where a bucket has several steps.
        `all` are the names of all metrics, `latest` their newest values. `skipped` counts the lines that hold no step.
        `meanings` says what the metrics mean, in each language of the page; with `since` it was sent before.
        """
        names = read_list(params, "names", _MAX_NAMES)
        find_within(folder, folder / "metrics.jsonl")
        lock, curves = self._find(folder)
        with lock:
            complete = curves.read(_READ_SECONDS)
            return {
                "complete": complete,
                "read": curves.bytes_read,
                "newest": curves.newest,
                "skipped": curves.skipped,
                "latest": {
                    name: round_value(value) if is_number(value) else None for name, value in curves.latest.items()
                },
                "all": sorted(curves.series),
                "meanings": {} if "since" in params else {name: describe_metric(name) for name in names},
                **_select(curves, names, params),
            }

    def _find(self, folder: Path) -> tuple[Lock, MetricCurves]:
        with self._lock:
            if folder not in self._kept:
                self._kept[folder] = Lock(), MetricCurves(folder / "metrics.jsonl")
            self._kept.move_to_end(folder)
            while len(self._kept) > _MAX_RUNS:
                self._kept.popitem(last=False)
            return self._kept[folder]


def _select(curves: MetricCurves, names: list[str], params: Mapping[str, str]) -> dict[str, Any]:
    start, end = 0, len(curves.steps)
    chosen = curves
    if "from" in params or "to" in params:
        first, last = (_parse_step(params, name, curves) for name in ("from", "to"))
        start, end = curves.find_bucket(first), curves.find_bucket(last) + 1 if end else 0
        if end - start < FEWEST_BUCKETS and curves.width > 1:
            chosen = curves.read_part(names, first, last)
            start, end = 0, len(chosen.steps)
    elif (since := params.get("since", "")).startswith(f"{curves.generation}:{curves.width}:"):
        bucket = since.rpartition(":")[2]
        start = min(int(bucket), end) if bucket.isdecimal() else 0
    used = [i for i in range(start, end) if chosen.steps[i] >= 0]
    series = {}
    for name in names:
        if name in chosen.series:
            columns = chosen.series[name].select(start, end, is_exact=chosen.width == 1)
            holes = [chosen.steps[i] for i in columns.pop("holes")]
            sent = {key: [values[i - start] for i in used] for key, values in columns.items()}
            series[name] = sent | {"holes": holes}
    return {
        "generation": curves.generation,
        "width": chosen.width,
        "buckets": used,
        "steps": [chosen.steps[i] for i in used],
        "tokens": [chosen.tokens[i] for i in used],
        "seconds": [round(chosen.seconds[i], 3) for i in used],
        "series": series,
    }


def _parse_step(params: Mapping[str, str], name: str, curves: MetricCurves) -> float:
    """Return the first or last step of a section, no further than the curves go. Raises ValueError for no number."""
    try:
        step = float(params.get(name, -math.inf if name == "from" else math.inf))
    except ValueError:
        step = math.nan
    if math.isnan(step):
        raise ValueError(f"{name} is '{params[name]}'; expected a step")
    return min(max(step, float(curves.first or 0)), float(curves.newest))
