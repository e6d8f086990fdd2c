"""Reads what computed when: the traces of single steps (timeline/step_N.json), and faults that log.txt tells of.

Lanes are the processes of models. With placement.json there are also lanes of devices, on which several models take
turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.run_files.records import is_number, read_end
from coalign_board.catalog import find_within
from coalign_board.readers import parse_number, read_count, read_object
from coalign_board.readers.placement import find_placement

LOOP = "loop"  # the lane of the engine's phases (coalign.engine.hooks.timeline)
MOVE = "move"  # a part of a model goes to a device, or leaves it: not computing
NARROWEST = 2000  # bars narrower than a step over this are drawn together with their neighbours
_LOG_BYTES = 16 * 2**20  # read from the end of log.txt
# A type of event -> what its line in log.txt has.
_EVENTS = {
    "lost": " is lost (",
    "rolled_back": "Continuing from step",
    "continued": "continuing from ",
    "asked": "asked to ",
    "checkpoint": "could not be written",
    "stopped": "stopping: ",
    "failed": "the run ended with an error",
}
_EVENT = re.compile(
    rb"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* (INFO|WARNING|ERROR) \S+: (.*(?:"
    + b"|".join(re.escape(text.encode()) for text in _EVENTS.values())
    + rb").*)\n",
    re.MULTILINE,
)


def read_timeline(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the steps that have `traces`, and the `events` of log.txt: losses, restarts, rollbacks and failures."""
    return {"traces": list_traces(folder), "events": list(read_events(find_within(folder, folder / "log.txt")))}


def list_traces(folder: Path) -> list[int]:
    """Return the steps that have a trace, ascending."""
    numbers = (parse_number(path.stem) for path in (folder / "timeline").glob("step_*.json"))
    return sorted(number for number in numbers if number >= 0)


def read_events(path: Path) -> Iterable[dict[str, str]]:
    """Yield the lines of a log that tell of lost processes, restarts, rollbacks and failures."""
    for match in _EVENT.finditer(read_end(path, _LOG_BYTES)):
        time, level, message = (group.decode("utf-8", "replace") for group in match.groups())
        event_type = next(event_type for event_type, words in _EVENTS.items() if words in message)
        yield {"time": time, "level": level, "kind": event_type, "text": message}


