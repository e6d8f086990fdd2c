"""Refuses rows, images and routers that a model of transformers cannot compute as configured."""

from __future__ import annotations

from coalign.backends.hf.heads import PackedModel
from coalign.backends.known_models import find_known_model
from coalign.backends.pretrained import has_adapters
from coalign.backends.routers import Routers
from coalign.backends.vision import find_owner
from coalign.config.schema import ModelConfig

CUTS = ("tensor_parallel", "context_parallel", "expert_parallel")
ROUTER_LOSSES = ("router_aux_loss_coef", "router_z_loss_coef")


def is_known(config: ModelConfig) -> bool:
    """Whether a model computes packed rows as configured, as its config.json alone says: nothing cuts or adapts it."""
    is_plain = all(getattr(config, key) == 1 for key in CUTS) and not any(getattr(config, key) for key in ROUTER_LOSSES)
    is_packed = config.rows in ("auto", "packed") and not has_adapters(config)
    return is_packed and is_plain and find_known_model(config) is not None


def check_rows(rows: str, config: ModelConfig, name: str) -> None:
    """Raises ValueError for settings that need packed rows, and for `single` rows over several processes, which would
    call the layers different numbers of times."""
    if rows == "packed":
        return
    why = f"and models.{name} computes `rows: {rows}`"
    if key := next((key for key in CUTS if getattr(config, key) > 1), None):
        raise ValueError(f"models.{name}.{key} is {getattr(config, key)}, {why}: it needs packed rows")
    for is_refused, what in (
        (config.processes > 1 and not config.frozen, f"has {config.processes} processes"),
        (config.reduction == "exact" and not config.frozen, "adds up exactly (`reduction`)"),
        (any(getattr(config, key) for key in ROUTER_LOSSES), "has losses of routers"),
    ):
        if rows == "single" and is_refused:
            raise ValueError(f"models.{name} {what}, {why}: use packed or padded rows")


def check_vision(model: PackedModel, config: ModelConfig, name: str) -> None:
    """Raises ValueError or NotImplementedError for a model, without weights, that cannot read images as configured."""
    if model.rows != "packed":
        raise NotImplementedError(
            f"models.{name}: {type(model.model).__name__} computes {model.rows} rows, and images need packed ones"
        )
    find_owner(model.model)
    if config.fp8:
        raise ValueError(f"models.{name}.fp8: not with images yet (data.images); leave it out")


def check_routers(routers: Routers, config: ModelConfig, name: str) -> None:
    """Raises ValueError for keys about routers that a model cannot follow."""
    wanted = None if config.frozen else next((key for key in ROUTER_LOSSES if getattr(config, key)), None)
    if wanted and (reason := find_hidden_routers(routers, config)):
        raise ValueError(f"models.{name}.{wanted} is {getattr(config, wanted)}: {reason}")


def find_hidden_routers(routers: Routers, config: ModelConfig) -> str | None:
    """Why the routers of a model cannot be watched; None if they can."""
    return routers.unfit or ("layers that are compiled do not show their routers (compile)" if config.compile else None)
