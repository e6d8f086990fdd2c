"""Finds the image files of a sample. Only what samples.jsonl lists is served, and only what is an image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coalign.board.readers.records import read_integer
from coalign.board.readers.samples import read_sample

LARGEST = 32 * 2**20  # bytes
# Of formats that hold no program; SVG may.
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def find_image(folder: Path, params: Mapping[str, str]) -> tuple[Path, str]:
    """Return the file of the `image` (counted from 0) of the sample `number`, and its media type.

    FileNotFoundError if the sample lists no such image, or its file is gone; ValueError if the file is no image.
    """
    sample, number = read_sample(folder, params), read_integer(params, "image")
    listed = sample.get("images") or []
    if number >= len(listed):
        raise FileNotFoundError(f"sample {sample['number']} lists {len(listed)} images; there is no image {number}")
    path = folder / str(listed[number])  # an absolute path stays one
    if not path.is_file():
        raise FileNotFoundError(f"the image {listed[number]} is not on this machine")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"the image {listed[number]} has more than {LARGEST // 2**20} MiB")
    with open(path, "rb") as file:
        head = file.read(16)
    for signature, media_type in _SIGNATURES:
        if head.startswith(signature):
            return path, media_type
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return path, "image/webp"
    raise ValueError(f"{listed[number]} is no image of a kind that browsers show (PNG, JPEG, GIF, WebP, BMP)")
