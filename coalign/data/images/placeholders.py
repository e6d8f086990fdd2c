"""Images in the messages of a row, by their paths; no file is opened here, and a run of text loads nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from coalign.data.sources import BadRow
from coalign.types import ImageSpan

Message = dict[str, Any]
REASON = "image"  # BadRow's reason, to which the policy `data.bad_rows` applies
COLUMNS = ("images", "image")  # most data sets; MMMU has image_1, image_2, …
VIDEO_COLUMNS = ("videos", "video")  # several videos, one video
_TEXTS = ("messages", "conversations", "prompt", "problem", "question", "instruction")  # columns with `<image>`
MEDIA = ("image", "video")  # types of message parts that are no text
# LLaVA, Geometry3K: <image>; MMMU: <image 1>
_MARKERS = {medium: re.compile(rf"<{medium}(?:[ _](\d+))?>") for medium in MEDIA}


def is_image(part: Any) -> bool:
    """Whether a part of content is an image or a video."""
    return isinstance(part, dict) and part.get("type") in MEDIA


def list_image_parts(messages: Iterable[Message]) -> list[Message]:
    """List the parts of messages that are images or videos, in order."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if isinstance(content, list) for part in content if is_image(part)]


def read_part(part: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the medium and the value of a part of content in any of the usual forms; None for a text.

    {type: image, image: …}, {type: image, url or path: …}, {type: image_url, image_url: {url}}, {type: input_image, …};
    likewise for videos.
    """
    for medium in MEDIA:
        if str(part.get("type")) in (medium, f"{medium}_url", f"input_{medium}"):
            names = (medium, f"{medium}_url", "url", "path")
            return medium, next((part[key] for key in names if part.get(key) is not None), "")
    return None


def place_images(messages: Sequence[Message], images: Sequence[str], videos: Sequence[str] = ()) -> list[Message]:
    """Put the images of a row where its texts say `<image>`, or, if none does, before the first question.

    `<image 2>` is the second image; videos likewise. BadRow (image) unless each image of the row has a place, and each
    place an image. Neighbouring texts of a message become one.
    """
    return _place(_place(messages, "image", images), "video", videos)


def _place(messages: Sequence[Message], medium: str, paths: Sequence[str]) -> list[Message]:
    def is_open(part: Message) -> bool:
        """Whether a part refers to an image that the row has elsewhere: {type: image} alone."""
        return part.get("type") == medium and not part[medium]

    marker = _MARKERS[medium]
    everywhere = [part for message in messages for part in _list_parts(message)]
    marks = sum(len(marker.findall(_get_text(part))) + is_open(part) for part in everywhere)
    named_paths = {part[medium] for part in everywhere if part.get("type") == medium and part[medium]}
    if not marks and (not paths or named_paths == set(paths)):
        return [_write(message, _list_parts(message)) for message in messages]
    if named_paths and paths:
        raise BadRow(f"the row has {len(paths)} {medium}s of its own, and others in its messages", REASON)
    if not marks:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise BadRow(f"the row has {len(paths)} {medium}s and no message of the user", REASON)
        images = [{"type": medium, medium: path} for path in paths]
        return [
            _write(message, [*images, *_list_parts(message)] if i == first else _list_parts(message))
            for i, message in enumerate(messages)
        ]
    waiting = list(paths)
    used: set[int] = set()

    def take(number: str | None) -> Message:
        index = len(used) if number is None else int(number) - 1
        if not 0 <= index < len(waiting):
            raise BadRow(f"the texts name {medium} {index + 1}, and the row has {len(paths)}", REASON)
        used.add(index)
        return {"type": medium, medium: waiting[index]}

    placed = []
    for message in messages:
        parts: list[Message] = []
        for part in _list_parts(message):
            if is_image(part):
                parts.append(take(None) if is_open(part) else part)
                continue
            text, end = _get_text(part), 0
            for mark in marker.finditer(text):
                parts += [{"type": "text", "text": text[end : mark.start()]}, take(mark[1])]
                end = mark.end()
            parts.append({"type": "text", "text": text[end:]})
        placed.append(_write(message, parts))
    if len(used) < len(paths):
        raise BadRow(f"the row has {len(paths)} {medium}s, and its texts have places for {len(used)}", REASON)
    return placed


def _list_parts(message: Message) -> list[Message]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _get_text(part: Message) -> str:
    return "" if is_image(part) else part.get("text") or ""


def _write(message: Message, parts: Sequence[Message]) -> Message:
    """Return the message with these parts, or with a text if there are no images. Neighbouring texts are joined."""
    joined: list[Message] = []
    for text, run in groupby(parts, key=lambda part: not is_image(part)):
        if not text:
            joined += run
        elif content := "".join(_get_text(part) for part in run):
            joined.append({"type": "text", "text": content})
    if not any(map(is_image, joined)):
        return (
            message if isinstance(message["content"], str) else message | {"content": "".join(map(_get_text, joined))}
        )
    return message | {"content": joined}


def show_images(messages: Sequence[Message], paths: Sequence[str]) -> list[Message]:
    """Put images before the text of the last user message, unless the messages already have images."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if not paths or last is None or any(is_image(part) for message in messages for part in _list_parts(message)):
        return list(messages)
    images = [{"type": "image", "image": path} for path in paths]
    return [
        _write(message, [*images, *_list_parts(message)]) if i == last else message
        for i, message in enumerate(messages)
    ]


def split_images(spans: Iterable[ImageSpan]) -> list[list[ImageSpan]]:
    """Group the spans of a sequence by image, in order: an image may occur twice, and have several spans."""
    images: list[list[ImageSpan]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if not span.first:
            images.append([])
        images[-1].append(span)
    return images


def describe_placeholders(spans: Iterable[ImageSpan]) -> str:
    """Say how many tokens stand for images, as the end of a sentence about tokens; empty without images."""
    count = sum(span.length for span in spans)
    return f", of which {count} stand for images (data.images.max_pixels makes these smaller)" if count else ""


def shift(position: int, moved: Sequence[tuple[int, int]]) -> int:
    """Return the position of a character after `Placeholders.expand`."""
    return position + sum(growth for end, growth in moved if end <= position)


def refuse_images(row: Mapping[str, Any]) -> None:
    """Raise BadRow for a row with images that its texts refer to: without them it would teach nonsense."""
    for medium, columns in (("image", COLUMNS), ("video", VIDEO_COLUMNS)):
        column = next((key for key in columns if row.get(key)), None)
        if column is not None and any(key in row and _MARKERS[medium].search(str(row[key])) for key in _TEXTS):
            raise BadRow(
                f"the row has {medium}s (under '{column}') and its text says `<{medium}>`, but this run reads text "
                "alone: set data.images: {}, for models that see",
                REASON,
            )
