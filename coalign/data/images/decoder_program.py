"""The program of a process that decodes pictures. `decoder.py` is the parent's end.

It imports Pillow and nothing of Coalign, so that it starts in a fraction of a second. A message in either direction is
a length in eight bytes, a JSON object of so many bytes, and what the object announces as `bytes`: the file's content in
a request, RGB pixels in an answer. An answer has `problem` in place of pixels if the file cannot be used.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

# Rasters that Pillow decodes by itself. For EPS it starts Ghostscript, which runs the program in the file.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "JPEG2000", "AVIF", "PPM", "ICO", "QOI")
_BASE_BYTES, _PIXEL_BYTES = 512 * 2**20, 48  # memory for the process, and for each pixel of the largest picture


class _UnusablePicture(Exception):
    """A file cannot be used; the text says why."""


def decode(request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return the sizes, the rate (frames a second) and the media type of a picture, and the pixels of its frames."""
    image = Image.open(io.BytesIO(content), formats=[name for name in FORMATS if name in Image.OPEN])
    name, max_pixels = request["name"], request["max_pixels"]
    if (pixels := image.width * image.height) > max_pixels:
        raise _UnusablePicture(f"the image {name} says that it has {image.width} x {image.height} {_limit(max_pixels)}")
    count = getattr(image, "n_frames", 1)
    if count > 1 and not request["is_video"]:
        raise _UnusablePicture(f"the image {name} is animated ({count} frames); expected a single picture")
    if count * pixels > max_pixels:
        raise _UnusablePicture(f"the {count} frames of {name} have {count * pixels:,} {_limit(max_pixels)}")
    sizes, frames, milliseconds = [], [], 0.0
    for number in range(count):
        image.seek(number)
        image.load()
        frame = ImageOps.exif_transpose(_to_rgb(image))
        sizes.append(frame.size)
        if request["has_pixels"]:
            frames.append(frame.tobytes())
        milliseconds += image.info.get("duration") or 0.0
    rate = 1000 * count / milliseconds if milliseconds else None
    return {"sizes": sizes, "rate": rate, "media_type": image.get_format_mimetype()}, frames


def _limit(max_pixels: int) -> str:
    return f"pixels; data.images.max_file_pixels is {max_pixels:,}"


def _to_rgb(image: Image.Image) -> Image.Image:
    """Transparent places become white; CMYK, grey and palettes are converted."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def answer(request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return what `decode` returns, or the problem of a file that cannot be used."""
    name = request["name"]
    try:
        return decode(request, content)
    except _UnusablePicture as error:
        problem = str(error)
    except UnidentifiedImageError:
        problem = f"{name} is no image that Pillow can read ({', '.join(FORMATS)})"
    except Image.DecompressionBombError as error:
        problem = f"the image {name} is a decompression bomb: {error}"
    except MemoryError:
        problem = f"the image {name} needs more memory than the decoder may use"
    except Exception as error:  # Pillow's plug-ins raise whatever they stumble over
        problem = f"the image {name} is damaged: {str(error) or type(error).__name__}"
    return {"problem": problem[:2000]}, []


def _limit_process(request: dict[str, Any]) -> None:
    """Limit memory and processor time of what follows; see `main` for the others."""
    memory = _BASE_BYTES + _PIXEL_BYTES * request["max_pixels"]
    seconds = int(time.process_time()) + request["seconds"]
    for limit, value in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CPU, seconds)):
        with suppress(ValueError, OSError):  # the machine's limit is lower
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def main() -> None:
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # the limits of pixels are ours
    Image.init()
    connection = socket.socket(fileno=int(sys.argv[1]))
    stream = connection.makefile("rb", buffering=2**16)
    while head := stream.read(8):
        request = json.loads(_read(stream, int.from_bytes(head)))
        _limit_process(request)
        header, frames = answer(request, _read(stream, request["bytes"]))
        text = json.dumps(header | {"bytes": sum(map(len, frames))}).encode()
        for piece in (len(text).to_bytes(8) + text, *frames):
            connection.sendall(piece)
        del header, frames, text


def _read(stream: Any, size: int) -> bytes:
    if len(content := stream.read(size)) < size:
        os._exit(0)  # the parent has gone
    return content


if __name__ == "__main__":
    main()
