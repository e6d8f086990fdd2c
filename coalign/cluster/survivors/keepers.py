"""Checkpoints in the memory of several nodes, on Ray: a keeper on each node, which the driver tells what to do.

Files travel from keeper to keeper through Ray's object store, in blocks. Keepers end with their driver and have no
state but the files in their nodes' folders, so the next driver starts new ones and finds all that was there.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coalign.cluster.survivors.keeper import (
    BLOCK,
    DIGITS,
    NAME,
    Keeper,
    KeeperLost,
    NodePath,
    SpreadStep,
    find_missing,
    find_partners,
    merge_steps,
    name_folder,
)
from coalign.files import read_json_object, write_text_atomically
from coalign.run_files.checkpoints import find_step, format_manifest, name_memory_folder

log = logging.getLogger(__name__)
BLOCKS_IN_FLIGHT = 3
THREADS = 16  # a keeper sends while it receives
LOOK_SECONDS = 60.0  # how long it may take to list or delete files
KILL_SECONDS = 10.0  # how long the keeper of an earlier driver may take to end


class _KeeperActor(Keeper):
    """A keeper in a process of its own on its node."""

    def fetch(self, directory: str, files: Mapping[str, int], source: Any) -> None:
        """Copy ``files`` (bytes by name) of a directory from the node of another keeper. Raises OSError, RayError."""
        for name, size in files.items():
            self.write(f"{directory}/{name}", _read_ahead(source, f"{directory}/{name}", size))


def _read_ahead(source: Any, path: str, size: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a file's blocks; the next ones are on their way meanwhile."""
    waiting: deque[ray.ObjectRef] = deque()
    for offset in range(0, size, BLOCK):
        waiting.append(source.read.remote(path, offset))
        if len(waiting) == BLOCKS_IN_FLIGHT:
            yield ray.get(waiting.popleft())
    while waiting:
        yield ray.get(waiting.popleft())


