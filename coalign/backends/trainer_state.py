"""A trainer's state on disk in torch's distributed checkpoint format, which any number of ranks can read.

``BackgroundWriter`` writes it, and exports, while training goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from coalign.backends.lora import get_weights
from coalign.backends.optim import WeightAverage
from coalign.files import delete_path, describe_problem, report_written
from coalign.roles import Context
from coalign.threads import CallQueue, CallResult, try_call

MODEL, OPTIMIZER, AVERAGE, PROGRESS = "model.", "optimizer.", "average.", "progress."
# torch warns each time that one process saves alone, which is intended here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

State = dict[str, Tensor | int]


def get_training_state(model: nn.Module, optimizer: Any | None, average: WeightAverage | None = None) -> State:
    """The live tensors of a training by name: trained parameters, persistent buffers, optimizer state, averages. Also
    the plain numbers in the optimizer's state. Frozen parameters are left out: they are where the model came from."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    state: State = {MODEL + name: tensor for name, tensor in get_weights(model).items() if name not in frozen}
    for name, entries in _optimizer_state(model, optimizer):
        state |= {f"{OPTIMIZER}{name}.{key}": value for key, value in entries.items()}
    if average is not None:
        state |= {AVERAGE + name: tensor for name, tensor in average.tensors.items()}
    return state


