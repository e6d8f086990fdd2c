"""Files on disk: atomic writes, reports of writers, records that outlast a full disk, hashes, models, names."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from glob import glob, has_magic
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 256 * 2**20
_FILE_TYPES = {stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}


class NotRegularFile(OSError):
    """A path leads to a directory, a FIFO, a device or a socket, where a file was expected."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file to read its bytes. Raises NotRegularFile for anything else, and OSError.

    Folders that are not trusted may hold FIFOs and links to devices: `open` would wait there, or read for ever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            file_type = _FILE_TYPES.get(stat.S_IFMT(mode), "device")
            raise NotRegularFile(errno.EINVAL, f"is a {file_type}, not a regular file", str(path))
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bounded(path: str | Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises ValueError for one of more than ``max_bytes`` bytes, and OSError."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes, the most that is read of such a file")
    return content


@contextmanager
def write_atomically(path: Path, *, flush: bool = False) -> Iterator[Path]:
    """Yield a free path beside ``path``; what the block writes there replaces ``path`` when the block ends.

    It may be a file, a link or a directory. ``flush``: it survives a power failure once this returns. After an error
    ``path`` is as it was and nothing else is left. A directory only replaces an empty one: else OSError.

    Example:
        with write_atomically(output) as aside, open(aside, "w") as file:
            file.writelines(lines)
    """
    aside = path.with_name(f".writing-{path.name}")
    delete_path(aside)
    try:
        yield aside
        if flush:
            for written in (aside, *aside.rglob("*")):
                if not written.is_symlink():
                    flush_path(written)
        os.replace(aside, path)
    except BaseException:
        delete_path(aside)
        raise
    if flush:
        flush_path(path.parent)


def write_text_atomically(path: Path, text: str, *, flush: bool = False) -> None:
    """Replace a file by one with this text (UTF-8)."""
    with write_atomically(path, flush=flush) as aside:
        aside.write_text(text, encoding="utf-8")


def report_written(path: Path, problem: str = "") -> None:
    """Report to other processes, by a file beside ``path``, that it is complete, or the ``problem`` of its writer."""
    write_text_atomically(_report_path(path), problem)


def read_report(path: Path) -> str | None:
    """Return the problem that `report_written` told of ``path``, empty if it is complete; None: there is no report."""
    try:
        return _report_path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def delete_report(path: Path) -> None:
    """Delete what `report_written` left."""
    _report_path(path).unlink()


def _report_path(path: Path) -> Path:
    return path.with_name(f".written-{path.name}")


def flush_path(path: Path) -> None:
    """Wait until a file's contents, or a directory's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete_path(path: Path) -> None:
    """Delete a file, a link or a directory with all that it holds; it may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def hash_file(path: Path, digest: Any = "sha256") -> str:
    """Return the hash of a file's contents, in hexadecimal digits. ``digest``: a name, or a function that makes one."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, digest).hexdigest()


def hash_samples(path: Path, blocks: int = 64, size: int = 1 << 17) -> str:
    """Return a hash of a file's length and of evenly spaced blocks of ``size`` bytes, the first and the last included.

    A file of up to eight times as many bytes is read completely (by default 64 MiB, and 8 MiB of a longer one).
    """
    length = path.stat().st_size
    if length <= 8 * blocks * size:
        return hash_file(path)
    digest = hashlib.sha256(str(length).encode())
    with open(path, "rb", buffering=0) as file:
        for block in range(blocks):
            file.seek((length - size) * block // (blocks - 1))
            digest.update(file.read(size))
    return digest.hexdigest()


def list_files(path: Path) -> list[Path]:
    """List the files of a directory, or a file itself."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


class WatchedFiles:
    """Notices files whose size or time changes after it was made.

    A mapped file that is cut while it is read ends the process by SIGBUS, and rows that are rewritten in place would be
    learnt from unnoticed.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._states = {path: _stat(path) for path in paths}

    @property
    def written(self) -> float:
        """The time at which the newest file was written."""
        return max((time for _, time in self._states.values()), default=0.0)

    def list_written_since(self, time: float) -> list[str]:
        return [path.name for path, (_, written) in self._states.items() if written > time]

    def check(self) -> None:
        """ValueError if a file has changed."""
        for path, former in self._states.items():
            if (now := _stat(path)) != former:
                raise ValueError(
                    f"{path} was changed while it is read: {former[0]:,} bytes before, {max(now[0], 0):,} now"
                    f"{'' if now[0] != former[0] else ', written anew'}. Restore it; the same command then continues"
                )


def _stat(path: Path) -> tuple[int, float]:
    """Size in bytes and time of the last change; (-1, 0.0) for a file that is gone."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return -1, 0.0
    return status.st_size, status.st_mtime


