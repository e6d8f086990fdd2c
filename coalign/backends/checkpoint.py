"""A trainer's state on disk in torch's distributed checkpoint format, which any number of ranks can read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from coalign.backends.lora import get_weights
from coalign.backends.optim import WeightAverage
from coalign.weights.metadata import METADATA, DistributedCheckpointPlanner, DistributedCheckpointReader

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


def save(dir: str | Path, state: State, progress: dict[str, int], *, alone: bool) -> None:
    """Write ``state`` and ``progress``. A collective, unless this process holds the model ``alone``."""
    state_dict_saver.save({**state, "progress": progress}, checkpoint_id=str(dir), no_dist=alone)


def load(
    dir: str | Path, model: nn.Module, optimizer: Any | None, average: WeightAverage | None = None, *, alone: bool
) -> dict[str, int]:
    """Fill the training state of these objects in place; returns the progress. A collective, unless ``alone``. Raises
    FileNotFoundError where there is no checkpoint, and ValueError naming the entries that are missing, left over or of
    another shape; then nothing is changed."""
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
    return tuple(value.size) if isinstance(value, TensorStorageMetadata) else "a number"
