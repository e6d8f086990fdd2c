"""`coalign doctor`: measures all nodes at once, judges what was found, and prints a table."""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from coalign.companions import REWARDS
from coalign.config.functions import resolve
from coalign.config.schema import RunConfig
from coalign.hub import list_sources
from coalign.launch.fetch import list_data
from coalign.report.display import Display
from coalign_diagnose.doctor.network import open_sink, send_bytes
from coalign_diagnose.doctor.node_facts import Kind, NodeFacts, NodeRequest, list_written, measure_node
from coalign_diagnose.doctor.preflight import ClusterFacts, NodeLink, PreflightFinding, count_levels, examine

if TYPE_CHECKING:
    from coalign_diagnose.doctor.ray_nodes import RayNodes

NODE_SECONDS = 60.0  # how long a node may take to start a process, and to measure itself
PORTS = ((6379, "Ray's head"), (5000, "coalign serve-reward"), (8000, "coalign serve"))
COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def diagnose(config: RunConfig | None, address: str | None, display: Display, *, as_json: bool = False) -> int:
    """Check this machine, or the nodes of the Ray cluster at ``address``, for a run, and print what was found.

    Without ``address`` it is that of the run, if it has one. Returns the exit code: 1 if any check failed. Raises
    ValueError if no cluster answers at the address.
    """
    address = address or (config.runtime.ray_address if config else None)
    request = plan_request(config, has_cluster=address is not None)
    resource = config.runtime.accelerator if config else "GPU"
    try:
        facts = measure_machine(request) if address is None else measure_cluster(address, request, resource)
    finally:
        remove_marks(request)
    findings = examine(facts, compiles=request.has_compiler, requires=list_requirements(config))
    levels = count_levels(findings)
    if as_json:
        display.show(json.dumps({"findings": [asdict(finding) for finding in findings], "counts": levels}, indent=1))
    else:
        display.show(draw_table(findings))
        display.show(f"{levels['ok']} ok, {levels['warn']} warn, {levels['fail']} fail")
    return 1 if levels["fail"] else 0


def plan_request(config: RunConfig | None, *, has_cluster: bool) -> NodeRequest:
    """Return what each node has to measure for a run; without one, what every run needs."""
    ports = () if has_cluster else PORTS
    if config is None:
        return NodeRequest(ports=ports)
    inputs: dict[tuple[str, Kind], str] = {}  # each once, with the first key that names it
    for name, model in config.models.items():
        for source, _ in list_sources(model):
            inputs.setdefault((source, "model"), f"models.{name}")
    for key, sources in list_data(config).items():
        for data_source in sources:
            inputs.setdefault((data_source.path, "data"), ".".join(key))
    return NodeRequest(
        tuple((key, _make_absolute(text), input_type) for (text, input_type), key in inputs.items()),
        str(Path(config.output).absolute()),
        f".doctor-{uuid.uuid4().hex[:8]}",
        ports,
        any(model.compile for model in config.models.values()),
        bool(list_requirements(config)),
    )


def _make_absolute(name: str) -> str:
    """Return a path from the root, since nodes start processes in other folders; names of the hub and URLs stay."""
    is_path = name.startswith((".", "/", "~")) or Path(name).exists() or any(mark in name for mark in "*?[")
    return str(Path(name).absolute()) if is_path and "://" not in name else name


def list_requirements(config: RunConfig | None) -> list[str]:
    """Return what the code rewards of a run ask the sandbox to limit; nothing without such rewards."""
    names = ("code", "coalign_graders.code:code")
    code = [reward for reward in config.reward if reward.fn in names] if config else []
    every = signature(resolve("code", REWARDS)).parameters["require"].default if code else ()
    return list(dict.fromkeys(name for reward in code for name in reward.arguments.get("require", every)))


def measure_machine(request: NodeRequest) -> ClusterFacts:
    """Measure this machine alone."""
    name = socket.gethostname()
    facts = measure_node(name, "", request)
    return ClusterFacts([facts], seen={name: list_written(request)} if request.folder else {})


def measure_cluster(address: str, request: NodeRequest, resource: str) -> ClusterFacts:
    """Measure all nodes of a Ray cluster at once. Raises ValueError if it does not answer."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it would write a line a second about a wrong token
    from coalign_diagnose.doctor.ray_nodes import RayNodes  # the extra [ray] is needed only here

    with RayNodes(address, resource) as nodes:
        addresses = nodes.addresses
        measured = nodes.call(
            measure_node, {name: (name, addresses[name], request) for name in nodes.names}, NODE_SECONDS
        )
        facts = [answer for answer in measured.values() if isinstance(answer, NodeFacts)]
        errors = {name: _describe(answer) for name, answer in measured.items() if isinstance(answer, Exception)}
        alive = [node.name for node in facts]
        seen = nodes.call(list_written, {name: (request,) for name in alive}, NODE_SECONDS) if request.folder else {}
        return ClusterFacts(
            facts,
            errors,
            nodes.measure_clocks(NODE_SECONDS),
            _measure_links(nodes, {name: addresses[name] for name in alive}),
            {name: files for name, files in seen.items() if not isinstance(files, Exception)},
            nodes.devices,
        )


def _measure_links(nodes: RayNodes, addresses: Mapping[str, str]) -> list[NodeLink]:
    """Send bytes from each node to the next one, all at once, in a ring."""
    names = list(addresses)
    if len(names) < 2:
        return []
    ring = dict(zip(names, [*names[1:], names[0]], strict=True))
    ports = nodes.call(open_sink, {name: (addresses[name],) for name in names}, NODE_SECONDS)
    rates = nodes.call(
        send_bytes,
        {name: (addresses[to], ports[to]) for name, to in ring.items() if not isinstance(ports[to], Exception)},
        NODE_SECONDS,
    )
    links = []
    for name, to in ring.items():
        rate = rates.get(name, ports[to])
        link = NodeLink(name, to)
        broken = isinstance(rate, Exception)
        links.append(replace(link, problem=_describe(rate)) if broken else replace(link, rate=rate))
    return links


def _describe(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def remove_marks(request: NodeRequest) -> None:
    """Remove what the nodes wrote into the run folder, and the folder if nothing else is there."""
    if request.folder is not None:
        folder = Path(request.folder)
        shutil.rmtree(folder / request.mark, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()


def draw_table(findings: list[PreflightFinding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("check", "node", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for row in findings:
        table.add_row(row.check, row.node, Text(row.level, style=COLORS[row.level]), row.found, row.remedy)
    return table
