"""Reads the flow of a run's recipe (flow.json) and places its calls for a drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.board.readers.records import read_steps
from coalign.files import read_json_object


def read_flow(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the `calls` of a step as coalign.cluster.dry recorded them, each with its `layer` and its `seconds`.

    A call is one layer below the last of those that it reads from. `seconds` are the newest step's (null: that step
    reports none); calls of one method share a figure.
    """
    path = folder / "flow.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the run was begun by a version of Coalign that did not write it")
    flow = read_json_object(path)
    calls = flow.get("calls")
    if not isinstance(calls, list):
        raise ValueError(f"{path} has no list `calls`")
    rows = read_steps(folder / "metrics.jsonl", "time/")
    newest = rows[-1] if rows else {}
    layers = assign_layers(calls)
    return {
        "algorithm": flow.get("algorithm"),
        "step": newest.get("step"),
        "calls": [
            call | {"layer": layers[call["label"]], "seconds": newest.get(f"time/{_name_call(call)}")} for call in calls
        ],
    }


def assign_layers(calls: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the layer of each call, from 0, by label. ``calls`` are in the order in which the flow made them."""
    layers: dict[str, int] = {}
    for call in calls:
        layers[call["label"]] = 1 + max((layers.get(source, -1) for source in call["reads"]), default=-1)
    return layers


def _name_call(call: Mapping[str, Any]) -> str:
    return f"{call['model']}.{call['method']}" if call["model"] else call["method"]
