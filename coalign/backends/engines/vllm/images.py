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

from coalign.backends.vision import OF_VIDEOS
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

# What its classes call what follows from the pixels: the number of an image's tiles, and the id of placeholders.
TILES, TOKEN = ("num_patches", "image_num_patches"), "image_token_id"


class ImageInputs:
    """Makes inputs of prompts with images for the model of ``config``. ``processor``: the one of trainer and data.

    Raises ValueError for a model whose pixels vLLM reads in another form than its processor makes them.
    """

    def __init__(self, config: ModelConfig, processor: ImageProcessor) -> None:
        self.pixels = PixelCache(processor, KEPT_PIXELS)
        self._has_steps = processor.frames is not None and not processor.write_video((1, 2, 2), 2, 1.0).startswith(
            processor.video_placeholder
        )
        self._processor: Any = MULTIMODAL_REGISTRY.create_processor(config)
        self._check(processor)

    def build(self, tokens: list[int], spans: Sequence[ImageSpan], salt: str) -> MultiModalInput:
        """Return the input of a prompt. ``salt`` keeps it from keys, values and features of other weights.

        Raises what `PixelCache.get` raises, and ValueError for a video that vLLM reads otherwise than transformers.
        """
        if not self._has_steps and any(span.is_video for span in spans):
            raise ValueError(
                "vLLM samples with videos of families alone that write a text before each step of a video (Qwen3-VL): "
                "behind others its positions are not those of transformers; use `module: native`"
            )
        images = split_images(spans)
        kinds = ["video" if own[0].is_video else "image" for own in images]

        def sort(values: Sequence[Any]) -> dict[str, list[Any]]:
            """By kind of what each value is of."""
            return {kind: [v for v, own in zip(values, kinds, strict=True) if own == kind] for kind in sorted({*kinds})}

        return mm_input(
            prompt_token_ids=tokens,
            mm_kwargs=MultiModalKwargsItems(sort([self._convert(self.pixels.get(own[0]), own[0]) for own in images])),
            mm_hashes=sort([f"{own[0].image}/{salt}" for own in images]),
            mm_placeholders=sort([self._find_range(own) for own in images]),
            cache_salt=salt,
        )

    def _convert(self, pixels: Pixels, span: ImageSpan | None = None) -> MultiModalKwargsItem:
        joined = _join_tiles(pixels)
        tiles = torch.tensor([len(joined["pixel_values"])])
        derived = {**dict.fromkeys(TILES, tiles), TOKEN: torch.tensor(self.pixels.processor.token)}
        kind = "image"
        if span is not None and span.is_video:
            kind, joined = "video", {OF_VIDEOS[name]: tensor for name, tensor in joined.items()}
        inputs = BatchFeature({**derived, **joined})
        items = MultiModalKwargsItems.from_hf_inputs(inputs, self._processor._get_mm_fields_config(inputs, {}))
        [item] = items[kind]
        return item

    def _find_range(self, spans: Sequence[ImageSpan]) -> PlaceholderRange:
        """Where an image stands. That of a video whose steps have texts begins with the marker before its first step,
        from which on vLLM looks for them."""
        start, stop = spans[0].start - (spans[0].is_video and self._has_steps), spans[-1].stop
        if sum(span.length for span in spans) == stop - start:
            return PlaceholderRange(start, stop - start)
        embedded = torch.zeros(stop - start, dtype=torch.bool)
        for span in spans:
            embedded[span.start - start : span.stop - start] = True
        return PlaceholderRange(start, stop - start, embedded)

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
