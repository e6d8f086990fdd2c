"""A prompt with two pictures, with which programs that read images are compared.

The pictures are no files: every process draws them alike, from their names (`PixelCache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from coalign.data.images.processor import ImageProcessor
from coalign.types import ImageSpan

if TYPE_CHECKING:
    from PIL.Image import Image

SIZES = ((44, 30), (30, 52))  # pixels


def draw_picture(name: str) -> Image:
    """Draw a picture of random pixels; ``name`` is its size, as `44x30`."""
    from PIL import Image

    width, height = map(int, name.split("x"))
    generator = torch.Generator().manual_seed(width)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def make_probe(processor: ImageProcessor, plain: Sequence[int]) -> tuple[list[int], list[ImageSpan]]:
    """Return a prompt with two pictures of different sizes, and where they stand in it.

    ``plain``: four ids that stand for no image.
    """
    tokens, spans = [*plain[:2]], list[ImageSpan]()
    for size in SIZES:
        name, shape = "x".join(map(str, size)), processor.measure(size)
        image_tokens = cast(list[int], processor.tokenizer(shape.text, add_special_tokens=False)["input_ids"])
        first = 0
        for position, token in enumerate(image_tokens, len(tokens)):
            if token != processor.token:
                continue
            if spans and spans[-1].stop == position and first:
                spans[-1] = replace(spans[-1], length=spans[-1].length + 1)
            else:
                spans.append(ImageSpan(name, "", position, 1, shape.grid, first))
            first += 1
        tokens += [*image_tokens, *plain[2:4]]
    return tokens, spans
