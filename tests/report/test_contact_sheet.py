"""Pages with small pictures: of rows, and of the last samples of a run."""

import base64
import io
import json
import re

import pytest
from PIL import Image
from rich.text import Text

from coalign.report.contact_sheet import SIDE, _draw_thumbnail, link_image, write_contact_sheet, write_sample_sheet
from tests.vision import picture


def read_pictures(page):
    """The sizes of the pictures in a page."""
    found = re.findall(r"base64,([^\"]+)", page)
    return [Image.open(io.BytesIO(base64.b64decode(each))).size for each in found]


def test_a_page_has_texts_with_a_small_picture_above_each_link(tmp_path):
    large = picture(tmp_path / "a picture.png", (400, 200))
    text = Text("<b> & ").append(link_image(str(large), "⟪a⟫", "bold")).append(" 点?")
    page = write_contact_sheet([[Text("row 0"), text]], tmp_path / "page.html", "Rows").read_text(encoding="utf-8")
    assert read_pictures(page) == [(SIDE, SIDE // 2)]
    assert "&lt;b&gt; &amp; </span><img" in page and '">⟪a⟫</span>' in page and " 点?" in page
    assert page.count("<section>") == 1 and "http" not in page  # it needs nothing else


def test_a_video_is_some_of_its_frames_side_by_side(tmp_path):
    frames = [Image.open(picture(tmp_path / f"{number}.png", (24, 16), number)) for number in range(7)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=250, loop=0)
    assert Image.open(io.BytesIO(_draw_thumbnail(str(tmp_path / "a.gif")))).size == (4 * 24, 16)


@pytest.mark.parametrize(("name", "content"), [("gone.png", None), ("text.png", b"no image")])
def test_a_picture_that_is_none_is_named(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    write_contact_sheet([[link_image(str(tmp_path / name), "it")]], tmp_path / "page.html", "Rows")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not read_pictures(page) and "<em>" in page and name in page


def test_the_last_samples_with_images_of_a_run(tmp_path):
    path = str(picture(tmp_path / "a.png"))
    samples = [{"step": step, "phase": "train", "group": step, "prompt": f"p{step}", "response": f"r{step}"}
               | {"reward": 0.5, "images": [path] * (step % 2)} for step in range(60)]  # fmt: skip
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples) + '{"step": 60, "im')
    page = write_sample_sheet(tmp_path)
    assert page == tmp_path / "plots" / "images.html"
    text = page.read_text(encoding="utf-8")
    assert len(read_pictures(text)) == text.count("<section>") == 24
    assert "step 59, train: group 59, reward 0.5" in text and "r59" in text and "p58" not in text and "p11<" not in text


def test_a_run_without_images_has_no_page(tmp_path):
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "p", "response": "r"}) + "\n")
    assert write_sample_sheet(tmp_path) is None and not (tmp_path / "plots").exists()
