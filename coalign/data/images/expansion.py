"""The placeholders of images in the text that a template writes and in its tokens: one for each feature of an image."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from coalign.data.images.frames import VIDEO_DEFAULTS
from coalign.data.images.image_files import ImageFile, ImageFiles
from coalign.data.images.placeholders import REASON, Message, list_image_parts
from coalign.data.images.processor import ImageProcessor
from coalign.data.images.rows import RowImages
from coalign.data.images.videos import VideoFiles
from coalign.data.sources import BadRow
from coalign.types import ImageSpan


class Placeholders:
    """Expands the placeholder of each image or video in a text to one for each feature, and finds them again."""

    def __init__(self, processor: ImageProcessor, files: ImageFiles) -> None:
        self.processor, self.files = processor, files
        self.videos = VideoFiles(files)
        marks = [processor.placeholder, *([processor.video_placeholder] if processor.frames else [])]
        self._mark = re.compile("|".join(map(re.escape, marks)))

    def open_rows(self) -> RowImages:
        """Return the reader of images in rows."""
        return RowImages(self.files)

    def write(self, part: Message) -> str:
        """Return the placeholder of a part, before it is expanded. BadRow (image) for a video that no model reads."""
        return self._get_mark(part["type"] == "video")

    def _get_mark(self, is_video: bool) -> str:
        if is_video and self.processor.frames is None:
            raise BadRow(
                f"the row has a video, and the model in {self.processor.directory} reads images alone; videos are read "
                f"by {', '.join(VIDEO_DEFAULTS)}",
                REASON,
            )
        return self.processor.video_placeholder if is_video else self.processor.placeholder

    def find(self, messages: Iterable[Message]) -> list[ImageFile]:
        """The files of the images and videos in messages, in order. BadRow (image) for one that cannot be used."""
        return [
            self.files.find(part["image"]) if part["type"] == "image" else self.videos.find(part["video"])
            for part in list_image_parts(messages)
        ]

    def expand(self, text: str, images: Sequence[ImageFile]) -> tuple[str, list[tuple[int, int]]]:
        """Replace the n-th placeholder by the expanded text of the n-th image.

        Returns the text, and (end, growth) of each replacement: how much longer the text is after this end in the old
        text. BadRow (image) if there are more placeholders than images, or fewer.
        """
        marks, expected = [*self._mark.finditer(text)], [self._get_mark(image.is_video) for image in images]
        if [mark[0] for mark in marks] != expected:
            names = " or ".join(dict.fromkeys([*expected, *(mark[0] for mark in marks)]))
            raise BadRow(
                f"the chat template writes {len(marks)} placeholders ({names}) for {len(images)} images", REASON
            )
        expanded, moved, end = [], [], 0
        for mark, image in zip(marks, images, strict=True):
            expansion = self.processor.measure_file(image).text
            moved.append((mark.end(), len(expansion) - len(mark[0])))
            expanded += [text[end : mark.start()], expansion]
            end = mark.end()
        return "".join([*expanded, text[end:]]), moved

    def locate(self, tokens: Sequence[int], images: Sequence[ImageFile]) -> tuple[ImageSpan, ...]:
        """Find the spans of ``images`` in the tokens of an expanded text. BadRow (image) unless all are there.

        No content can write a placeholder (ContentGuard), so what has its id is one.
        """
        runs: list[tuple[int, int]] = []
        for placed, run in groupby(enumerate(tokens), key=lambda pair: pair[1] in self.processor.tokens):
            if placed:
                positions = [position for position, _ in run]
                runs.append((positions[0], len(positions)))
        shapes = [self.processor.measure_file(image) for image in images]
        if (count := sum(length for _, length in runs)) != (expected := sum(shape.features for shape in shapes)):
            raise BadRow(f"{count} placeholders in the tokens, and {expected} features of {len(images)} images", REASON)
        spans = []
        start, left = runs.pop(0) if runs else (0, 0)
        for image, shape in zip(images, shapes, strict=True):
            first = 0
            while first < shape.features:
                length = min(left, shape.features - first)
                spans.append(ImageSpan(image.sha256, image.path, start, length, shape.grid, first, shape.seconds))
                first, start, left = first + length, start + length, left - length
                if not left and runs:
                    start, left = runs.pop(0)
        return tuple(spans)
