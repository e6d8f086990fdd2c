"""The tower of a vision-language model beside megatron-core's language model.

Tower and projector are transformers' modules. Each rank of the first pipeline stage has them whole, and computes the
images of its chunk of the row, so their gradients are summed as those of other weights that are not cut. All stages
know the positions of images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from coalign.backends import pretrained
from coalign.backends.vision import ImageEmbedder, find_owner, name_components
from coalign.config.schema import ImagesConfig, ModelConfig
from coalign.data.images.processor import ImageProcessor
from coalign.roles import Context


class PipelineVision:
    """The image embedder of a rank, which computes rows with images. ``tower``: None on all stages but the first."""

    def __init__(self, config: ModelConfig, context: Context, *, first: bool) -> None:
        assert config.vision is not None
        self._settings = config.vision
        skeleton = pretrained.build_skeleton(config, name=context.model)
        self.tower: nn.Module | None = None
        owner = find_owner(skeleton)
        self._components = {name.partition(".visual.")[2]: c for name, c in name_components(skeleton).items()}
        if first:
            tower = cast(Any, type(owner.visual))
            owner.visual = self.tower = tower._from_config(owner.visual.config, dtype=getattr(torch, config.dtype))
        directory, images = pretrained.get_directory(config), context.images or ImagesConfig()
        self.embedder = ImageEmbedder(
            skeleton,
            ImageProcessor(directory, pretrained.read_tokenizer(config), images),
            keep=config.vision.cache_mib * 2**20,
            learns=not config.frozen and "train" in (config.vision.tower, config.vision.projector),
        )

    def freeze(self) -> None:
        """Freeze the components that the section `vision` freezes."""
        for name, parameter in self.tower.named_parameters() if self.tower is not None else ():
            if getattr(self._settings, self._components[name]) == "freeze":
                parameter.requires_grad_(False)


def find_problems(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong with it) for settings that a model with images cannot follow under Megatron."""
    vision = config.vision
    if vision is None:
        return
    if config.head != "lm":
        yield "head", f" is {config.head}: under `megatron` such a model reads no images yet; use `module: fsdp`"
    if pretrained.has_adapters(config):
        yield "lora", ": adapters of Megatron's layers are not for models that read images yet; use `module: fsdp`"
    if vision.language == "freeze" and not config.frozen:
        yield "vision.language", " is freeze: under `megatron` the language model learns; use `module: fsdp`"
    for key in ("tower_lr_scale", "projector_lr_scale"):
        if getattr(vision, key) != 1.0:
            yield f"vision.{key}", f" is {getattr(vision, key)}: Megatron's optimizer has one rate; use `module: fsdp`"
    if config.fp8:
        yield "fp8", ": not with images yet (data.images); leave it out"
