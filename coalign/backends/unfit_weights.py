"""Says why the weights of a directory are not those of the model that its settings ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coalign.config.schema import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LAYER = re.compile(r"\.\d+\.")  # in the names of the weights of a numbered layer
SHOWN = 8  # weights that a message names


def refuse_unfit(config: ModelConfig, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Refuse weights of another shape, those that the files lack, and files of a larger model or of another head.
    ``info``: what transformers tells of the loading (missing, unexpected and mismatched keys)."""
    if misfits := [
        f"{n} is {list(there)} there and {list(here)} in the model"
        for n, there, here in sorted(info["mismatched_keys"])
    ]:
        more = f"; and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        raise ValueError(f"{config.load}: the weights do not fit: {'; '.join(misfits[:SHOWN])}{more}")
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    if config.head != "lm" and config.head_init == "zero":
        missing.discard("score.weight")
    if "score.weight" in unexpected:
        raise ValueError(f"{config.load} is a reward or value model (it has a `score.weight`), and no language model")
    if missing:
        new = "it was not trained as one" if config.frozen else "head_init: zero starts a new head"
        hint = f"; {new}" if "score.weight" in missing else ""
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        names = f"{sorted(missing)[:SHOWN]}{more}"
        raise ValueError(f"{config.load} lacks {names} for a model with head '{config.head}'{hint}")


def describe_layers_beyond(config: ModelConfig, model: PreTrainedModel, info: Mapping[str, Any]) -> str:
    """Say that the files have layers beyond those of config.json, which are not loaded; empty if they have none. Layers
    for prediction of several tokens at once, which follow the others and are not computed here, do not count."""
    if getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0):
        return ""
    names = {LAYER.sub(".0.", name) for name in model.state_dict()}
    unexpected = sorted(info["unexpected_keys"])
    beyond = [name for name in unexpected if LAYER.search(name) and LAYER.sub(".0.", name) in names]
    what = f"{config.load} has weights of more layers than its config.json says"
    return f"{what}, among them {beyond[0]}" if beyond else ""
