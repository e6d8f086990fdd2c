"""Reads what `coalign diagnose` is given: a run folder, log files, directories of them, or standard input."""

from __future__ import annotations

import gzip
import os
import re
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from coalign_diagnose.logs import LogFile

_MAX_FILE_BYTES = 1 << 30  # only the end of a larger file is read
_NO_LOGS = {
    *(".py", ".jsonl", ".json", ".yaml", ".yml", ".csv", ".parquet", ".arrow", ".md", ".html", ".png", ".toml", ".cfg"),
    *(".safetensors", ".pt", ".pth", ".bin", ".npy", ".npz", ".pkl", ".zip", ".tar", ".pyc", ".so", ".jinja", ".sh"),
}
_HIDDEN = re.compile(r"^\.|^(?:checkpoints|plots|tensorboard|failed|profile|__pycache__|wandb-.*\.wandb)$")
# What logs of training runs hold: a text with none of it is of another tool.
_TRAINING = (
    r"(?i)traceback|\w(?:error|exception): |\b(?:torch|cuda|gpu|nccl|ray|raylet|vllm|deepspeed|epoch|loss|steps?|"
    r"iteration|rank|training|train|reward|eval|samples|tokens|prompts|checkpoint|model|dataset|tokenizer|slurm\w*|srun|"
    r"oom|xid|nvrm|killed|python|coalign|wandb|huggingface)\b"
)


def read_sources(paths: Iterable[str]) -> list[LogFile]:
    """Return the logs of all paths. ValueError or OSError, in one line, for what is none."""
    logs: list[LogFile] = []
    for name in paths:
        if name == "-":
            logs.append(_check(LogFile("stdin", sys.stdin.buffer.read(), datetime.now().year)))
        else:
            path = Path(name)
            logs += _read_directory(path) if path.is_dir() else [_check(read_log(path))]
    return logs


def check_training(logs: Iterable[LogFile]) -> None:
    """Raise ValueError if nothing in the logs is of a training run."""
    logs = list(logs)
    if not any(next(log.find(_TRAINING), None) is not None for log in logs):
        names = ", ".join(log.name for log in logs[:3])
        raise ValueError(f"{names}: nothing in it is of a training run (no step, no traceback, no CUDA, Ray or Slurm)")


def read_log(path: Path) -> LogFile:
    """Read a file (also one that ends in .gz). OSError if it cannot be read."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    if not path.is_file():
        raise ValueError(f"{path}: is not a regular file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
        if path.suffix == ".gz":
            data = gzip.GzipFile(fileobj=file).read(_MAX_FILE_BYTES)
        else:
            file.seek(max(path.stat().st_size - _MAX_FILE_BYTES, 0))
            data = file.read(_MAX_FILE_BYTES)
    return LogFile(str(path), data, datetime.fromtimestamp(path.stat().st_mtime).year)


def _check(log: LogFile) -> LogFile:
    if not log.data.strip():
        raise ValueError(f"{log.name}: is empty")
    if _is_binary(log.data):
        raise ValueError(f"{log.name}: is no text; expected a log")
    return log


def _is_binary(data: bytes) -> bool:
    return b"\0" in data[:8192]


def _read_directory(path: Path) -> list[LogFile]:
    """Read the logs of a run folder, or all texts below another directory, the oldest first."""
    is_run = (path / "log.txt").exists() and (path / "config.yaml").exists()
    files = _list_run(path) if is_run else _list_texts(path)
    logs = [log for file in files if (log := read_log(file)).data.strip() and not _is_binary(log.data)]
    if not logs:
        raise ValueError(f"{path}: holds no log (a text that is not empty)")
    return logs


def _list_run(path: Path) -> list[Path]:
    """List a run's log, other logs that were put beside it, and the newest stacks."""
    beside = [file for pattern in ("*.log", "*.out", "*.err") for file in sorted(path.glob(pattern))]
    stalls = sorted((path / "stalls").glob("*/"))[-1:]
    named = [path / "log.txt", *beside, *(file for folder in stalls for file in sorted(folder.glob("*.txt")))]
    return [file for file in named if file.is_file()]


def _list_texts(path: Path) -> list[Path]:
    files = [
        file
        for file in path.rglob("*")
        if file.is_file()
        and file.suffix.lower() not in _NO_LOGS
        and not any(_HIDDEN.match(component) for component in file.relative_to(path).parts)
    ]
    return sorted(files, key=lambda file: (len(file.parts), [int(n) for n in re.findall(r"\d+", file.name)], file.name))
