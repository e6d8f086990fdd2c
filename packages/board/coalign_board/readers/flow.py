"""Reads the flow of a run's recipe (flow.json), and places its calls for a drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign_board.readers import read_object


def read_flow(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return `algorithm` and `calls` of a step (coalign.cluster.dry.describe_graph), each call with its `layer`.

    `skipped` counts what is no call.
    """
    flow = read_object(folder, "flow.json")
    listed = flow.get("calls")
    if not isinstance(listed, list):
        raise ValueError("flow.json has no list `calls`")
    calls = [call for call in listed if _is_call(call)]
    layers = assign_layers(calls)
    placed = [call | {"layer": layers[call["label"]]} for call in calls]
    return {"algorithm": flow.get("algorithm"), "calls": placed, "skipped": len(listed) - len(calls)}


def _is_call(call: Any) -> bool:
    if type(call) is not dict or type(call.get("label")) is not str:
        return False
    reads = call.get("reads")
    return isinstance(reads, dict) and all(isinstance(columns, list) for columns in reads.values())


def assign_layers(calls: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the layer of each call by its label: one below the lowest of those that it reads from, from 0.

    ``calls`` are in the order in which the flow made them.

    Example:
        >>> assign_layers([{"label": "prompts", "reads": {}}, {"label": "policy.generate", "reads": {"prompts": []}}])
        {'prompts': 0, 'policy.generate': 1}
    """
    layers: dict[str, int] = {}
    for call in calls:
        layers[call["label"]] = 1 + max((layers.get(source, -1) for source in call["reads"]), default=-1)
    return layers
