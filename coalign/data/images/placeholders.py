"""Where images stand: in the messages of a row, in the text that a template writes, and in its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from coalign.data.images.frames import VIDEO_DEFAULTS
from coalign.data.images.image_files import REASON, ImageFile, ImageFiles
from coalign.data.images.processor import ImageProcessor
from coalign.data.images.videos import VideoFiles
from coalign.data.sources import BadRow
from coalign.types import ImageSpan

Message = dict[str, Any]
KINDS = ("image", "video")  # what stands in messages beside text, as types of their parts
# LLaVA, Geometry3K: <image>; MMMU: <image 1>
MARKERS = {kind: re.compile(rf"<{kind}(?:[ _](\d+))?>") for kind in KINDS}


def is_image(part: Any) -> bool:
    """Whether a part of content is an image or a video."""
    return isinstance(part, dict) and part.get("type") in KINDS


def list_images(messages: Iterable[Message]) -> list[str]:
    """List the paths of the images in messages, in order; not those of videos."""
    return [part["image"] for part in list_image_parts(messages) if part["type"] == "image"]


def list_image_parts(messages: Iterable[Message]) -> list[Message]:
    """List the parts of messages that are images or videos, in order."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if isinstance(content, list) for part in content if is_image(part)]


def read_part(part: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the kind and the value of a part of content in any of the usual forms; None for a text.

    {type: image, image: …}, {type: image, url or path: …}, {type: image_url, image_url: {url}}, {type: input_image, …};
    likewise for videos.
    """
    for kind in KINDS:
        if str(part.get("type")) in (kind, f"{kind}_url", f"input_{kind}"):
            names = (kind, f"{kind}_url", "url", "path")
            return kind, next((part[key] for key in names if part.get(key) is not None), "")
    return None


def place_images(messages: Sequence[Message], images: Sequence[str], videos: Sequence[str] = ()) -> list[Message]:
    """Put the images of a row where its texts say `<image>`, or, if none does, before the first question.

    `<image 2>` is the second image; videos likewise. BadRow (image) unless each image of the row has a place, and each
    place an image. Neighbouring texts of a message become one.
    """
    return _place(_place(messages, "image", images), "video", videos)


def _place(messages: Sequence[Message], kind: str, paths: Sequence[str]) -> list[Message]:
    def is_open(part: Message) -> bool:
        """Whether a part is the place of an image that the row has elsewhere: {type: image} alone."""
        return part.get("type") == kind and not part[kind]

    marker = MARKERS[kind]
    everywhere = [part for message in messages for part in _list_parts(message)]
    marks = sum(len(marker.findall(_get_text(part))) + is_open(part) for part in everywhere)
    own = {part[kind] for part in everywhere if part.get("type") == kind and part[kind]}
    if not marks and (not paths or own == set(paths)):
        return [_write(message, _list_parts(message)) for message in messages]
    if own and paths:
        raise BadRow(f"the row has {len(paths)} {kind}s of its own, and others in its messages", REASON)
    if not marks:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise BadRow(f"the row has {len(paths)} {kind}s and no message of the user", REASON)
        images = [{"type": kind, kind: path} for path in paths]
        return [
            _write(message, [*images, *_list_parts(message)] if i == first else _list_parts(message))
            for i, message in enumerate(messages)
        ]
    waiting = list(paths)
    used: set[int] = set()

    def take(number: str | None) -> Message:
        index = len(used) if number is None else int(number) - 1
        if not 0 <= index < len(waiting):
            raise BadRow(f"the texts name {kind} {index + 1}, and the row has {len(paths)}", REASON)
        used.add(index)
        return {"type": kind, kind: waiting[index]}

    placed = []
    for message in messages:
        parts: list[Message] = []
        for part in _list_parts(message):
            if is_image(part):
                parts.append(take(None) if is_open(part) else part)
                continue
            text, end = _get_text(part), 0
            for found in marker.finditer(text):
                parts += [{"type": "text", "text": text[end : found.start()]}, take(found[1])]
                end = found.end()
            parts.append({"type": "text", "text": text[end:]})
        placed.append(_write(message, parts))
    if len(used) < len(paths):
        raise BadRow(f"the row has {len(paths)} {kind}s, and its texts have places for {len(used)}", REASON)
    return placed


def _list_parts(message: Message) -> list[Message]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _get_text(part: Message) -> str:
    return "" if is_image(part) else part.get("text") or ""


def _write(message: Message, parts: Sequence[Message]) -> Message:
    """The message with these parts: a text if there are no images. Neighbouring texts are joined."""
    joined: list[Message] = []
    for text, run in groupby(parts, key=lambda part: not is_image(part)):
        if not text:
            joined += run
        elif content := "".join(_get_text(part) for part in run):
            joined.append({"type": "text", "text": content})
    if not any(map(is_image, joined)):
        return message if isinstance(message["content"], str) else message | {"content": _join_texts(joined)}
    return message | {"content": joined}


def _join_texts(parts: Sequence[Message]) -> str:
    return "".join(_get_text(part) for part in parts)


def show_images(messages: Sequence[Message], paths: Sequence[str]) -> list[Message]:
    """Put images before the text of the last message of the user, unless the messages have images of their own."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if not paths or last is None or any(is_image(part) for message in messages for part in _list_parts(message)):
        return list(messages)
    images = [{"type": "image", "image": path} for path in paths]
    return [
        _write(message, [*images, *_list_parts(message)]) if i == last else message
        for i, message in enumerate(messages)
    ]


def write_markers(messages: Sequence[Message]) -> list[Message]:
    """Replace the images and videos in messages by `<image>` and `<video>`, for those who read text alone."""
    return [
        _write(
            message,
            [
                {"type": "text", "text": f"<{part['type']}>"} if is_image(part) else part
                for part in _list_parts(message)
            ],
        )
        for message in messages
    ]


def split_images(spans: Iterable[ImageSpan]) -> list[list[ImageSpan]]:
    """The spans of each image of a sequence, in order: an image may stand there twice, and in several spans."""
    images: list[list[ImageSpan]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if not span.first:
            images.append([])
        images[-1].append(span)
    return images


def describe_placeholders(spans: Iterable[ImageSpan]) -> str:
    """How many tokens stand for images, as a part of a sentence about tokens; empty without images."""
    count = sum(span.length for span in spans)
    return f", of which {count} stand for images (data.images.max_pixels makes these smaller)" if count else ""


class Placeholders:
    """Expands the placeholder of each image in a text to as many as the model has features, and finds them again.

    Of videos, too, in the models that read them.
    """

    def __init__(self, processor: ImageProcessor, files: ImageFiles) -> None:
        self.processor, self.files = processor, files
        self.videos = VideoFiles(files)
        marks = [processor.placeholder, *([processor.video_placeholder] if processor.frames else [])]
        self._mark = re.compile("|".join(map(re.escape, marks)))

    def write(self, part: Message) -> str:
        """Return what stands for a part, before it is expanded. BadRow (image) for a video that no model here reads."""
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
        """Replace the n-th placeholder by what stands for the n-th image.

        Returns the text, and (place, growth) of each replacement: how much longer the text is behind that place of the
        old one. BadRow (image) if there are more placeholders than images, or fewer.
        """
        found, expected = [*self._mark.finditer(text)], [self._get_mark(image.is_video) for image in images]
        if [mark[0] for mark in found] != expected:
            names = " or ".join(dict.fromkeys([*expected, *(mark[0] for mark in found)]))
            raise BadRow(
                f"the chat template writes {len(found)} placeholders ({names}) for {len(images)} images", REASON
            )
        expanded, moved, end = [], [], 0
        for mark, image in zip(found, images, strict=True):
            stands = self.processor.measure_file(image).text
            moved.append((mark.end(), len(stands) - len(mark[0])))
            expanded += [text[end : mark.start()], stands]
            end = mark.end()
        return "".join([*expanded, text[end:]]), moved

    def locate(self, tokens: Sequence[int], images: Sequence[ImageFile]) -> tuple[ImageSpan, ...]:
        """Find the spans of ``images`` in the tokens of an expanded text. BadRow (image) unless all are there.

        No content can write a placeholder (ContentGuard), so what has its id is one.
        """
        runs: list[tuple[int, int]] = []
        for placed, run in groupby(enumerate(tokens), key=lambda pair: pair[1] in self.processor.tokens):
            if placed:
                places = [place for place, _ in run]
                runs.append((places[0], len(places)))
        shapes = [self.processor.measure_file(image) for image in images]
        if (found := sum(length for _, length in runs)) != (needed := sum(shape.features for shape in shapes)):
            raise BadRow(f"{found} placeholders in the tokens, and {needed} features of {len(images)} images", REASON)
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


def shift(place: int, moved: Sequence[tuple[int, int]]) -> int:
    """Where a place of a text is after `Placeholders.expand`."""
    return place + sum(growth for at, growth in moved if at <= place)
