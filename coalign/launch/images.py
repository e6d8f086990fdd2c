"""Which models of a run see, and what cannot be there in a run that reads images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coalign.config.schema import FUNCTIONS, ModelConfig, RunConfig, VisionConfig
from coalign.data.kinds import KINDS

if TYPE_CHECKING:
    from coalign.engine.engine import Engine


def let_models_see(configs: Mapping[str, ModelConfig], config: RunConfig) -> dict[str, ModelConfig]:
    """Return the settings with `vision` for every model of a run that reads images, but for functions and for judges
    that are shown none.

    ValueError for a model that is to see in a run that reads text alone.
    """
    if config.data.images is not None:
        return {
            name: model
            if name == FUNCTIONS or model.vision or (model.judge is not None and not model.judge.show_images)
            else model.model_copy(update={"vision": VisionConfig()})
            for name, model in configs.items()
        }
    if blind := next((name for name, model in configs.items() if model.vision is not None), None):
        raise ValueError(f"models.{blind}.vision: the run reads text alone; set data.images: {{}} for rows with images")
    return dict(configs)


def check_images(
    config: RunConfig,
    recipe: type[Engine],
    configs: Mapping[str, ModelConfig],
) -> None:
    """Refuse images where what would read them knows text alone."""
    if config.data.images is None:
        return
    if not KINDS[recipe.source].reads_images:
        raise ValueError(f"data.images: `{config.algorithm}` reads {recipe.source}, which hold no images; leave it out")
    if config.sync.adapters == "apart":
        raise ValueError("sync.adapters is `apart`, which vLLM does not do for models that see here; use `merged`")
    for name, model in configs.items():
        if model.cache:
            raise ValueError(f"models.{name}.cache: log-probs are kept by tokens alone; leave it out with data.images")
