"""The images and videos of a row: in its columns or in parts of messages, as paths, URLs, bytes or objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.images.image_files import ImageFiles
from coalign.data.images.placeholders import COLUMNS, VIDEO_COLUMNS, read_part
from coalign.data.images.videos import VideoFiles
from coalign.data.kinds import KINDS

_NUMBERED = re.compile(r"image_(\d+)")


class RowImages:
    """Replaces every image and every video in a row by the path of its file."""

    def __init__(self, files: ImageFiles) -> None:
        self.files, self.videos = files, VideoFiles(files)

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with paths for images and videos; those of its columns also as lists, `images` and `videos`.

        BadRow (image) for a value that is no image in any supported form.
        """
        row = {key: self.read_messages(value) for key, value in row.items()}
        return self._read_videos(self._read_images(row))

    def _read_videos(self, row: dict[str, Any]) -> dict[str, Any]:
        videos, single = (row.get(column) for column in VIDEO_COLUMNS)
        if videos is None:
            videos = [] if single is None else [single]
        paths = [self.videos.store(video) for video in (videos if isinstance(videos, list) else [videos])]
        return row | {"videos": paths} | ({} if single is None else {"video": paths[0]})

    def _read_images(self, row: dict[str, Any]) -> dict[str, Any]:
        numbered = sorted((int(match[1]), key) for key in row if (match := _NUMBERED.fullmatch(key)))
        column = next((key for key in COLUMNS if row.get(key) is not None), None)
        if column is not None:
            value = row[column]
            paths = [self.files.store(image) for image in (value if isinstance(value, list) else [value])]
            return row | {column: paths if isinstance(value, list) else paths[0], "images": paths}
        paths_by_key = {key: self.files.store(row[key]) for _, key in numbered if row[key] is not None}
        return row | paths_by_key | {"images": [*paths_by_key.values()]}

    def read_messages(self, value: Any) -> Any:
        """Return a value of any form with paths for the images in parts of messages."""
        if isinstance(value, list):
            return [self.read_messages(item) for item in value]
        if not isinstance(value, dict) or not isinstance(value.get("content"), list):
            return value
        return value | {"content": [self._read_part(part) for part in value["content"]]}

    def _read_part(self, part: Any) -> Any:
        if not isinstance(part, dict) or (medium_and_value := read_part(part)) is None:
            return part
        medium, value = medium_and_value
        files = self.files if medium == "image" else self.videos
        return {"type": medium, medium: files.store(value) if value else ""}


def check_images(config: RunConfig, kind: str, models: Mapping[str, ModelConfig]) -> None:
    """Refuse (ValueError) images where what would read them knows text alone. ``kind``: the rows of the run."""
    if not KINDS[kind].reads_images:
        raise ValueError(f"data.images: `{config.algorithm}` reads {kind}, which hold no images; leave it out")
    if config.sync.adapters == "apart":
        raise ValueError("sync.adapters is `apart`, which vLLM does not do for models that see here; use `merged`")
    for name, model in models.items():
        if model.cache:
            raise ValueError(f"models.{name}.cache: log-probs are kept by tokens alone; leave it out with data.images")
