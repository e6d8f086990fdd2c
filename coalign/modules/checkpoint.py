"""A trainer's state on disk, in torch's distributed checkpoint format: any number of ranks reads what another wrote."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

MODEL, ADAMW = "model.", "adamw."
# torch says so each time that one process saves alone, as it should.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """The live tensors by name: parameters, persistent buffers and the optimizer's state."""
    state = {MODEL + name: tensor for name, tensor in weights(model).items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            state |= {f"{ADAMW}{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and persistent buffers, live."""
    parameters, persistent = dict(model.named_parameters()), model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return parameters | buffers


def save(dir: str | Path, state: dict[str, torch.Tensor], progress: dict[str, int], *, alone: bool) -> None:
    """Write ``state`` and ``progress``. A collective, unless this process holds the model ``alone``."""
    dcp.save({**state, "progress": progress}, checkpoint_id=str(dir), no_dist=alone)


def load(dir: str | Path, state: dict[str, torch.Tensor], *, alone: bool) -> dict[str, int]:
    """Fill the tensors of ``state`` in place; returns the progress. A collective, unless ``alone``.

    Raises FileNotFoundError where there is no checkpoint, and ValueError naming the tensors that are missing, left over
    or of another shape. Nothing is touched then.
    """
    if not (Path(dir) / ".metadata").is_file():
        raise FileNotFoundError(f"{dir} holds no checkpoint of a trainer (no .metadata file)")
    saved = FileSystemReader(str(dir)).read_metadata().state_dict_metadata
    progress = {name.removeprefix("progress."): 0 for name in saved if name.startswith("progress.")}
    _refuse_strangers(dir, {n: m for n, m in saved.items() if not n.startswith("progress.")}, state)
    loaded: dict[str, Any] = {**state, "progress": progress}
    dcp.load(loaded, checkpoint_id=str(dir), no_dist=alone)
    return loaded["progress"]


def _refuse_strangers(dir: str | Path, saved: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    wrong = [f"{name} is missing there" for name in state if name not in saved]
    wrong += [f"{name} is unknown here" for name in saved if name not in state]
    wrong += [
        f"{name} is {tuple(saved[name].size)} there and {tuple(tensor.shape)} here"
        for name, tensor in state.items()
        if name in saved and tuple(saved[name].size) != tuple(tensor.shape)
    ]
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ValueError(f"checkpoint {dir} is of another model: {'; '.join(wrong[:5])}{more}")