def read_trace(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return what was computed in a `step`: `lanes` of processes, and `devices` with the lanes that they have.

    `skipped` counts the events that are none of Chrome's format.
    A bar is [start, seconds, name, call, MiB, number of calls]; a wait is [start, seconds, name]. Times are seconds
    since the step began.
    """
    step = read_count(params, "step")
    if step not in list_traces(folder):
        raise FileNotFoundError(f"step {step} has no trace; `runtime.timeline_every` says which steps are traced")
    listed = read_object(folder, f"timeline/step_{step}.json").get("traceEvents")
    if not isinstance(listed, list):
        raise ValueError(f"timeline/step_{step}.json has no list `traceEvents`")
    events = [event for event in listed if is_event(event)]
    seconds = max((event["ts"] + event["dur"] for event in events if event["ph"] == "X"), default=0) / 1e6
    lanes = build_lanes(events, seconds)
    placement = find_placement(folder)
    return {
        "step": step,
        "seconds": seconds,
        "skipped": len(listed) - len(events),
        "lanes": lanes,
        "devices": group_by_device(lanes, placement, seconds) if placement else [],
    }


def is_event(event: Any) -> bool:
    """Whether a value is an event of a trace in Chrome's format, with all that `build_lanes` reads of it."""
    if type(event) is not dict or type(event.get("name")) is not str or type(event.get("pid")) is not int:
        return False
    arguments = event.get("args", {})
    has_lane = type(event.get("tid")) is int
    match event.get("ph"):
        case "M":
            named = type(arguments) is dict and type(arguments.get("name")) is str
            return named and (has_lane or event["name"] != "thread_name")
        case "X":
            named = type(arguments) is dict and isinstance(arguments.get("label", ""), str)
            numbers = (event.get("ts"), event.get("dur"), arguments.get("MiB", 0)) if named else ()
            return named and has_lane and all(map(is_number, numbers))
        case "b" | "e":
            return has_lane and is_number(event.get("ts")) and type(event.get("id")) in (int, str)
    return False


def build_lanes(events: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the lanes of a trace in Chrome's format, models beside each other and the loop first.

    `idle` is the share of ``seconds`` in which a lane did not compute; null for the loop.
    """
    named = [event for event in events if event["ph"] == "M"]
    models = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    names = {_key(event): event["args"]["name"] for event in named if event["name"] == "thread_name"}
    bars: dict[tuple[int, int], list[list[Any]]] = {key: [] for key in names}
    waits: dict[tuple[int, int], list[list[Any]]] = {key: [] for key in names}
    open_calls: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event["ph"] != "M" and _key(event) not in names:
            continue
        if event["ph"] == "X":
            arguments = event.get("args", {})
            call, memory = arguments.get("label", event["name"]), arguments.get("MiB", 0)
            bars[_key(event)].append([event["ts"] / 1e6, event["dur"] / 1e6, event["name"], call, memory, 1])
        elif event["ph"] == "b":
            open_calls[event["id"]] = event
        elif event["ph"] == "e" and event["id"] in open_calls:
            start = open_calls[event["id"]]["ts"] / 1e6
            waits[_key(event)].append([start, event["ts"] / 1e6 - start, event["name"]])
    lanes = []
    for key in sorted(names, key=lambda key: (models.get(key[0]) != LOOP, key[0], _find_rank(names[key]), key[1])):
        model, process = models.get(key[0], "?"), names[key]
        if not (lane_bars := sorted(bars[key], key=lambda bar: bar[0])):
            continue  # calls that only wait for others, such as `join`
        lanes.append(
            {
                "model": model,
                "process": "" if process == model else process,
                "idle": None if model == LOOP else _compute_idle([lane_bars], seconds),
                "bars": merge_narrow(lane_bars, seconds / NARROWEST),
                "waits": sorted(waits[key]),
            }
        )
    return lanes


def merge_narrow(bars: Sequence[Sequence[Any]], width: float) -> list[list[Any]]:
    """Join neighbours of one name that are narrower than ``width`` seconds, as are the gaps between them."""
    merged: list[list[Any]] = []
    for bar in bars:
        last = merged[-1] if merged else None
        if last and last[2:4] == list(bar[2:4]) and bar[1] < width and bar[0] - last[0] - last[1] < width:
            last[1] = max(last[1], bar[0] + bar[1] - last[0])
            last[4], last[5] = max(last[4], bar[4]), last[5] + bar[5]
        else:
            merged.append(list(bar))
    return merged


def group_by_device(
    lanes: Sequence[Mapping[str, Any]], placement: Mapping[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Return each device with the numbers of its ``lanes``, and the share of ``seconds`` in which none computed."""
    on_device: dict[tuple[int, str], list[int]] = {}
    for number, lane in enumerate(lanes):
        processes = placement["models"].get(lane["model"], {}).get("processes", [])
        placed = processes[_find_rank(lane["process"]) :][:1]
        for node, devices in placed:
            for device in devices:
                on_device.setdefault((node, device), []).append(number)
    nodes = placement["nodes"]
    return [
        {
            "node": nodes[node] if node < len(nodes) else str(node),
            "device": device,
            "lanes": numbers,
            "idle": _compute_idle([lanes[number]["bars"] for number in numbers], seconds),
        }
        for (node, device), numbers in sorted(on_device.items(), key=lambda d: (d[0][0], len(d[0][1]), d[0][1]))
    ]


def _find_rank(process: str) -> int:
    """Return the number of a rank or replica by its name, `replica 3 on node7`; 0 for a single process."""
    match = re.search(r"\b(?:rank|replica) (\d{1,9})", process)
    return int(match[1]) if match else 0


def _compute_idle(lanes: Iterable[Iterable[Sequence[Any]]], seconds: float) -> float:
    """Return the share of ``seconds`` that no bar but those of moves covers."""
    bars = sorted((bar[0], bar[0] + bar[1]) for lane in lanes for bar in lane if bar[2] != MOVE)
    busy, reached = 0.0, 0.0
    for start, stop in bars:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return max(0.0, 1.0 - busy / seconds) if seconds else 1.0


def _key(event: Mapping[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]
