"""Copies of a run's checkpoints in an object store, or wherever else fsspec writes to (`runtime.save_copies_to`).

A thread copies each checkpoint that is complete on the local disk, while training goes on. Its manifest is sent last:
without it there is no checkpoint. A file that the newest copy has already (frozen weights, a tokenizer) is copied by
the server and not sent again. So every copy is complete, and an old one can be deleted without looking at the others.

Each run needs its own URL. Credentials are read from the environment by the packages behind fsspec.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback
from fsspec.core import split_protocol, url_to_fs
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from coalign.checkpoint.folder import CheckpointFolder
from coalign.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpoint,
    Manifest,
    RemoteError,
    compare_sizes,
    find_step,
    parse_manifest,
    read_manifest,
    verify_checkpoint,
)
from coalign.config.secrets import hide_secrets
from coalign.files import Sink, describe_problem, move_aside, write_atomically
from coalign.threads import begin_in_thread

log = logging.getLogger(__name__)
_FORMER_MANIFEST = "manifest.before.json"  # the run was continued from an earlier checkpoint
_PROGRESS_SECONDS = 10.0  # between two lines of progress at the end of a run


def check_url(url: str, output: str) -> None:
    """Refuse a URL that fsspec cannot open, that holds credentials, or that lies in the run's own folder.

    Raises ValueError; ImportError with the command that installs the protocol's package.
    """
    protocol = get_protocol(url)
    host = (split_protocol(url)[1] or "").partition("/")[0]
    if "@" in host or "?" in url or "::" in url:  # the message leaves out what may be a password
        raise ValueError(
            "expected protocol://bucket/prefix, without `@`, `?` and `::`; credentials are read from the environment"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        advice = known_implementations[protocol]["err"] if package == "fsspec" else f"pip install {package}"
        raise ImportError(
            f"{url} needs a package that cannot be imported ({error.__cause__ or error}): {advice}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{url}: fsspec knows no protocol `{protocol}`; for example s3, gs, abfs, file") from error
    if protocol in ("file", "local"):
        _, path = url_to_fs(url)
        run = Path(output).resolve()
        if Path(path).resolve() in (run, *run.parents) or Path(path).resolve().is_relative_to(run):
            raise ValueError(f"{url} is in the run's own folder or holds it ({output}); copies belong elsewhere")


class RemoteCheckpoints:
    """The copies of one run's checkpoints below ``url``: the newest ``disk.keep``, and the best one.

    One checkpoint is copied at a time, and at most one waits: a newer one takes its place. A copy that fails is logged
    once, counted, and tried again with the next checkpoint.
    """

    def __init__(self, url: str, disk: CheckpointFolder) -> None:
        self.url = self.location = url.rstrip("/")
        self.disk = disk
        self._sink = Sink(f"{self.url} (runtime.save_copies_to)")
        self._lock = threading.Lock()
        self._worker: Future[None] | None = None
        self._job: tuple[int, int | None] | None = None  # step and best step, being copied
        self._queued: tuple[int, int | None] | None = None
        self._failures = 0  # since the last `take_failures`
        self._problem = ""  # why the newest job failed; empty: it did not
        self._newest = -1  # step of the newest job
        self._first: int | None = None  # step at which the run began, until later copies are set aside
        self._best: int | None = None  # the newest best step that has a copy
        self._size = self._sent = 0  # bytes of the checkpoint being copied
        self._file = Callback()  # counts the bytes of the file being sent

    @cached_property
    def _files(self) -> Any:
        """The filesystem. Not opened before it is used: it may be unreachable."""
        return url_to_fs(self.url)[0]

    @cached_property
    def _root(self) -> str:
        """The path in the filesystem."""
        return url_to_fs(self.url)[1].rstrip("/")

    # ---- copying

    def begin_run(self, step: int) -> None:
        """Set copies of later steps aside: the run goes on from ``step`` (-1: it begins anew)."""
        self._first = step
        with self._sink.survive(Exception):
            self._set_later_aside(step)

    def begin(self, step: int, best: int | None) -> None:
        """Begin to copy the checkpoint of ``step``, and that of the ``best`` step if it has no copy yet."""
        with self._lock:
            self._queued = step, best
            if self._worker is None:
                self._worker = begin_in_thread(self._work, "coalign-copies")

    def list_held(self) -> set[int]:
        """Return the steps whose files on the disk are still needed."""
        with self._lock:
            return {step for job in (self._job, self._queued) for step in job or () if step is not None}

    def take_failures(self) -> int:
        """Return how many copies have failed since the last call."""
        with self._lock:
            failures, self._failures = self._failures, 0
        return failures

    def finish(self) -> None:
        """Wait until all copies are made, with progress in the log; say so if the last one failed."""
        reported = time.monotonic()
        while (worker := self._worker) is not None and not worker.done():
            with suppress(TimeoutError):
                worker.exception(0.1)
            if time.monotonic() - reported >= _PROGRESS_SECONDS:
                reported = time.monotonic()
                done, size = (number / 2**20 for number in (self._sent + self._file.value, self._size))
                log.info("waiting for copies at %s: step %d, %.1f of %.1f MiB", self.url, self._newest, done, size)
        if self._problem:
            log.error(
                "the last checkpoint (step %d) has NO copy at %s: %s. It is on the local disk, in %s; the same command "
                "copies it",
                self._newest,
                self.url,
                self._problem,
                self.disk.path(self._newest),
            )

    def _work(self) -> None:
        while (job := self._take()) is not None:
            step, best = job
            self._newest, self._problem = step, ""
            self._size = self._sent = 0
            with self._sink.survive(Exception):
                try:
                    self._set_later_aside(step)
                    self._copy(step)
                    if best not in (None, step) and (self.disk.path(best) / MANIFEST).exists():
                        self._copy(best)
                    self._prune(best)
                except Exception as problem:
                    self._problem = hide_secrets(describe_problem(problem))
                    with self._lock:
                        self._failures += 1
                    raise OSError(self._problem) from problem

    def _take(self) -> tuple[int, int | None] | None:
        with self._lock:
            self._job, self._queued = self._queued, None
            if self._job is None:
                self._worker = None
            return self._job

    def _copy(self, step: int) -> None:
        """Copy a checkpoint; its manifest comes last, once the sizes of all files are right.

        Files are not read back: that would take as long again. Their hashes are verified when a run resumes from them.
        """
        source, target = self.disk.path(step), self._path(step)
        manifest, entries = (source / MANIFEST).read_bytes(), read_manifest(source)
        copies = self._list()
        if step in copies:
            if MANIFEST in copies[step] and self._files.cat_file(f"{target}/{MANIFEST}") == manifest:
                return
            self._delete(step, copies.pop(step))  # left by a run that was killed, or by this run before a rollback
        started_at, stored_paths = time.monotonic(), self._list_newest_files(copies)
        self._sent, self._size = 0, sum(size for size, _ in entries.values())
        uploaded = 0
        for name, (size, digest) in entries.items():
            if not self._copy_there(stored_paths.get((size, digest)), f"{target}/{name}"):
                self._send(source / name, f"{target}/{name}")
                uploaded += size
            self._sent += size
        if (source / MANIFEST).read_bytes() != manifest:
            raise OSError(f"{source} was replaced while it was copied")
        compare_sizes(entries, self._list().get(step, {}), f"{self.url}/step_{step}")
        if self._files.async_impl:  # object stores show no incomplete file
            self._files.pipe_file(f"{target}/{MANIFEST}", manifest)
        else:
            self._files.pipe_file(f"{target}/.{MANIFEST}", manifest)
            self._files.mv(f"{target}/.{MANIFEST}", f"{target}/{MANIFEST}")
        log.info(
            "step %d is copied to %s: %.1f of %.1f MiB sent in %.1f s",
            step,
            self.url,
            uploaded / 2**20,
            self._size / 2**20,
            time.monotonic() - started_at,
        )

    def _send(self, source: Path, target: str) -> None:
        self._file = Callback()
        self._make_parent(target)
        self._files.put_file(str(source), target, callback=self._file)
        self._file = Callback()

    def _copy_there(self, source: str | None, target: str) -> bool:
        """Have the server copy a file; return whether it did."""
        if source is None:
            return False
        self._make_parent(target)
        try:
            self._files.cp_file(source, target)
        except (NotImplementedError, FileNotFoundError):
            return False
        return True

    def _make_parent(self, path: str) -> None:
        if not self._files.async_impl:  # object stores, which are, have no directories
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _list_newest_files(self, copies: dict[int, dict[str, int]]) -> dict[tuple[int, str | None], str]:
        """Return the paths of the newest copy's files by size and hash."""
        newest = max((step for step, names in copies.items() if MANIFEST in names), default=None)
        if newest is None:
            return {}
        return {entry: f"{self._path(newest)}/{name}" for name, entry in self._read_manifest(newest)[1].items()}

    def _prune(self, best: int | None) -> None:
        """Delete all copies but the newest and the best, manifest first, and the remains of failed copies."""
        copies = self._list()
        complete = sorted(step for step in copies if MANIFEST in copies[step])
        if best in complete:
            self._best = best
        for step in copies.keys() - {*complete[-self.disk.keep :], self._best}:
            if _FORMER_MANIFEST not in copies[step]:
                self._delete(step, copies[step])

    def _delete(self, step: int, names: dict[str, int]) -> None:
        if MANIFEST in names:
            self._files.rm(f"{self._path(step)}/{MANIFEST}")
        if names.keys() - {MANIFEST}:
            self._files.rm(self._path(step), recursive=True)

    def _set_later_aside(self, step: int) -> None:
        """Rename the manifests of copies after ``step``, from which the run goes on; their files stay."""
        if self._first is not None:  # the remote was away when the run began
            step = min(step, self._first)
        for later, names in self._list().items():
            if later > step and MANIFEST in names:
                path = self._path(later)
                self._files.pipe_file(f"{path}/{_FORMER_MANIFEST}", self._files.cat_file(f"{path}/{MANIFEST}"))
                self._files.rm(f"{path}/{MANIFEST}")
                log.warning(
                    "%s/step_%d comes after step %d; its manifest is %s now", self.url, later, step, _FORMER_MANIFEST
                )
        self._first = None

    # ---- reading

    def list_candidates(self) -> list[int]:
        """Return the steps that have a complete copy. Raises RemoteError."""
        with self._reading():
            return sorted(step for step, names in self._list().items() if MANIFEST in names)

    def fetch(self, step: int) -> Path:
        """Return the checkpoint of ``step`` in the local folder, downloaded and verified unless it is there already.

        Raises CorruptCheckpoint, or RemoteError.
        """
        copy_url, local = f"{self.url}/step_{step}", self.disk.path(step)
        with self._reading():
            sizes = self._list().get(step, {})
            if MANIFEST not in sizes:
                raise CorruptCheckpoint(f"{copy_url} has no {MANIFEST}")
            manifest, entries = self._read_manifest(step)
            compare_sizes(entries, sizes, copy_url)
        if (local / MANIFEST).exists() and (local / MANIFEST).read_bytes() == manifest:
            try:
                return self.disk.fetch(step)
            except CorruptCheckpoint as problem:
                log.warning("%s; taking its copy", problem)
        log.info("downloading %s (%.1f MiB)", copy_url, sum(size for size, _ in entries.values()) / 2**20)
        self.disk.directory.mkdir(parents=True, exist_ok=True)
        with write_atomically(local, flush=True) as aside:
            for name in entries:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                with self._reading():
                    self._files.get_file(f"{self._path(step)}/{name}", str(aside / name))
            (aside / MANIFEST).write_bytes(manifest)
            try:
                verify_checkpoint(aside)
            except CorruptCheckpoint as problem:
                raise CorruptCheckpoint(str(problem).replace(str(aside), copy_url)) from None
            if os.path.lexists(local):
                log.warning("%s is replaced by its copy; it is now %s", local, move_aside(local))
        self.disk.link_model(step)
        return local

    def _path(self, step: int) -> str:
        return f"{self._root}/step_{step}"

    def _list(self) -> dict[int, dict[str, int]]:
        """Return the sizes of all copied files, by step and name."""
        self._files.invalidate_cache()
        copies: dict[int, dict[str, int]] = {}
        for path, info in self._files.find(self._root, detail=True).items():
            folder, _, name = path.removeprefix(f"{self._root}/").partition("/")
            if name and (step := find_step(Path(folder))) >= 0:
                copies.setdefault(step, {})[name] = info["size"]
        return copies

    def _read_manifest(self, step: int) -> tuple[bytes, Manifest]:
        """Return a copy's manifest, as bytes and as entries. Raises CorruptCheckpoint if it lacks a hash."""
        content, copy_url = self._files.cat_file(f"{self._path(step)}/{MANIFEST}"), f"{self.url}/step_{step}"
        entries = parse_manifest(partial(json.loads, content), copy_url)
        if any(digest is None for _, digest in entries.values()):
            raise CorruptCheckpoint(f"{copy_url} has no readable {MANIFEST} (a file has no hash)")
        return content, entries

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn an error of reading into RemoteError; CorruptCheckpoint passes."""
        try:
            yield
        except CorruptCheckpoint:
            raise
        except Exception as problem:
            text = hide_secrets(describe_problem(problem))
            raise RemoteError(f"the copies at {self.url} cannot be read ({text})") from problem
