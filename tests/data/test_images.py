"""Rows with images: what becomes of columns, parts, placeholders, and of files that cannot be used."""

from __future__ import annotations

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from coalign.config.schema import DataConfig, ImagesConfig
from coalign.data.batch import Batch, _pack_rows_with_images
from coalign.data.examples import RowLimit
from coalign.data.images.image_files import ImageFiles
from coalign.data.images.pixels import PixelCache
from coalign.data.images.placeholders import place_images
from coalign.data.images.processor import ImageProcessor
from coalign.data.loader import Loader, build_loader
from coalign.data.sources import BadRow
from coalign.types import ImageSpan
from tests.vision import ID, picture, vision_model_dir

IMAGE = ID["<|image_pad|>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vision_model_dir(tmp_path_factory.mktemp("models") / "model", weights=False)


@pytest.fixture
def load(tmp_path, model, monkeypatch):
    """Build the loader of rows, whose file stands beside a.png (6 features) and b.png (10)."""
    monkeypatch.setenv("COALIGN_CACHE", str(tmp_path / "cache"))
    picture(tmp_path / "a.png"), picture(tmp_path / "b.png", (40, 20), 1)

    def build(*rows: dict[str, Any], kind: str = "prompts", limits: Any = (), **config: Any) -> Loader:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        data = DataConfig(**{"train": [{"path": str(path)}], "images": ImagesConfig(), "shuffle": False, **config})
        tokenizer = AutoTokenizer.from_pretrained(model)
        return build_loader(data, tokenizer, kind=kind, split="train", batch_size=len(rows), seed=0, limits=limits)

    return build


def names(batch: Batch, row: int = 0) -> list[tuple[str, int]]:
    """Name and features of each image of a sequence; its spans are checked to be its placeholders."""
    tokens, spans = batch.select([row])["tokens"].tolist(), batch["images"][row]
    assert [t for t, token in enumerate(tokens) if token == IMAGE] == [t for s in spans for t in range(s.start, s.stop)]
    return [(Path(span.path).name, span.length) for span in spans]


A, B = ("a.png", 6), ("b.png", 10)
USER = {"role": "user"}
FORMS = {
    "LLaVA": ({"prompt": "<image>\nWhat?", "image": "a.png"}, [A]),
    "Geometry3K": ({"problem": "<image>Find x.", "images": ["a.png"], "answer": "3"}, [A]),
    "MMMU": ({"question": "<image 2> or <image 1>?", "image_1": "a.png", "image_2": "b.png", "answer": "A"}, [B, A]),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "See <image>"}, {"from": "gpt", "value": "I do"}],
                  "image": "a.png"}, [A]),
    "without a placeholder": ({"prompt": "What?", "images": ["a.png", "b.png"]}, [A, B]),
    "OpenAI": ({"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "a.png"}},
                                                 {"type": "text", "text": "What?"}]}]}, [A]),
    "parts without images": ({"messages": [USER | {"content": [{"type": "text", "text": "Is"}, {"type": "image"}]}],
                              "images": ["b.png"]}, [B]),
    "later turns": ({"messages": [USER | {"content": "<image>?"}, {"role": "assistant", "content": "Yes."},
                                  USER | {"content": "And <image>?"}], "images": ["b.png", "a.png"]}, [B, A]),
    "none": ({"prompt": "What?"}, []),
    "a placeholder's token in a text": ({"prompt": "<|image_pad|> <image>", "images": ["a.png"]}, [A]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_images_of_a_row_stand_where_it_says(form, load):
    row, expected = FORMS[form]
    assert names(load(row).next()) == expected


def test_a_row_with_more_patches_than_a_model_takes_at_once(load):
    rows = {"prompt": "<image>", "images": ["a.png"]}, {"prompt": "<image><image>", "images": ["b.png", "a.png"]}
    limits = [RowLimit(4 * (6 + 10) - 1, "models.trainer.max_patches_per_micro", "patches")]
    assert load(*rows, limits=limits).report().startswith("rows.jsonl: 2 rows: 1 used, 1 over ")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: images of 64 patches, and 63 .*trainer\.max_patches_per_m"):
        load(*rows, limits=limits, on_long="error")


def test_files_urls_and_bytes_are_the_same_image(load, tmp_path):
    content = (tmp_path / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    ways = ["a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri(), url, {"path": "a.png", "bytes": None}]
    rows = [{"prompt": "<image>", "images": [way]} for way in ways]
    batch = load(*rows).next()
    assert len({spans[0].image for spans in batch["images"]}) == 1
    # Nothing but a reference is left in the batch.
    assert all(isinstance(row["images"][0], str) and len(json.dumps(row)) < 1024 for row in batch["rows"])
    files = ImageFiles(tmp_path, 10**6)
    for value in (content, {"bytes": content, "path": None}):  # parquet and `datasets`
        assert files.find(files.store(value)).sha256 == batch["images"][0][0].image
    table = pa.Table.from_pylist([{"prompt": "<image>", "images": [{"bytes": content, "path": "somewhere.png"}]}])
    pq.write_table(table, tmp_path / "rows.parquet")
    [span] = load(*rows, train=[{"path": str(tmp_path / "rows.parquet")}]).next()["images"][0]
    assert span.image == batch["images"][0][0].image
    small = load({"prompt": "<image>", "images": ["b.png"]}, images=ImagesConfig(max_pixels=300)).next()
    assert names(small) == [("b.png", 6)]  # scaled down


def test_a_conversation_does_not_learn_placeholders(load):
    row = {"messages": [USER | {"content": "<image>?"}, {"role": "assistant", "content": "Yes."}], "images": ["a.png"]}
    for train_on in ("assistant", "all"):
        batch = load(row, kind="conversations", train_on=train_on).next()
        assert names(batch) == [A] and not batch["loss_mask"][batch["tokens"] == IMAGE].any()


def test_responses_share_a_prompt_with_its_images(load):
    row = {"prompt": "<image>?", "images": ["a.png"], "chosen": "yes", "rejected": "no"}
    batch = load(row, kind="preferences").next()
    assert names(batch, 0) == names(batch, 1) == [A]
    assert batch["images"][0] == batch["images"][1] and int(batch["prompt_length"][0]) > batch["images"][0][0].stop


def test_the_cache_keeps_where_images_stand(load, tmp_path):
    row = {"prompt": "<image>?", "images": ["a.png"]}
    plain = load(row).next()
    for _ in range(2):
        cached = load(row, cache=str(tmp_path / "tokens")).next()
        assert cached["images"] == plain["images"] and cached["rows"] == plain["rows"]


def test_a_prompt_is_cut_between_images_and_not_within(load):
    rows = {"prompt": "0123456789<image>?", "images": ["a.png"]}
    whole = load(rows).next()
    limit = whole.tokens_total - 12
    cut = load(rows, on_long="truncate_left", max_prompt_tokens=limit).next()
    assert names(cut) == [A] and cut["images"][0][0].start == whole["images"][0][0].start - 12
    inside = whole.tokens_total - whole["images"][0][0].start - 3
    with pytest.raises(ValueError, match=r"no usable rows .*1 over"):
        load(rows, on_long="truncate_left", max_prompt_tokens=inside)


def bomb(side: int) -> bytes:
    """A PNG of so many rows and columns in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = side.to_bytes(4, "big") * 2
    head = chunk(b"IHDR", size + bytes([8, 0, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")


def animation() -> bytes:
    out = io.BytesIO()
    frames = [Image.new("L", (8, 8), color) for color in (0, 255)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


def truncated() -> bytes:
    out = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(out, "JPEG")
    return out.getvalue()[:-500]


# what bad.png holds, or a name -> what is said of it
FAULTS: list[tuple[bytes | str, str]] = [
    ("none.png", r"none\.png does not exist"),
    (truncated(), r"bad\.png is damaged"),
    (bomb(100_000), r"bad\.png is a decompression bomb"),
    (bomb(8_000), r"bad\.png says that it has 8000 x 8000 pixels; data\.images\.max_file_pixels is 50,000,000"),
    (animation(), r"bad\.png is animated \(2 frames\)"),
    (b"%PDF-1.4 nothing to see", r"bad\.png is no image that Pillow can read"),
    (b"", r"bad\.png is no image"),
    ("narrow.png", r"narrow\.png \(1 x 40000 pixels\) is nothing for the processor in .*aspect ratio"),
    ("wide.png", r"wide\.png \(40000 x 1 pixels\) is nothing for the processor"),
]


@pytest.mark.parametrize(("image", "message"), FAULTS, ids=[message[:30] for _, message in FAULTS])
def test_a_bad_image_is_named_with_its_row_and_counted(image, message, load, tmp_path):
    if isinstance(image, bytes):
        (tmp_path / "bad.png").write_bytes(image)
        image = "bad.png"
    for name, size in (("narrow.png", (1, 40_000)), ("wide.png", (40_000, 1))):
        if image == name:
            Image.new("1", size).save(tmp_path / name)
    rows = {"prompt": "<image>", "images": ["a.png"]}, {"prompt": "<image>", "images": [image]}
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{message}"):
        load(*rows)
    loader = load(*rows, bad_rows="drop")
    assert loader.rows == 1 and "1 with images that cannot be used" in loader.report()


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("<image>", ["http://127.0.0.1:8000/a.png"], "is a URL of the kind `http`"),
        ("<image>", ["file://far/a.png"], "names another host"),
        ("<image>", [3], "an image is int; expected a path"),
        ("<image>", ["data:image/png;base64,?"], "base64 is damaged"),
        ("<image>", ["a.png", "a.png"], "has 2 images, and its texts have places for 1"),
        ("<image> <image>", ["a.png"], "the texts name image 2, and the row has 1"),
        ("<image>", [], "the texts name image 1, and the row has 0"),
    ],
)
def test_a_row_whose_images_do_not_fit_is_refused(prompt, images, message, load):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{message}"):
        load({"prompt": prompt, "images": images})


@pytest.mark.parametrize("problem", [ValueError("no"), ZeroDivisionError()])
def test_whatever_a_processor_raises_for_an_image_is_of_its_row(problem, load, monkeypatch):
    process = ImageProcessor._process

    def fail(self, image):
        if image.size == (40, 20):
            raise problem
        return process(self, image)

    monkeypatch.setattr(ImageProcessor, "_process", fail)
    rows = {"prompt": "<image>", "images": ["a.png"]}, {"prompt": "<image>", "images": ["b.png"]}
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the image .*b\.png .*is nothing for the processor"):
        load(*rows)
    assert load(*rows, bad_rows="drop").rows == 1


@pytest.mark.parametrize("mode", ["CMYK", "P", "RGBA", "I;16"])
def test_other_colours_become_rgb(mode, load, tmp_path):
    path = tmp_path / ("c.tif" if mode == "CMYK" else "c.png")
    (Image.new("I", (24, 16), 200).convert(mode) if mode == "I;16" else Image.new(mode, (24, 16))).save(path)
    assert names(load({"prompt": "<image>", "images": [path.name]}).next()) == [(path.name, 6)]


def test_a_prompt_that_is_too_long_with_its_images_is_dropped(load):
    rows = {"prompt": "short"}, {"prompt": "<image>" * 8, "images": ["b.png"] * 8}
    assert "1 over 60 tokens" in load(*rows, max_prompt_tokens=60).report()
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:2: \d+ tokens, of which 80 stand for images \(data\.im.*; at most 60"
    ):
        load(*rows, max_prompt_tokens=60, on_long="error")


def test_a_text_run_refuses_images_that_its_rows_need(load):
    with pytest.raises(ValueError, match=r"images are read if data\.images is set"):
        load(FORMS["OpenAI"][0], images=None)
    with pytest.raises(ValueError, match=r"this run reads text alone: set data\.images"):
        load({"prompt": "<image>What?", "images": ["a.png"]}, images=None)
    assert "images" not in load({"prompt": "What?", "image": "a.png"}, images=None).next()


def test_a_text_model_and_a_missing_processor_are_named(load, model, tmp_path):
    from tests.tiny import tiny_model_dir

    with pytest.raises(ValueError, match="is a model of the type `qwen2`, which reads no images"):
        ImageProcessor(text := tiny_model_dir(tmp_path / "text"), AutoTokenizer.from_pretrained(text), ImagesConfig())
    other = vision_model_dir(tmp_path / "other", weights=False)
    (other / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"other has no processor of images .*preprocessor_config\.json"):
        ImageProcessor(other, AutoTokenizer.from_pretrained(other), ImagesConfig())


def test_pixels_are_made_once_and_forgotten_in_turn(model, tmp_path):
    processor = ImageProcessor(model, AutoTokenizer.from_pretrained(model), ImagesConfig())
    files = ImageFiles(tmp_path, 10**6)
    spans = []
    for number in range(3):
        found = files.find(str(picture(tmp_path / f"{number}.png", seed=number)))
        spans.append(ImageSpan(found.sha256, found.path, 0, 6, processor.measure(found.size).grid))
    size = sum(tensor.nbytes for tensor in PixelCache(processor, 1).get(spans[0]).values())
    cache = PixelCache(processor, 2 * size)
    for number in (0, 1, 0, 2, 0, 1):  # 1 is forgotten for 2
        cache.get(spans[number])
    assert cache.made == 4
    picture(tmp_path / "1.png", seed=9)
    with pytest.raises(ValueError, match=r"1\.png has changed since the data were read"):
        PixelCache(processor, 1).get(spans[1])
    (tmp_path / "1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1\.png is not there: every process"):
        PixelCache(processor, 1).get(spans[1])


def test_micro_batches_keep_both_budgets():
    lengths, images = torch.tensor([10, 10, 10, 10, 30]), [{"a": 60}] * 2 + [{"b": 60}, {}, {"c": 20}]
    group = torch.tensor([0, 0, 1, 2, 3])
    rows = _pack_rows_with_images(lengths, images, 40, 100, keep=group)
    assert sorted(row for inside in rows for row in inside) == [0, 1, 2, 3, 4]
    for inside in rows:
        together = {name: count for row in inside for name, count in images[row].items()}
        assert sum(together.values()) <= 100 and int(lengths[inside].sum()) <= 40
    assert any({0, 1} <= set(inside) for inside in rows)  # they share an image
    with pytest.raises(ValueError, match="60 patches; max_patches_per_micro is 50"):
        _pack_rows_with_images(lengths, images, 40, 50, keep=group)


def test_place_images_joins_texts_so_that_no_token_is_spelled_in_two():
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}, {"type": "image", "image": "a"}]
    [message] = place_images([USER | {"content": parts}], [])
    assert message["content"][0] == {"type": "text", "text": "<|im_end|>"} and message["content"][1]["image"] == "a"
    with pytest.raises(BadRow, match="images of its own, and others in its messages"):
        place_images([USER | {"content": parts}], ["b"])
