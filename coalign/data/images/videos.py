"""Videos as frames: a list of images, a folder of images, or an animated picture. No video is decoded.

Every video of a row becomes one file: the animated picture, or a list of its frames with their hashes, which is written
once to Coalign's cache. So a video is a path and a hash, as an image is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.data.images.image_files import (
    FilesByContent,
    ImageFile,
    ImageFiles,
    measure_frames,
    open_frames,
    open_image,
    read_content,
)
from coalign.data.images.placeholders import REASON
from coalign.data.sources import BadRow
from coalign.files import describe_problem, find_cache, write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

LIST = ".frames"  # suffix of a list of frames
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
RECORDINGS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts")


class VideoFiles(FilesByContent):
    """Finds the file of each video that rows name or hold."""

    medium = "video"

    def __init__(self, images: ImageFiles) -> None:
        super().__init__()
        self.images = images

    def store(self, value: Any) -> str:
        """Return the path of a video in a row: a list of frames, a folder, or an animated picture (path, URL or bytes).

        BadRow (image) for anything else.
        """
        if isinstance(value, list):
            return self._store_list([self.images.store(frame) for frame in value])
        if isinstance(value, Mapping):
            inner = next((value[key] for key in ("frames", "bytes", "path", "url") if value.get(key) is not None), None)
            if inner is None:
                raise BadRow(
                    f"a video is an object with {', '.join(value) or 'nothing'}, and no frames or path", REASON
                )
            return self.store(inner)
        if isinstance(value, str) and Path(value).suffix.lower() in RECORDINGS:
            raise BadRow(
                f"the video {value} has to be decoded, which Coalign does not: write its frames to a folder (ffmpeg -i "
                f"{Path(value).name} -vf fps=2 frames/%05d.png) and name the folder",
                REASON,
            )
        if isinstance(value, str) and "://" not in value[:16] and os.path.isdir(folder := self.images.root / value):
            return self._store_list([str(path.absolute()) for path in _list_pictures(folder)])
        return self.images.store(value)

    def _read(self, path: str) -> ImageFile:
        content = read_content(path)
        if path.endswith(LIST):
            frames, rate = [self._find_frame(*frame).size for frame in _read_list(content, path)], None
        else:
            frames, rate = measure_frames(content, path, self.images.max_pixels)
        sizes = set(frames)
        if len(frames) < 2 or len(sizes) > 1:
            what = f"frames of {len(sizes)} sizes" if len(sizes) > 1 else f"{len(frames)} frame"
            raise BadRow(f"the video {path} has {what}; expected a list or folder of frames, all of one size", REASON)
        return ImageFile(path, hashlib.sha256(content).hexdigest(), sizes.pop(), len(frames), rate)

    def _find_frame(self, path: str, digest: str) -> ImageFile:
        frame = self.images.find(path)
        _check_frame(path, frame.sha256, digest)
        return frame

    def _store_list(self, paths: list[str]) -> str:
        if not paths:
            raise BadRow("a video has no frames", REASON)
        content = json.dumps([[path, self.images.find(path).sha256] for path in paths]).encode()
        file = find_cache() / "images" / (hashlib.sha256(content).hexdigest() + LIST)
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(file) as aside:
                aside.write_bytes(content)
        return str(file)


def read_frames(content: bytes, path: str, max_pixels: int) -> tuple[list[Image], float | None]:
    """Decode the frames of a video file with this content, as RGB; the rate if the file says one.

    BadRow (image), with the path, for a frame that is gone, has changed, or is damaged.
    """
    if not path.endswith(LIST):
        return open_frames(content, path, max_pixels)
    frames = []
    for frame, digest in _read_list(content, path):
        try:
            picture = read_content(frame)
        except OSError as error:
            raise BadRow(f"the frame {frame} cannot be read: {error.strerror or error}", REASON) from error
        _check_frame(frame, hashlib.sha256(picture).hexdigest(), digest)
        frames.append(open_image(picture, frame, max_pixels))
    return frames, None


def _check_frame(path: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise BadRow(f"the frame {path} has changed since the data were read", REASON)


def _read_list(content: bytes, path: str) -> list[tuple[str, str]]:
    """Return path and SHA-256 of each frame. BadRow (image) for a file that `VideoFiles.store` has not written."""
    try:
        frames = [(frame, digest) for frame, digest in json.loads(content)]
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRow(f"the video {path} is no list of frames: {describe_problem(error)}", REASON) from error
    if not all(isinstance(text, str) and "\0" not in text for frame in frames for text in frame):
        raise BadRow(f"the video {path} is no list of frames: expected pairs of a path and a hash", REASON)
    return frames


def _list_pictures(folder: Path) -> list[Path]:
    """The pictures in a folder, 2 before 10."""

    def key(path: Path) -> list[Any]:
        return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", path.name)]

    try:
        return sorted((path for path in folder.iterdir() if path.suffix.lower() in PICTURES), key=key)
    except OSError as error:
        raise BadRow(f"the video {folder} cannot be read: {error.strerror}", REASON) from error
