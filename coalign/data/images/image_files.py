"""Image files by content: every image of a row becomes a file with a hash and a size.

A row may name a file, or hold its bytes. Bytes are written once to a folder of Coalign's cache, under their hash. So
from here on an image is a path, and batches carry paths and hashes, never pixels.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

from coalign.data.images.decoder import DecodedPicture, UnreadablePicture, decode
from coalign.data.images.placeholders import REASON
from coalign.data.sources import BadRow
from coalign.files import find_cache, read_bounded, write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

NEEDS_PILLOW = "images are read with Pillow, which is not installed: pip install coalign[images]"
MAX_FILE_BYTES = 512 * 2**20
MAX_NAME = 300  # characters of a name in messages
MAX_JUDGED_PIXELS = 178_956_970  # Pillow's own limit


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that holds one image: its path, the sha256 of its bytes, and its width and height in pixels.

    ``frames`` of a video, and how many a second (``rate``), if the file says so; 0 frames for an image.
    """

    path: str
    sha256: str
    size: tuple[int, int]
    frames: int = 0
    rate: float | None = None

    @property
    def is_video(self) -> bool:
        return self.frames > 0


class FilesByContent(ABC):
    """Reads each file once, and again when it has changed. ``medium``: `image` or `video`."""

    medium: ClassVar[str]

    def __init__(self) -> None:
        self._files: dict[str, tuple[tuple[int, int], ImageFile]] = {}  # path -> ((time, bytes), file)

    @abstractmethod
    def _read(self, path: str) -> ImageFile:
        """Read a file. Raises OSError, and BadRow (image) for one that cannot be used."""

    def find(self, path: str) -> ImageFile:
        """Return the file at ``path``, which `store` returned. BadRow (image) for a file that cannot be used."""
        try:
            state = Path(path).stat()
            key = (state.st_mtime_ns, state.st_size)
            if (cached := self._files.get(path)) is None or cached[0] != key:
                cached = self._files[path] = key, self._read(path)
        except OSError as error:
            raise BadRow(f"the {self.medium} {path} cannot be read: {error.strerror or error}", REASON) from error
        return cached[1]


class ImageFiles(FilesByContent):
    """Finds the file of each image that rows name or hold.

    ``root``: the folder that relative paths start from. ``max_pixels``: limit of a file. ``folder``: where bytes are
    kept; None: in Coalign's cache.
    """

    medium = "image"

    def __init__(self, root: Path, max_pixels: int, folder: Path | None = None) -> None:
        super().__init__()
        self.root, self.max_pixels, self._folder = root, max_pixels, folder

    def store(self, value: Any) -> str:
        """Return the path of an image in a row: a path, a file or data URL, bytes, or {bytes, path} as `datasets` has.

        BadRow (image) for anything else.
        """
        if isinstance(value, Mapping):
            inner = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
            if inner is None or isinstance(inner, Mapping):
                raise BadRow(
                    f"an image is an object with {', '.join(value) or 'nothing'}, and no bytes or path", REASON
                )
            return self.store(inner)
        if isinstance(value, bytes):
            return self._keep(value)
        if not isinstance(value, str) or not value:
            raise BadRow(f"an image is {type(value).__name__}; expected a path, a data URL or bytes", REASON)
        if value.startswith("data:"):
            return self._keep(_decode_data_url(value))
        if "://" in value[:16] or value.startswith("file:"):
            return self._find_path(_read_file_url(value))
        return self._find_path(value)

    def _read(self, path: str) -> ImageFile:
        content = read_content(path)
        size = _measure_image(content, path, self.max_pixels)
        return ImageFile(path, hashlib.sha256(content).hexdigest(), size)

    def _find_path(self, name: str) -> str:
        path = (self.root / name).absolute()
        if why := _find_fault(path):
            raise BadRow(
                f"the image {name[:MAX_NAME]} {why} (looked for as {str(path)[:MAX_NAME]}; data.images.root says where "
                "to)",
                REASON,
            )
        return str(path)

    def _keep(self, content: bytes) -> str:
        path = (self._folder or find_cache() / "images") / hashlib.sha256(content).hexdigest()
        if not path.is_file() or path.stat().st_size != len(content):
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(path) as aside:
                aside.write_bytes(content)
        return str(path)


def write_data_url(path: str) -> str:
    """Return the image at ``path`` as a data URL. OSError for an unreadable file, BadRow (image) for no image."""
    content = read_content(path)
    media_type = _decode(content, path, MAX_JUDGED_PIXELS, has_pixels=False).media_type or "application/octet-stream"
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def read_content(path: str) -> bytes:
    """Return the bytes of an image's file. OSError if it cannot be read, BadRow (image) for one that is too long."""
    try:
        return read_bounded(path, MAX_FILE_BYTES)
    except ValueError as error:
        raise BadRow(f"the image {error}", REASON) from error


def open_image(content: bytes, path: str, max_pixels: int) -> Image:
    """Decode an image in full, as RGB and turned as its EXIF data says. BadRow (image), with the path, if it cannot be.

    A file that says it has more than ``max_pixels`` is refused before anything is decoded.
    """
    return next(_decode(content, path, max_pixels).images())


def _measure_image(content: bytes, path: str, max_pixels: int) -> tuple[int, int]:
    """Return the width and height that `open_image` gives an image, which is decoded in full. BadRow (image)."""
    return _decode(content, path, max_pixels, has_pixels=False).sizes[0]


def open_frames(content: bytes, path: str, max_pixels: int) -> tuple[list[Image], float | None]:
    """Decode all frames of an animated picture, as `open_image` decodes one; how many a second, if it says so.

    The limit ``max_pixels`` is that of all frames together.
    """
    decoded = _decode(content, path, max_pixels, is_video=True)
    return list(decoded.images()), decoded.rate


def measure_frames(content: bytes, path: str, max_pixels: int) -> tuple[list[tuple[int, int]], float | None]:
    """Return the sizes of the frames that `open_frames` gives, all of which are decoded, and their rate."""
    decoded = _decode(content, path, max_pixels, is_video=True, has_pixels=False)
    return decoded.sizes, decoded.rate


def _decode(
    content: bytes, path: str, max_pixels: int, *, is_video: bool = False, has_pixels: bool = True
) -> DecodedPicture:
    if find_spec("PIL") is None:
        raise ImportError(NEEDS_PILLOW)
    try:
        return decode(content, path, max_pixels, is_video=is_video, has_pixels=has_pixels)
    except UnreadablePicture as error:
        raise BadRow(str(error), REASON) from error


def _decode_data_url(url: str) -> bytes:
    header, comma, content = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise BadRow(f"an image is a data URL without base64: {url[:40]!r}", REASON)
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(f"an image is a data URL whose base64 is damaged ({error}): {url[:40]!r}", REASON) from error


def _find_fault(path: Path) -> str:
    """Say why a path is no regular file; empty if it is one."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:  # a name that is too long, no right to look, a loop of links
        return f"cannot be read: {error.strerror}"
    except ValueError:  # a null character
        return "does not exist"
    if stat.S_ISREG(mode):
        return ""
    return "is a directory" if stat.S_ISDIR(mode) else "is no regular file"


def _read_file_url(url: str) -> str:
    try:
        address = urlsplit(url)
    except ValueError as error:
        raise BadRow(f"the image {url[:80]!r} is no URL: {error}", REASON) from error
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return unquote(address.path)
    what = "names another host" if address.scheme == "file" else f"is a URL of the kind `{address.scheme}`"
    raise BadRow(f"the image {url[:80]} {what}: nothing is fetched; download the image and name its file", REASON)
