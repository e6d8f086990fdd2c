"""Writes texts and the images that they name as one HTML page, which needs no other file: a contact sheet.

`coalign inspect-data --thumbnails` writes one of rows, a run with images one of its last samples.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.console import Console
from rich.style import Style
from rich.text import Text

from coalign.config.schema import ImagesConfig
from coalign.data.images.image_files import read_content
from coalign.data.images.videos import read_frames
from coalign.data.sources import BadRow
from coalign.run_files.records import name_group, parse_record, read_end

SIDE = 192  # pixels of a thumbnail's longer side
FRAMES = 4  # shown per video
SAMPLES = 24
BYTES = 4 * 2**20  # read from the end of samples.jsonl
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
section {{ border-top: 1px solid #ccc; padding: 1rem 0 }}
pre {{ font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.4rem 0 }}
img {{ display: block; margin: 0.4rem 0; border: 1px solid #ccc }}
</style>
<h1>{title}</h1>
{body}
"""


def link_image(path: str, text: str, style: str = "") -> Text:
    """Return ``text`` with a link to the image, which a contact sheet shows above it."""
    return Text(text, style=Style.parse(style) + Style(link=Path(path).absolute().as_uri()))


def write_contact_sheet(rows: Iterable[Sequence[Text]], path: Path, title: str) -> Path:
    """Write a page with a section for each row of texts, and a thumbnail above each `link_image`; return ``path``."""
    sections = ["".join(f"<pre>{''.join(_write_segments(text))}</pre>" for text in texts) for texts in rows]
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    path.write_text(PAGE.format(title=html.escape(title), body=body), encoding="utf-8")
    return path


def write_sample_sheet(run: Path) -> Path | None:
    """Write `plots/images.html` with the last samples of a run that have images; None if none has."""
    records = filter(None, map(parse_record, read_end(run / "samples.jsonl", BYTES).splitlines()))
    samples = [record for record in records if record.get("images")][-SAMPLES:]
    if not samples:
        return None
    folder = run / "plots"
    folder.mkdir(exist_ok=True)
    return write_contact_sheet(map(_describe_sample, samples), folder / "images.html", f"Last samples of {run.name}")


def _describe_sample(record: Mapping[str, Any]) -> list[Text]:
    reward = record.get("reward")
    what = "" if reward is None else f", reward {reward:g}"
    return [
        Text(f"step {record['step']}, {record.get('phase')}: {name_group(record.get('group'))}{what}", style="bold"),
        *(link_image(path, path) for path in record["images"]),
        Text(str(record.get("prompt"))),
        Text(str(record.get("response")), style="bold green"),
    ]


def _write_segments(text: Text) -> Iterator[str]:
    for segment in Text().append(text).render(Console(file=io.StringIO())):  # so that the style of all of it counts
        style = segment.style or Style()
        if style.link is not None:
            yield _write_picture(unquote(urlsplit(style.link).path))
        yield f'<span style="{style.get_html_style()}">{html.escape(segment.text)}</span>'


@lru_cache(maxsize=SAMPLES)  # samples of a group have the same
def _write_picture(path: str) -> str:
    try:
        content = _draw_thumbnail(path)
    except (OSError, BadRow) as error:
        return f"<em>{html.escape(str(error))}</em>\n"
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(content).decode()}">'


def _draw_thumbnail(path: str) -> bytes:
    """Return a small PNG of an image; of a video, some of its frames side by side.

    OSError for a file that cannot be read, BadRow (image) for one that holds no image.
    """
    from PIL import Image

    frames, _ = read_frames(read_content(path), path, ImagesConfig().max_file_pixels)
    shown = frames[:: -(-len(frames) // FRAMES)]
    for frame in shown:
        frame.thumbnail((SIDE, SIDE))
    width = max(frame.width for frame in shown)
    strip = Image.new("RGB", (width * len(shown), max(frame.height for frame in shown)), "white")
    for number, frame in enumerate(shown):
        strip.paste(frame, (number * width, 0))
    file = io.BytesIO()
    strip.save(file, format="PNG")
    return file.getvalue()
