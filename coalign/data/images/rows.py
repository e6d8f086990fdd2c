"""The images of a row: in its columns or in parts of messages, as paths, URLs, bytes or objects of `datasets`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from coalign.data.images.files import REASON, ImageFiles, write_data_url
from coalign.data.images.placeholders import MARKER, is_image, read_part
from coalign.data.sources import BadRow

COLUMNS = ("images", "image")  # of most sets; MMMU has image_1, image_2, …
_NUMBERED = re.compile(r"image_(\d+)")
_TEXTS = ("messages", "conversations", "prompt", "problem", "question", "instruction")  # where `<image>` may stand


class RowImages:
    """Replaces every image in a row by the path of its file."""

    def __init__(self, files: ImageFiles) -> None:
        self.files = files

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with paths for images, those of its columns also as a list under `images`.

        BadRow (image) for what is no image of any known form.
        """
        row = {key: self.read_messages(value) for key, value in row.items()}
        numbered = sorted((int(found[1]), key) for key in row if (found := _NUMBERED.fullmatch(key)))
        column = next((key for key in COLUMNS if row.get(key) is not None), None)
        if column is not None:
            value = row[column]
            paths = [self.files.store(each) for each in (value if isinstance(value, list) else [value])]
            return row | {column: paths if isinstance(value, list) else paths[0], "images": paths}
        found = {key: self.files.store(row[key]) for _, key in numbered if row[key] is not None}
        return row | found | {"images": [*found.values()]}

    def read_messages(self, value: Any) -> Any:
        """Return a value of any form with paths for the images in parts of messages."""
        if isinstance(value, list):
            return [self.read_messages(item) for item in value]
        if not isinstance(value, dict) or not isinstance(value.get("content"), list):
            return value
        return value | {"content": [self._read_part(part) for part in value["content"]]}

    def _read_part(self, part: Any) -> Any:
        if not isinstance(part, dict) or (image := read_part(part)) is None:
            return part
        return {"type": "image", "image": self.files.store(image) if image else ""}


def send_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API takes them, with the content of each image. OSError for a file that is gone."""
    return [dict(message) | {"content": _send_parts(message.get("content"))} for message in messages]


def _send_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": {"url": write_data_url(part["image"])}} if is_image(part) else part
        for part in content
    ]


def refuse_images(row: Mapping[str, Any]) -> None:
    """Raise BadRow for a row of images and texts that say where they belong: without them it would teach nonsense."""
    column = next((key for key in COLUMNS if row.get(key)), None)
    if column is not None and any(key in row and MARKER.search(str(row[key])) for key in _TEXTS):
        raise BadRow(
            f"the row has images (under '{column}') and its text says `<image>`, but this run reads text alone: set "
            "data.images: {}, for models that see",
            REASON,
        )
