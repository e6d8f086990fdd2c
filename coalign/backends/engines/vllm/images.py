"""Prompts with images as vLLM's own inputs: the trainer's tokens, and pixels of the trainer's processor.

vLLM could also be given the images themselves. It would then expand placeholders by rules of its own, and those of a
prompt that is expanded already a second time, without a word; and it would resize images with torchvision, where the
trainer has Pillow. So it gets what its renderer would make: expanded tokens, where the features belong, and the pixels
(`vllm.inputs.mm_input`). What the fields of an image are called is asked of vLLM's class of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchFeature
from vllm.config import ModelConfig
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange

from coalign.data.images.pixels import PixelCache, Pixels
from coalign.data.images.placeholders import split_images
from coalign.data.images.processor import ImageProcessor
from coalign.types import ImageSpan

KEPT_PIXELS = 2**28  # bytes: requests that run keep what they need themselves
# vLLM's own settings of a model that sees. It reads pixels that are normalised, and keeps none after its first look.
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": False,  # its processors of images need one, though nothing is tokenised
    "limit_mm_per_prompt": {"video": 0},
    "mm_device_do_normalize": False,
    "mm_processor_cache_gb": 0,
}

# What its classes call what follows from the pixels: the number of an image's tiles, and the id of its placeholders.
TILES, TOKEN = ("num_patches", "image_num_patches"), "image_token_id"


class ImageInputs:
    """Makes inputs of prompts with images for the model of ``config``. ``processor``: the one of trainer and data.

    Raises ValueError for a model whose pixels vLLM reads in another form than its processor makes them.
    """

    def __init__(self, config: ModelConfig, processor: ImageProcessor) -> None:
        self.pixels = PixelCache(processor, KEPT_PIXELS)
        self._processor: Any = MULTIMODAL_REGISTRY.create_processor(config)
        self._check(processor)

    def build(self, tokens: list[int], spans: Sequence[ImageSpan], salt: str) -> MultiModalInput:
        """Return the input of a prompt. ``salt`` keeps it from keys, values and features of other weights.

        Raises what `PixelCache.get` raises.
        """
        if any(span.is_video for span in spans):
            raise ValueError("vLLM samples with images, not with videos; `module: native` and `transformers` do both")
        images = split_images(spans)
        return mm_input(
            prompt_token_ids=tokens,
            mm_kwargs=MultiModalKwargsItems({"image": [self._convert(self.pixels.get(own[0])) for own in images]}),
            mm_hashes={"image": [f"{own[0].image}/{salt}" for own in images]},
            mm_placeholders={"image": [_find_range(own) for own in images]},
            cache_salt=salt,
        )

    def _convert(self, pixels: Pixels) -> MultiModalKwargsItem:
        joined = _join_tiles(pixels)
        tiles = torch.tensor([len(joined["pixel_values"])])
        derived = {**dict.fromkeys(TILES, tiles), TOKEN: torch.tensor(self.pixels.processor.token)}
        inputs = BatchFeature({**derived, **joined})
        items = MultiModalKwargsItems.from_hf_inputs(inputs, self._processor._get_mm_fields_config(inputs, {}))
        [item] = items["image"]
        return item

    def _check(self, processor: ImageProcessor) -> None:
        from PIL import Image

        try:
            self._convert(processor.prepare(Image.new("RGB", (64, 48))))
        except (KeyError, ValueError, TypeError, AttributeError, NotImplementedError) as problem:
            raise ValueError(
                f"it reads the images of {type(self._processor).__name__} in another form than {processor.directory} "
                f"makes them ({type(problem).__name__}: {problem}); use `native`"
            ) from problem


def _join_tiles(pixels: Pixels) -> Pixels:
    """Tensors without the first dimension of an image's tiles, [1, tiles, …], which vLLM's classes do not have."""
    if pixels["pixel_values"].dim() < 5:
        return pixels
    return {name: tensor.flatten(0, 1) if tensor.dim() > 2 else tensor for name, tensor in pixels.items()}


def _find_range(spans: Sequence[ImageSpan]) -> PlaceholderRange:
    start, stop = spans[0].start, spans[-1].stop
    if len(spans) == 1:
        return PlaceholderRange(start, stop - start)
    embedded = torch.zeros(stop - start, dtype=torch.bool)
    for span in spans:
        embedded[span.start - start : span.stop - start] = True
    return PlaceholderRange(start, stop - start, embedded)
