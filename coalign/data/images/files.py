"""Image files by content: what a row calls an image becomes a file whose hash and size are known.

A row may name a file, or hold its bytes. Bytes are written once to a folder of Coalign's cache, under their hash. So
from here on an image is a path, and batches carry paths and hashes, never pixels.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

from coalign.data.sources import BadRow
from coalign.files import find_cache, write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

REASON = "image"  # of BadRow: the policy `data.bad_rows`
NEEDS_PILLOW = "images are read with Pillow, which is not installed: pip install coalign[images]"


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
    """Reads each file once, and again when it has changed. ``kind``: what the files are, in messages."""

    kind: ClassVar[str]

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], ImageFile]] = {}  # path -> (time and bytes, what is there)

    @abstractmethod
    def _read(self, path: str) -> ImageFile:
        """Read a file. Raises OSError, and BadRow (image) for one that cannot be used."""

    def find(self, path: str) -> ImageFile:
        """Return what is at ``path``, which `store` returned. BadRow (image) for a file that cannot be used."""
        try:
            state = Path(path).stat()
            key = (state.st_mtime_ns, state.st_size)
            if (known := self._known.get(path)) is None or known[0] != key:
                known = self._known[path] = key, self._read(path)
        except OSError as error:
            raise BadRow(f"the {self.kind} {path} cannot be read: {error.strerror or error}", REASON) from error
        return known[1]


class ImageFiles(FilesByContent):
    """Finds the file of each image that rows name or hold.

    ``root``: the folder that relative paths start from. ``most_pixels`` of a file. ``folder``: where bytes are kept;
    None: in Coalign's cache.
    """

    kind = "image"

    def __init__(self, root: Path, most_pixels: int, folder: Path | None = None) -> None:
        super().__init__()
        self.root, self.most_pixels, self._folder = root, most_pixels, folder

    def store(self, value: Any) -> str:
        """Return the path of an image in a row: a path, a file or data URL, bytes, or {bytes, path} as `datasets` has.

        BadRow (image) for anything else.
        """
        if isinstance(value, Mapping):
            inner = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
            if inner is None:
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
        content = Path(path).read_bytes()
        image = open_image(content, path, self.most_pixels)
        return ImageFile(path, hashlib.sha256(content).hexdigest(), image.size)

    def _find_path(self, name: str) -> str:
        path = (self.root / name).absolute()
        if not path.is_file():
            why = "is a directory" if path.is_dir() else "does not exist"
            raise BadRow(f"the image {name} {why} (looked for as {path}; data.images.root says where to)", REASON)
        return str(path)

    def _keep(self, content: bytes) -> str:
        path = (self._folder or find_cache() / "images") / hashlib.sha256(content).hexdigest()
        if not path.is_file() or path.stat().st_size != len(content):
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(path) as aside:
                aside.write_bytes(content)
        return str(path)


def write_data_url(path: str) -> str:
    """Return the image at ``path`` as a data URL. OSError for a file that cannot be read."""
    from PIL import Image

    content = Path(path).read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        kind = image.get_format_mimetype() or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def open_image(content: bytes, path: str, most_pixels: int) -> Image:
    """Decode an image in full, as RGB and turned as its EXIF data says. BadRow (image), with the path, if it cannot be.

    A file that says it has more than ``most_pixels`` is refused before anything is decoded.
    """
    with _opened(content, path, most_pixels) as image:
        if (frames := getattr(image, "n_frames", 1)) > 1:
            raise BadRow(f"the image {path} is animated ({frames} frames); expected a single picture", REASON)
        return _read_picture(image)


def open_frames(content: bytes, path: str, most_pixels: int) -> tuple[list[Image], float | None]:
    """Decode all frames of an animated picture, as `open_image` decodes one; how many a second, if it says so.

    The limit ``most_pixels`` is that of all frames together.
    """
    with _opened(content, path, most_pixels) as image:
        count = getattr(image, "n_frames", 1)
        if (pixels := image.width * image.height * count) > most_pixels:
            limit = f"{pixels:,} pixels; data.images.max_file_pixels is {most_pixels:,}"
            raise BadRow(f"the {count} frames of {path} have {limit}", REASON)
        frames, milliseconds = [], 0.0
        for number in range(count):
            image.seek(number)
            frames.append(_read_picture(image))
            milliseconds += image.info.get("duration") or 0.0
        return frames, 1000 * count / milliseconds if milliseconds else None


def _read_picture(image: Image) -> Image:
    from PIL import ImageOps

    image.load()
    return ImageOps.exif_transpose(_to_rgb(image))


@contextmanager
def _opened(content: bytes, path: str, most_pixels: int) -> Iterator[Image]:
    """Open an image, of which nothing is decoded yet. What its decoding raises becomes a BadRow (image)."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(NEEDS_PILLOW) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours
            image = Image.open(io.BytesIO(content))
            width, height = image.size
            if width * height > most_pixels:
                limit = f"{width} x {height} pixels; data.images.max_file_pixels is {most_pixels:,}"
                raise BadRow(f"the image {path} says that it has {limit}", REASON)
            yield image
    except UnidentifiedImageError as error:
        raise BadRow(f"{path} is no image that Pillow can read", REASON) from error
    except Image.DecompressionBombError as error:
        raise BadRow(f"the image {path} is a decompression bomb: {error}", REASON) from error
    except BadRow:
        raise
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # Pillow's, for damaged files
        raise BadRow(f"the image {path} is damaged: {error}", REASON) from error


def _to_rgb(image: Image) -> Image:
    """Transparent places become white; CMYK, grey and palettes are converted."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        from PIL import Image as module

        image = image.convert("RGBA")
        return module.alpha_composite(module.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _decode_data_url(url: str) -> bytes:
    header, comma, content = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise BadRow(f"an image is a data URL without base64: {url[:40]!r}", REASON)
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(f"an image is a data URL whose base64 is damaged ({error}): {url[:40]!r}", REASON) from error


def _read_file_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return unquote(parts.path)
    what = "names another host" if parts.scheme == "file" else f"is a URL of the kind `{parts.scheme}`"
    raise BadRow(f"the image {url[:80]} {what}: nothing is fetched; download the image and name its file", REASON)
