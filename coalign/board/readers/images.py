"""Decides which files are sent as the images of samples: those that begin as an image does, and that browsers show."""

from __future__ import annotations

from pathlib import Path

_LARGEST = 32 * 2**20  # bytes
# Of formats that hold no program; SVG may.
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


def find_media_type(path: Path) -> str:
    """Return the media type of an image. FileNotFoundError without a file, ValueError for one that is no image.

    samples.jsonl names files anywhere on the machine that trained. Whoever wrote it must not be able to have the board
    send other files. Names say nothing: images that were in a data file are kept by their hash.
    """
    if not path.is_file():
        raise FileNotFoundError(f"the image {path} is not on this machine")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"the image {path} has more than {_LARGEST // 2**20} MiB")
    with open(path, "rb") as file:
        head = file.read(12)
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "image/webp"
    for signature, media_type in _SIGNATURES.items():
        if head.startswith(signature):
            return media_type
    raise ValueError(f"{path} is no image of a kind that browsers show (PNG, JPEG, GIF, WebP, BMP)")