def save(
    dir: str | Path, state: State, progress: dict[str, int], *, alone: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Write ``state`` and ``progress``. A collective of ``group``, unless this process holds the model ``alone``.
    Raises OSError with the first line of what each rank met (a full disk, a limit)."""
    from torch.distributed.checkpoint import state_dict_saver  # here and below: slow, and a check saves nothing
    from torch.distributed.checkpoint.api import CheckpointException

    from coalign.weights.metadata import describe_failures

    contents = {**state, "progress": progress}
    try:
        state_dict_saver.save(contents, checkpoint_id=str(dir), process_group=group, no_dist=alone)
    except CheckpointException as problem:
        raise OSError(f"checkpoint {dir} cannot be written: {describe_failures(problem)}") from problem


class BackgroundWriter:
    """A thread that writes copies of tensors while the tensors change, one directory after the other. ``group`` is for
    collectives of this thread alone: those of training go on meanwhile."""

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._queue = CallQueue(f"{name}-writer")
        self._results: list[Future[CallResult]] = []  # a directory each, since the last `wait`

    def submit(self, dir: str | Path, tensors: Mapping[str, Any], write: Callable[[Any], object], report: bool) -> None:
        """Copy ``tensors`` to host memory, and let the thread call ``write`` with the copies. With ``report`` it then
        calls `coalign.files.report_written` for ``dir``, where nothing is left after an error."""
        task = partial(self._write, Path(dir), partial(write, copy_to_host(tensors)), report)
        self._results.append(Future())
        self._queue.submit(partial(try_call, task), self._results[-1].set_result)

    def wait(self) -> None:
        """Wait until everything is written; raise the first error since the last call."""
        results, self._results = [result.result() for result in self._results], []
        for error in (error for _, error in results if error is not None):
            raise OSError(describe_problem(error)) from error

    def close(self) -> None:
        self._queue.close()

    def _write(self, dir: Path, write: Callable[[], object], report: bool) -> None:
        try:
            write()
        except BaseException as error:
            if report:
                with suppress(OSError):
                    delete_path(dir)  # a full disk has room for the report then
                    report_written(dir, describe_problem(error))
            raise
        if report:
            report_written(dir)


class BackgroundSaves:
    """A trainer whose saves are written while training goes on (coalign.backends.base.Module.begin_saves)."""

    context: Context
    _writer: BackgroundWriter | None = None  # once there was a checkpoint
    _background: BackgroundWriter | None = None  # the writer, between begin_saves and finish_saves

    def begin_saves(self) -> bool:
        if self._writer is None:
            alone = self.context.world_size == 1
            group = None if alone else cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
            self._writer = BackgroundWriter(self.context.process, group)
        self._background = self._writer
        return True

    def finish_saves(self) -> None:
        self._background = None
        if self._writer is not None:
            self._writer.wait()

    def _write(self, dir: str | Path, tensors: Mapping[str, Any], write: Callable[[Any], None]) -> None:
        """Call ``write`` with ``tensors``, or have it called with copies of them while training goes on."""
        if self._background is None:
            write(tensors)
        else:
            self._background.submit(dir, tensors, write, report=self.context.rank == 0)

    def _write_together(self, dir: str | Path, tensors: Mapping[str, Any], write: Callable[[Any], None]) -> None:
        """Call `_write` on all ranks; none is done before all are. Raises OSError with the first error of any rank."""
        alone, group = self.context.world_size == 1, self._background.group if self._background else None

        def write_and_meet(tensors: Mapping[str, Any]) -> None:
            try:
                write(tensors)
                problem = ""
            except Exception as error:
                problem = describe_problem(error)
            problems = [problem]
            if not alone:
                problems *= self.context.world_size
                dist.all_gather_object(problems, problem, group=group)
            for message in filter(None, problems):
                raise OSError(message)

        self._write(dir, tensors, write_and_meet)

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()


def copy_to_host(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies in host memory. Tensors that share their memory (tied weights) share that of the copy, too. What is
    no tensor stays as it is. Shards stay shards."""
    from torch.distributed.tensor import DTensor

    copies: dict[Any, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key: Any = id(value)
        if not isinstance(value, DTensor):
            key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    return {name: copy(value) for name, value in tensors.items()}


def load(
    dir: str | Path, model: nn.Module, optimizer: Any | None, average: WeightAverage | None = None, *, alone: bool
) -> dict[str, int]:
    """Fill the training state of these objects in place; returns the progress. A collective, unless ``alone``. Raises
    FileNotFoundError where there is no checkpoint, and ValueError naming the entries that are missing, left over or of
    another shape; then nothing is changed."""
    from coalign.weights.metadata import METADATA, DistributedCheckpointPlanner, DistributedCheckpointReader

    if not (Path(dir) / METADATA).is_file():
        raise FileNotFoundError(f"{dir} holds no checkpoint of a trainer (no .metadata file)")
    reader = DistributedCheckpointReader(dir)
    saved = reader.read_metadata().state_dict_metadata
    state = get_training_state(model, optimizer, average)
    _refuse_strangers(dir, {n: m for n, m in saved.items() if not n.startswith(PROGRESS)}, state)
    progress = {name.removeprefix(PROGRESS): 0 for name in saved if name.startswith(PROGRESS)}
    loaded: dict[str, Any] = {**state, "progress": progress}
    reader.fill(loaded, DistributedCheckpointPlanner(), alone=alone)
    for name, entries in _optimizer_state(model, optimizer):  # tensors were filled, numbers replaced
        entries.update({key: loaded[f"{OPTIMIZER}{name}.{key}"] for key in entries})
    return loaded["progress"]


def _optimizer_state(model: nn.Module, optimizer: Any | None) -> list[tuple[str, dict[str, Any]]]:
    """(parameter name, its live entries) of every optimised parameter."""
    if optimizer is None:
        return []
    state: Mapping[nn.Parameter, dict[str, Any]] = optimizer.state
    return [(name, state[p]) for name, p in model.named_parameters() if p in state]


def _refuse_strangers(dir: str | Path, saved: dict[str, Any], state: State) -> None:
    wrong = [f"{name} is missing there" for name in state if name not in saved]
    wrong += [f"{name} is unknown here" for name in saved if name not in state]
    shapes = {name: (_shape(saved[name]), _shape(value)) for name, value in state.items() if name in saved}
    wrong += [f"{name} is {there} there and {here} here" for name, (there, here) in shapes.items() if there != here]
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ValueError(f"checkpoint {dir} is of another model or optimizer: {'; '.join(wrong[:5])}{more}")


def _shape(value: Any) -> tuple[int, ...] | str:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return tuple(value.size) if hasattr(value, "size") else "a number"
