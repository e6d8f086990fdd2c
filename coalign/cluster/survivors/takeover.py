"""Takes the living processes of a run over from a driver that has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

from coalign.cluster.survivors.claim import LEASE_SECONDS, ProcessState, RunClaim, WorkersRecord

log = logging.getLogger(__name__)
ASK_SECONDS = 10.0  # how long processes may take to report their state
IDLE_SECONDS = 60.0  # how long one may take to end the calls of the previous driver
TORN_SECONDS = 3.0  # a rank that computes so long after another has ended its calls waits for that one in vain
_POLL_SECONDS = 0.05


def take_over(claim: RunClaim, record: WorkersRecord) -> dict[str, Any]:
    """Return the processes of a run that the driver of this claim can use, by name; end all others of the run.

    They obey this driver from then on. ValueError if another one still leads the run.
    """
    actors: dict[str, Any] = {}
    for name in _list_processes(record.name):
        with suppress(ValueError):  # it has just ended
            actors[name] = ray.get_actor(name)
    states = _ask(actors, "peek")
    _refuse_if_led(claim, actors, states)
    states = _ask(actors, "obey", claim.epoch)
    chosen: set[str] = set()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    fits = record.fingerprint == claim.fingerprint and record.placements and alive.issuperset(record.nodes)
    if fits and not claim.begins:
        chosen = _choose({name: actors[name] for name in states}, record)
    for name in actors.keys() - chosen:
        ray.kill(actors[name])
    if not chosen:
        for name in list_groups(record.name):
            with suppress(ValueError):
                remove_placement_group(get_placement_group(name))
    return {name: actors[name] for name in chosen}


def _list_processes(run: str) -> list[str]:
    """Return the names of the living processes of a run."""
    return [name for name in ray.util.list_named_actors() if name.startswith(f"{run}:")]


def list_groups(run: str) -> list[str]:
    """Return the names of a run's placement groups."""
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return [group["name"] for group in groups if group["name"].startswith(f"{run}:")]


def find_key(run: str, name: str) -> str:
    """Return a process's name without the run and the number of restarts."""
    return name.removeprefix(f"{run}:").partition("#")[0]


def _ask(actors: Mapping[str, Any], method: str, *arguments: Any) -> dict[str, ProcessState]:
    """Call a method of each process; return the states of those that answer in time."""
    tasks = {name: getattr(actor, method).remote(*arguments) for name, actor in actors.items()}
    if tasks:
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=ASK_SECONDS)
    states = {}
    for name, task in tasks.items():
        with suppress(RayError):  # it is lost, or does not answer
            states[name] = ray.get(task, timeout=0)
    return states


def _refuse_if_led(claim: RunClaim, actors: Mapping[str, Any], states: Mapping[str, ProcessState]) -> None:
    """Raise ValueError if processes obey a newer driver, or (``claim.waits``) one that still gives signs of life."""
    if newest := max((state.epoch for state in states.values() if state.epoch >= claim.epoch), default=None):
        raise ValueError(f"{claim.folder}: its processes obey driver {newest} of the run, and this is {claim.epoch}")
    start = time.monotonic()
    while claim.waits and states:
        waited = time.monotonic() - start
        silence = min(state.silence for state in states.values())
        if silence < waited:  # a sign of life since then
            raise ValueError(f"{claim.folder} is led by another driver, which its processes heard {silence:.0f} s ago")
        if silence > LEASE_SECONDS:
            return
        time.sleep(1.0)
        states = _ask(actors, "peek")


def _choose(actors: dict[str, Any], record: WorkersRecord) -> set[str]:
    """Return the names of the processes that fit, once they have ended the calls of the previous driver."""
    fit, busy = dict[str, ProcessState](), set(actors)
    ended, end = dict[str, float](), time.monotonic() + IDLE_SECONDS
    while busy and time.monotonic() < end:
        states = _ask({name: actors[name] for name in busy}, "peek")
        for name in sorted(busy):
            if name not in states or not states[name].fits:
                log.info("%s is started anew: %s", name, _describe_misfit(states.get(name)))
            elif states[name].busy:
                continue
            else:
                fit[name], ended[_find_model(record, name)] = states[name], time.monotonic()
            busy.discard(name)
        torn = [ended[model] for name in busy if ":rank" in name and (model := _find_model(record, name)) in ended]
        if torn and time.monotonic() - min(torn) > TORN_SECONDS:
            break
        time.sleep(_POLL_SECONDS if busy else 0)
    return {name for name in fit if ":rank" not in name or _is_complete(name, fit, record)}


def _describe_misfit(state: ProcessState | None) -> str:
    if state is None:
        return "it does not answer"
    return f"{state.changed} has changed" if state.changed else "its last call had failed"


def _find_model(record: WorkersRecord, name: str) -> str:
    return find_key(record.name, name).partition(":")[0]


def _is_complete(name: str, fit: Mapping[str, ProcessState], record: WorkersRecord) -> bool:
    """Whether all ranks of the process's model fit, and have had the same calls."""
    model = _find_model(record, name)
    group = [state for process, state in fit.items() if _find_model(record, process) == model]
    return len(group) == len(record.placements.get(model, ())) and len({state.calls for state in group}) == 1
