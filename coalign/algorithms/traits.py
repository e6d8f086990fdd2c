"""What a loss function says about itself, and how it reads its input.

``needs``, ``per`` and ``aggregations`` are attributes of the function; see coalign.types.LossInput and LossOutput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from coalign.types import Loss, LossInput


def needs(loss: Loss, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of LossInput fields that ``loss`` reads with this configuration and that are not there unasked.

    ``entropy``, ``candidate_logprobs`` and ``collision`` are then computed by the model; ``ref`` makes the recipe run a
    reference.
    ``loss.needs``, where there is one, is called with the loss's keyword arguments, its own defaults filled in.
    """
    if not hasattr(loss, "needs"):
        return ()
    bound = signature(loss).bind(None, **arguments)
    bound.apply_defaults()
    return tuple(loss.needs(**bound.kwargs))


def per(loss: Loss) -> str:
    """What the values of ``loss`` stand for: token, sequence, group or batch (see coalign.types.LossOutput)."""
    return getattr(loss, "per", "token")


def check_aggregation(loss: Loss, name: str, aggregation: str, where: str = "loss") -> None:
    """ValueError for an ``aggregation`` that has no effect on ``loss``, or that makes another objective of it.

    ``loss.aggregations``, where there is one, names those that it is meant for. ``name`` is what the configuration at
    ``where`` calls the loss.
    """
    said = f"{where}.aggregation is `{aggregation}`"
    if per(loss) != "token" and aggregation != "token_mean":
        raise ValueError(
            f"{said} and has no effect: `{name}` gives a value per {per(loss)}, of which the mean is taken"
        )
    meant: Sequence[str] = getattr(loss, "aggregations", (aggregation,))
    if aggregation not in meant:
        raise ValueError(f"{said}, which `{name}` is not defined for; expected {' or '.join(meant)}")


def read(x: LossInput, name: str, because: str | None = None) -> Tensor:
    """The field ``name`` of the input. ValueError if it is missing; ``because`` names the setting that asks for it."""
    column = getattr(x, name)
    if column is None:
        reason = f" because loss.{because} is set" if because else ""
        raise ValueError(f"the loss needs `{name}`{reason}, but the batch does not have it")
    return column


def column(x: LossInput, name: str, because: str | None = None) -> Any:
    """The column ``name`` of the micro-batch. ValueError if it is missing; ``because`` as in `read`."""
    if name not in x.columns:
        reason = f" because loss.{because} is set" if because else ""
        raise ValueError(f"the loss needs the column `{name}`{reason}, but the batch has only {sorted(x.columns)}")
    return x.columns[name]
