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

from coalign.backends.vision import VIDEO_ARGUMENTS
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
    Raises ValueError for a model whose pixels vLLM reads in another form than its processor makes them."""

    def __init__(self, config: ModelConfig, processor: ImageProcessor) -> None:
        self.pixels = PixelCache(processor, KEPT_PIXELS)
        self._has_steps = processor.frames is not None and not processor.write_video((1, 2, 2), 2, 1.0).startswith(
            processor.video_placeholder
        )
        self._processor: Any = MULTIMODAL_REGISTRY.create_processor(config)
        self._check(processor)

    def build(self, tokens: list[int], spans: Sequence[ImageSpan], salt: str) -> MultiModalInput:
        """Return the input of a prompt. ``salt`` keeps it from keys, values and features of other weights. Raises what
        `PixelCache.get` raises, and ValueError for a video that vLLM reads differently than transformers."""
        if not self._has_steps and any(span.is_video for span in spans):
            raise ValueError(
                "vLLM samples with videos of families alone that write a text before each step of a video (Qwen3-VL): "
                "behind others its positions are not those of transformers; use `module: native`"
            )
        images = split_images(spans)
        modalities = ["video" if first.is_video else "image" for first, *_ in images]

        def sort(values: Sequence[Any]) -> dict[str, list[Any]]:
            """Group the values, one for each image, by modality."""
            pairs = [*zip(modalities, values, strict=True)]
            return {modality: [v for m, v in pairs if m == modality] for modality in sorted({*modalities})}

        return mm_input(
            prompt_token_ids=tokens,
            mm_kwargs=MultiModalKwargsItems(sort([self._convert(self.pixels.get(span), span) for span, *_ in images])),
            mm_hashes=sort([f"{span.image}/{salt}" for span, *_ in images]),
            mm_placeholders=sort([self._find_range(spans) for spans in images]),
            cache_salt=salt,
        )

    def _convert(self, pixels: Pixels, span: ImageSpan | None = None) -> MultiModalKwargsItem:
        joined = _join_tiles(pixels)
        tiles = torch.tensor([len(joined["pixel_values"])])
        derived = {**dict.fromkeys(TILES, tiles), TOKEN: torch.tensor(self.pixels.processor.token)}
        modality = "image"
        if span is not None and span.is_video:
            modality, joined = "video", {VIDEO_ARGUMENTS[name]: tensor for name, tensor in joined.items()}
        inputs = BatchFeature({**derived, **joined})
        items = MultiModalKwargsItems.from_hf_inputs(inputs, self._processor._get_mm_fields_config(inputs, {}))
        [item] = items[modality]
        return item

    def _find_range(self, spans: Sequence[ImageSpan]) -> PlaceholderRange:
        """The range of an image's placeholders. For a video whose steps have texts it begins with the marker before the
        first step, from which on vLLM looks for them."""
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
