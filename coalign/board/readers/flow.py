"""Reads the flow of a run's recipe (flow.json), and places its calls for a drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.board.readers import read_object


def read_flow(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return `algorithm` and `calls` of a step (coalign.cluster.dry.describe_graph), each call with its `layer`."""
    flow = read_object(folder, "flow.json")
    calls = flow.get("calls")
    if not isinstance(calls, list):
        raise ValueError("flow.json has no list `calls`")
    layers = assign_layers(calls)
    return {"algorithm": flow.get("algorithm"), "calls": [call | {"layer": layers[call["label"]]} for call in calls]}


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