class Keepers:
    """The keepers of a run's checkpoints, one on each node that takes part, as the driver sees them.

    The nodes with ranks of trained models and the driver's take part. Each node's files are also held by the next one.
    Nodes are known by Ray's ids; ``ids`` are those of the cluster's nodes, by number.
    """

    def __init__(self, run: Path, ids: Sequence[str], driver_node: int, seconds: float) -> None:
        """``driver_node``: the number of the driver's node; ``seconds``: how long keepers may take to answer."""
        self._run = run.absolute()
        self._base = str(name_memory_folder(run))
        self._ids, self._driver_node, self._seconds = ids, ids[driver_node], seconds
        self.folder = Path(name_folder(self._base, self._driver_node))
        self._actors: dict[str, Any] = {}
        self._nodes = [self._driver_node]  # nodes with a keeper
        self._first: dict[str, str] = {}  # where rank 0 is, by model
        self._recorded = _read_record(run)  # nodes that may have files
        self._fetching = threading.Lock()  # models are loaded at the same time, and lie in one directory

    def choose(self, ranks: Mapping[str, Sequence[int]], names: Sequence[str]) -> None:
        """Start keepers on the nodes that have ``ranks`` of trained models (numbers, by model and rank).

        ``names`` are those of the nodes, by number. Raises KeeperLost if a keeper cannot be started.
        """
        self._first = {model: self._ids[nodes[0]] for model, nodes in ranks.items()}
        needed = {self._driver_node, *(self._ids[node] for nodes in ranks.values() for node in nodes)}
        former, self._nodes = self._nodes, [node for node in self._ids if node in needed]
        if self._nodes != former:
            chosen = ", ".join(names[self._ids.index(node)] for node in self._nodes)
            copies = "each holds a copy of the one before it" if len(self._nodes) > 1 else "there is no copy"
            log.info("checkpoints in memory are on %s; %s", chosen, copies)
        self._start(self._nodes)
        self._record([*dict.fromkeys((*self._recorded, *self._nodes))])

    # ---- writing

    def open(self) -> None:
        """Prepare a checkpoint: delete incomplete ones."""
        self._ask("open", {node: () for node in self._nodes})

    def read_report(self, path: Path) -> str | None:
        """Return the problem that rank 0 has reported of a model's directory, empty for none, None without a report."""
        node = self._first[path.name]
        return self._ask("read_report", {node: (self._relative(path),)})[node]

    def delete_report(self, path: Path) -> None:
        self._ask("delete_report", {self._first[path.name]: (self._relative(path),)})

    def copy(self, directory: Path, step: int) -> str:
        """Copy each node's files of a checkpoint to its partner, and complete it on all nodes but the driver's.

        Returns the text of its manifest. Raises OSError, KeeperLost.
        """
        name = self._relative(directory)
        written = self._ask("list_files", {node: (name,) for node in self._nodes})
        partners = find_partners(self._nodes)
        calls = {partners[node]: (name, files, self._actors[node]) for node, files in find_missing(written).items()}
        self._ask("fetch", calls)
        sizes = {path: size for files in written.values() for path, size in files.items()}
        manifest = format_manifest(sizes, uuid.uuid4().hex)
        self._ask("seal", {node: (name, step, manifest) for node in self._nodes if node != self._driver_node})
        return manifest

    def keep(self, steps: Collection[int]) -> None:
        """Delete all checkpoints but those of these steps."""
        self._ask_living("keep", steps)

    def clear(self) -> None:
        """Free the memory of all nodes."""
        self._start_recorded()
        self._ask_living("clear")
        self._record([])

    # ---- reading

    def list_steps(self) -> dict[int, SpreadStep]:
        """Return the checkpoints of which living nodes hold something, by step."""
        self._start_recorded()
        return merge_steps(self._ask_living("list_steps"))

    def localize(self, directory: str) -> str | NodePath:
        """Translate a directory in this node's memory into a path on each node; return any other one as it is."""
        path = Path(directory)
        return NodePath(self._base, self._relative(path)) if path.is_relative_to(self.folder) else directory

    def fetch(self, directory: str, nodes: Collection[int]) -> None:
        """Copy missing files of a checkpoint's directory to nodes (by number), if it is in memory.

        Raises OSError, KeeperLost.
        """
        if not Path(directory).is_relative_to(self.folder):
            return
        path = Path(self._relative(Path(directory)))
        self._fetch(find_step(Path(path.parts[0])), {self._ids[node] for node in nodes}, "/".join(path.parts[1:]), "")

    def fetch_state(self, step: int, models: str) -> Path:
        """Copy all files of a checkpoint but those of its ``models`` to this node; return their folder.

        Raises OSError, KeeperLost.
        """
        self._fetch(step, {self._driver_node}, "", models)
        return self.folder / f"step_{step}"

    def _fetch(self, step: int, nodes: Collection[str], folder: str, without: str) -> None:
        with self._fetching:
            self._start(nodes)
            if (spread := self.list_steps().get(step)) is None or spread.lost:
                raise KeeperLost(f"the checkpoint of step {step} in the memory of nodes has lost files")
            self._ask("open_step", {node: (step, spread.manifest) for node in nodes})
            plans = {node: spread.plan_fetches(node, folder, without) for node in nodes}
            while any(plans.values()):
                now = {node: plan.popitem() for node, plan in plans.items() if plan}
                calls = {node: (f"step_{step}", files, self._actors[source]) for node, (source, files) in now.items()}
                self._ask("fetch", calls)

    # ---- actors

    def close(self) -> None:
        """End all keepers. The files stay."""
        for node in [*self._actors]:
            self._end(node)

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def _start(self, nodes: Collection[str]) -> None:
        """Start the keepers that are missing. Raises KeeperLost."""
        missing = [node for node in nodes if node not in self._actors]
        living = self._find_living() if missing else set[str]()
        for node in missing:
            self._actors[node] = self._start_actor(node, living)
        self._ask("list_files", {node: ("",) for node in missing})  # waits for their processes

    def _start_recorded(self) -> None:
        """Start keepers on all living nodes that may have files; this one may have those of a run on it alone."""
        missing = [node for node in (*self._recorded, self._driver_node) if node not in self._actors]
        living = self._find_living() if missing else set[str]()
        for node in missing:
            if node in living:
                with suppress(KeeperLost):
                    self._start([node])

    def _find_living(self) -> set[str]:
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def _start_actor(self, node: str, living: Collection[str]) -> Any:
        name = f"{Path(self._base).name}:{node[:DIGITS]}"
        _end_former(name)
        remote = cast(Any, ray.remote)(_KeeperActor).options(
            name=name,
            num_cpus=0,
            max_restarts=0,
            max_concurrency=THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return remote.remote(self._base, node, str(self._run), living)

    def _ask(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call a method of the keepers of some nodes at the same time. Raises OSError, KeeperLost."""
        answers, problems = self._call(method, arguments, self._seconds)
        for problem in problems.values():
            raise problem
        return answers

    def _ask_living(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of all keepers; those that are lost give no answer."""
        answers, problems = self._call(method, {node: arguments for node in self._actors}, LOOK_SECONDS)
        for node, problem in problems.items():
            log.info("%s", problem)
            if not isinstance(problem, KeeperLost):
                self._end(node)
        return answers

    def _call(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]], seconds: float
    ) -> tuple[dict[str, Any], dict[str, OSError | KeeperLost]]:
        """Call a method of the keepers of some nodes; answers and problems by node."""
        answers, problems = dict[str, Any](), dict[str, OSError | KeeperLost]()
        if gone := [node for node in arguments if node not in self._actors]:
            return {}, {node: KeeperLost(f"there is no keeper on node {node[:DIGITS]}") for node in gone}
        tasks = {node: getattr(self._actors[node], method).remote(*values) for node, values in arguments.items()}
        end = time.monotonic() + seconds
        for node, task in tasks.items():
            try:
                answers[node] = ray.get(task, timeout=max(0.0, end - time.monotonic()))
            except RayError as error:
                problems[node] = self._describe(node, error, seconds)
        return answers, problems

    def _describe(self, node: str, error: RayError, seconds: float) -> OSError | KeeperLost:
        """Turn the error of a request to a keeper into one for the caller; a lost keeper is forgotten."""
        keeper = f"the keeper of checkpoints on node {node[:DIGITS]}"
        if isinstance(error, GetTimeoutError):
            return OSError(f"{keeper} has not answered within {seconds:g} s")
        cause = error.cause if isinstance(error, RayTaskError) else error
        text = str(cause).strip().partition("\n")[0]
        if isinstance(error, RayTaskError) and not isinstance(cause, RayActorError | ObjectLostError):
            return OSError(f"{keeper}: {type(cause).__name__}: {text}")
        if not isinstance(error, RayTaskError):  # this keeper is lost, not the one that it reads from
            self._end(node)
        return KeeperLost(f"{keeper} is lost: {text}")

    def _end(self, node: str) -> None:
        with suppress(Exception):
            ray.kill(self._actors.pop(node))

    def _record(self, nodes: list[str]) -> None:
        """Note for the next driver which nodes have files."""
        if nodes == self._recorded:
            return
        self._recorded = nodes
        if nodes:
            write_text_atomically(self._run / NAME, json.dumps({"nodes": nodes}))
        else:
            (self._run / NAME).unlink(missing_ok=True)


def _read_record(run: Path) -> list[str]:
    try:
        return [str(node) for node in read_json_object(run / NAME)["nodes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _end_former(name: str) -> None:
    """End the keeper of an earlier driver, which may live on for a moment, or as long as a driver that is stuck."""
    end = time.monotonic() + KILL_SECONDS
    while time.monotonic() < end:
        try:
            ray.kill(ray.get_actor(name))
        except ValueError:
            return
        time.sleep(0.05)
