"""Pixels of images as a model reads them, made when they are needed and kept while there is room."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor

from coalign.data.images.image_files import open_image, read_content
from coalign.data.images.probe import draw_picture
from coalign.data.images.processor import ImageProcessor
from coalign.data.images.videos import read_frames
from coalign.types import ImageSpan

Pixels = Mapping[str, Tensor]


class PixelCache:
    """Makes the pixels of images and keeps those used last, up to ``max_bytes``.

    ``made`` counts those made from files. Not thread-safe.
    """

    def __init__(self, processor: ImageProcessor, max_bytes: int) -> None:
        self.processor, self.max_bytes, self.made = processor, max_bytes, 0
        self._kept: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0

    def get(self, span: ImageSpan) -> Pixels:
        """Return `pixel_values` and what belongs to them, on the CPU.

        FileNotFoundError or ValueError, with the path, for a file that is gone or has changed since the data were read.
        """
        if (pixels := self._kept.get(span.image)) is None:
            pixels = self._make(span)
            self.made += bool(span.path)
            self.keep(span.image, pixels)
        self._kept.move_to_end(span.image)
        return pixels

    def keep(self, image: str, pixels: Pixels) -> None:
        """Keep ``pixels`` under the hash of their file, and drop those that were not used for longest."""
        self._kept[image] = pixels
        self._bytes += _count_bytes(pixels)
        while self._bytes > self.max_bytes and len(self._kept) > 1:
            self._bytes -= _count_bytes(self._kept.popitem(last=False)[1])

    def _make(self, span: ImageSpan) -> Pixels:
        if not span.path:
            return self.processor.prepare(draw_picture(span.image))
        try:
            content = read_content(span.path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"the image {span.path} is not there: every process that reads images needs the same files (on a "
                "cluster, a folder that all machines share)"
            ) from error
        if hashlib.sha256(content).hexdigest() != span.image:
            raise ValueError(f"the image {span.path} has changed since the data were read")
        max_pixels = self.processor.settings.max_file_pixels
        if span.is_video:
            frames, _ = read_frames(content, span.path, max_pixels)
            pixels = self.processor.prepare_video(frames)
            grid = tuple(pixels["image_grid_thw"][0].tolist())
        else:
            image = open_image(content, span.path, max_pixels)
            pixels, grid = self.processor.prepare(image), self.processor.measure(image.size).grid
        if grid != span.grid:
            raise ValueError(
                f"the image {span.path} has {grid} patches by the processor in {self.processor.directory}, and "
                f"{span.grid} by that of the data: all models that see need the same processor"
            )
        return pixels


def _count_bytes(pixels: Pixels) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())
