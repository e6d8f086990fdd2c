"""What a loss function declares about itself, and how it reads its input.

The declarations are the attributes ``needs``, ``per`` and ``aggregations`` of the function: see coalign.types.LossInput
and LossOutput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from coalign.types import Loss, LossInput


def required_inputs(loss: Loss, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the LossInput fields that ``loss`` reads with these arguments and that exist only on request.

    The model computes ``entropy``, ``candidate_logprobs`` and ``collision``; ``ref`` makes the recipe run a reference.
    The attribute ``loss.needs``, if there is one, is called with the loss's keyword arguments, defaults included.
    """
    declared = getattr(loss, "needs", None)
    if declared is None:
        return ()
    bound = signature(loss).bind(None, **arguments)
    bound.apply_defaults()
    return tuple(declared(**bound.kwargs))


def value_unit(loss: Loss) -> str:
    """What one value of ``loss`` belongs to: token, sequence, group or batch (see coalign.types.LossOutput)."""
    return getattr(loss, "per", "token")


def check_aggregation(loss: Loss, name: str, aggregation: str, where: str = "loss") -> None:
    """Raise ValueError for an ``aggregation`` that has no effect on ``loss``, or that the loss is not defined for.

    ``loss.aggregations``, if there is one, lists those it is defined for. ``name`` is the loss's name in the
    configuration at ``where``.
    """
    setting = f"{where}.aggregation is `{aggregation}`"
    if value_unit(loss) != "token" and aggregation != "token_mean":
        raise ValueError(
            f"{setting} and has no effect: `{name}` gives a value per {value_unit(loss)}, of which the mean is taken"
        )
    allowed: Sequence[str] = getattr(loss, "aggregations", (aggregation,))
    if aggregation not in allowed:
        raise ValueError(f"{setting}, which `{name}` is not defined for; expected {' or '.join(allowed)}")


def require_input(x: LossInput, name: str, because: str | None = None) -> Tensor:
    """The field ``name`` of the input. ValueError if it is missing; ``because`` names the setting that needs it."""
    value = getattr(x, name)
    if value is None:
        reason = f" because loss.{because} is set" if because else ""
        raise ValueError(f"the loss needs `{name}`{reason}, but the batch does not have it")
    return value


def require_column(x: LossInput, name: str, because: str | None = None) -> Any:
    """The column ``name`` of the micro-batch. ValueError if it is missing; ``because`` as in `require_input`."""
    if name not in x.columns:
        reason = f" because loss.{because} is set" if because else ""
        raise ValueError(f"the loss needs the column `{name}`{reason}, but the batch has only {sorted(x.columns)}")
    return x.columns[name]