def find_cache() -> Path:
    """Return the directory of files that can be made again: COALIGN_CACHE, or one in the user's cache directory."""
    base = os.environ.get("COALIGN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "coalign")
    return Path(base).expanduser()


def move_aside(path: Path) -> Path:
    """Rename a file or directory to the first free one of NAME.before-1, NAME.before-2, …; returns the new path."""
    names = (path.with_name(f"{path.name}.before-{number}") for number in count(1))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


class Sink:
    """Notes whether something can be written, so that a failure and its end are each logged once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failed = False

    @contextmanager
    def survive(self, error: type[Exception] = OSError) -> Iterator[None]:
        """Log an error of this type in place of raising it."""
        try:
            yield
        except error as problem:
            if not self.failed:
                self.failed = True
                log.warning("%s cannot be written: %s; training continues", self.name, problem)
        else:
            if self.failed:
                self.failed = False
                log.warning("%s can be written again", self.name)


class RecordFile:
    """A file to which complete records are appended. A record that cannot be written waits in memory for the next one.

    Example:
        file = RecordFile(Path("metrics.jsonl"))
        file.append(b'{"step": 1}\n')
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []
        self._sink = Sink(str(path))

    def append(self, record: bytes) -> None:
        self._waiting.append(record)
        with self._sink.survive():
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with open(self.path, "ab") as out:
                    out.write(b"".join(self._waiting))
            except OSError:
                if self.path.exists():
                    os.truncate(self.path, size)  # a full disk takes half a record
                raise
            self._waiting.clear()


class RecordHandler(logging.Handler):
    """Writes the log to a RecordFile. ``clean`` changes each entry before."""

    def __init__(self, file: RecordFile, clean: Callable[[str], str]) -> None:
        super().__init__()
        self.file, self.clean = file, clean
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.file.append(f"{self.clean(self.format(record))}\n".encode())


def require_free_output(
    path: Path, inputs: Iterable[str | Path] = (), *, overwrite: bool = False, is_folder: bool = False
) -> None:
    """Raise FileExistsError unless nothing is at the path of a command's output.

    ``is_folder``: an empty directory may be there; ``overwrite``: a regular file. Whatever they say, ValueError for a
    path that leads to one of the ``inputs``, by links too, or into one that is a directory; an input may be a pattern
    of files.
    """
    for source in inputs:
        if _is_same(path, Path(source)):
            raise ValueError(f"--output: {path} is an input of the command ({source}); name another file")
    if not os.path.lexists(path) or (is_folder and path.is_dir() and not any(path.iterdir())):
        return
    if is_folder:
        raise FileExistsError(f"--output: {path} exists and is not empty; name another directory")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"--output: {path} exists and is no regular file; it is left as it is; name another file")
    if not overwrite:
        raise FileExistsError(f"--output: {path} exists, and is left as it is; name another file, or give --overwrite")


def _is_same(path: Path, source: Path) -> bool:
    """Whether a path leads to a file that is there, or to one in a directory or of a pattern."""
    files = [Path(name) for name in glob(str(source), recursive=True)] if has_magic(str(source)) else []
    for file in [source, *files]:
        if not os.path.exists(file):
            continue
        if path.resolve() == file.resolve() or (path.exists() and path.samefile(file)):
            return True
        if (
            file.is_dir()
            and path.is_file()
            and (path.resolve().is_relative_to(file.resolve()) or any(map(path.samefile, list_files(file))))
        ):
            return True
    return False


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file of up to ``max_bytes``. Raises ValueError, naming the file, for any other."""
    try:
        content = json.loads(read_bounded(path, max_bytes))
    except (ValueError, RecursionError) as error:
        refuse_foreign(path)
        raise ValueError(f"{path} is not valid JSON: {describe_problem(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected an object with keys")
    return content


def refuse_foreign(path: Path) -> None:
    """Raise ValueError for a file that is empty, a pointer of Git LFS or a web page, in place of the file itself."""
    with open_regular(path) as file:
        start = file.read(512)
    if not start:
        raise ValueError(f"{path} is empty; fetch it again")
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        raise ValueError(
            f"{path} is a pointer of Git LFS, not the file itself: `git lfs pull` in {path.parent} gets it"
        )
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path} is a web page; download the file itself (on the hub: /resolve/ in its address)")


def describe_problem(error: BaseException) -> str:
    """Return an error's class and the beginning of its text, since a decoder's may hold a complete file."""
    return f"{type(error).__name__}: {error}"[:300]


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face directory. Raises ValueError if there is none."""
    if not folder.exists():
        raise ValueError(f"there is no directory '{folder}'")
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"'{folder}' is not a Hugging Face model directory (no config.json there){_find_model(folder)}"
        )
    return read_json_object(folder / "config.json")


def _find_model(folder: Path) -> str:
    """Say where the model of another type of directory is, as the end of a sentence; empty if that is not known."""
    for inner in ("model", "hf"):  # a run folder has the first, a checkpoint the second
        if (folder / inner / "config.json").is_file():
            return f"; the model is in '{folder / inner}'"
    if any(folder.glob("checkpoints/step_*")):
        return f"; it is a run folder, whose checkpoints hold models: '{folder}/checkpoints/step_N/hf'"
    if (folder / "latest_checkpointed_iteration.txt").is_file() or any(folder.glob("*.distcp")):
        return f"; it is a Megatron checkpoint: `coalign convert {folder} -o DIR --to hf --hf MODEL` makes one of it"
    if (folder / "adapter_config.json").is_file():
        return f"; it holds adapters: load the model, and these by `lora.load: {folder}`"
    return ""


def require_inner_name(name: Any, source: Path) -> str:
    """Return the name of a file that ``source`` lists, which must lie beside it. Raises ValueError for any other.

    The file itself may be a link, as in the hub's cache.
    """
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{source} names {str(name)[:200]!r}, which is no file of its folder")
    return name


def list_weight_files(folder: Path, single: str = "model.safetensors") -> list[Path]:
    """List the files that the index of a Hugging Face directory names, or the ``single`` one; none if there is neither.

    Raises ValueError if the index names files that do not exist.
    """
    index = folder / f"{single}.index.json"
    if not index.is_file():
        return [folder / single] if (folder / single).is_file() else []
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no `weight_map` of the tensors' files")
    names = sorted({require_inner_name(name, index) for name in weight_map.values()})
    if missing := [name for name in names if not os.path.isfile(folder / name)]:  # or too long
        raise ValueError(f"{index} names files that do not exist: {missing}")
    return [folder / name for name in names]
