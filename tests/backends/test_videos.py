"""Rows with videos as frames: what their files become, and log-probs beside the model's own forward of each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from coalign.config.schema import DataConfig, ImagesConfig
from coalign.data.batch import Batch
from coalign.data.images.frames import FrameProcessor
from coalign.data.images.pixels import PixelCache
from coalign.data.images.processor import ImageProcessor
from coalign.data.loader import build_loader
from tests.backends.test_images import answer, build_policy, build_trainer
from tests.runs import run, run_in_two_parts
from tests.vision import ID, picture, vision_model_dir

VIDEO, START, END = (ID[f"<|{name}|>"] for name in ("video_pad", "vision_start", "vision_end"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COALIGN_CACHE", str(tmp_path / "cache"))


def make_videos(folder: Path) -> None:
    """A folder of five frames, a GIF of four at 4 frames a second, and two frames by themselves."""
    (folder / "clip").mkdir(parents=True)
    for number in range(5):
        picture(folder / "clip" / f"{number + 8}.png", (24, 16), number)  # 8.png, 9.png, 10.png, …
    pictures = [Image.open(picture(folder / f"{number}.png", (16, 24), 10 + number)) for number in range(4)]
    pictures[0].save(folder / "a.gif", save_all=True, append_images=pictures[1:], duration=250, loop=0)


ROWS: list[dict[str, Any]] = [
    {"prompt": "<video>\nWhat happens?", "video": "clip"},
    {"prompt": "<image> and <video>, then <video>?", "videos": [["0.png", "1.png"], "a.gif"], "images": ["2.png"]},
    {"prompt": "No video."},
]


def load(folder: Path, model: Path, rows: list[dict[str, Any]], **images: Any) -> Batch:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(train=[{"path": str(path)}], images=ImagesConfig(**images), shuffle=False)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return build_loader(data, tokenizer, kind="prompts", split="train", batch_size=len(rows), seed=0).next()


def compute_alone(model: Path, batch: Batch) -> torch.Tensor:
    """Log-probs f32[T] by the model's own forward of each row, with the arguments that its processor makes."""
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    pixels = PixelCache(ImageProcessor(model, AutoTokenizer.from_pretrained(model), ImagesConfig()), 2**20)
    kinds = {whole.config.image_token_id: 1, whole.config.video_token_id: 2}
    found = []
    for row in batch.rows():
        tokens = row["tokens"].long()
        inputs: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
        inputs["mm_token_type_ids"] = torch.tensor([[kinds.get(token, 0) for token in tokens.tolist()]])
        whole_spans = [span for span in row["images"] if not span.first]
        for names, own in (
            (("pixel_values", "image_grid_thw"), [span for span in whole_spans if span.seconds is None]),
            (("pixel_values_videos", "video_grid_thw"), [span for span in whole_spans if span.seconds is not None]),
        ):
            made = [pixels.get(span) for span in own]
            if made:
                inputs[names[0]] = torch.cat([each["pixel_values"] for each in made])
                inputs[names[1]] = torch.cat([each["image_grid_thw"] for each in made])
        if "qwen2_5" in whole.config.model_type:
            inputs["second_per_grid_ts"] = torch.tensor([s.seconds for s in whole_spans if s.seconds is not None])
        with torch.no_grad():
            logits = whole(**inputs).logits[0, :-1].index_fill(1, torch.tensor([*kinds]), -torch.inf)
        own = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found += [torch.zeros(1), torch.where(row["loss_mask"][1:], own, 0.0)]
    return torch.cat(found)


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.backends) for name in ("qwen2_vl", "qwen3_vl"))]
)
def test_rows_with_videos_have_the_log_probs_of_the_models_own_forward(family, tmp_path):
    make_videos(tmp_path)
    model = vision_model_dir(tmp_path / "model", family)
    batch = answer(load(tmp_path, model, ROWS), samples=2)
    expected = compute_alone(model, batch)
    trainer = build_trainer(model, max_tokens_per_micro=600)
    torch.testing.assert_close(trainer.forward_step(batch)["ref_logprobs"], expected, rtol=0, atol=1e-5)
    trainer.train_step(batch)
    assert all(trainer.gradients[name].any() for name in trainer.gradients if "visual" in name and "weight" in name)


@pytest.mark.backends
@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_what_is_sampled_of_videos_has_the_trainers_log_probs(family, engine, tmp_path):
    make_videos(tmp_path)
    model = vision_model_dir(tmp_path / "model", family)
    policy = build_policy(engine, model)
    policy.engine.end_tokens = frozenset()
    batch = policy.generate(load(tmp_path, model, ROWS), samples=2)
    found = build_trainer(model, max_tokens_per_micro=600).forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(found, batch["rollout_logprobs"], rtol=0, atol=1e-5)


def test_the_places_and_times_of_videos(tmp_path):
    make_videos(tmp_path)
    batch = load(tmp_path, vision_model_dir(tmp_path / "model", weights=False), ROWS, video_fps=0.5)
    [clip], [image, pair, gif], none = batch["images"]
    assert (clip.grid, clip.length, clip.seconds) == ((3, 4, 6), 18, 4.0)  # five frames: the last one counts twice
    assert (pair.grid, pair.seconds, gif.grid, gif.seconds) == ((1, 6, 4), 4.0, (2, 6, 4), 0.5)
    assert image.seconds is None and none == ()
    tokens = batch.select([0])["tokens"].tolist()
    assert tokens[clip.start - 1 : clip.stop + 1] == [START, *[VIDEO] * 18, END] and tokens.count(VIDEO) == 18


def test_a_video_of_qwen3_says_the_times_of_its_steps(tmp_path):
    make_videos(tmp_path)
    model = vision_model_dir(tmp_path / "model", "qwen3_vl", weights=False)
    batch = load(tmp_path, model, ROWS[:1])
    text = AutoTokenizer.from_pretrained(model).decode(batch["tokens"])
    assert [part.split("<")[-1] for part in text.split(" seconds>")[:-1]] == ["0.2", "1.2", "2.0"]
    spans = batch["images"][0]
    assert [(span.first, span.length) for span in spans] == [(0, 6), (6, 6), (12, 6)]
    assert len({span.image for span in spans}) == 1 and {span.grid for span in spans} == {(3, 4, 6)}


def test_frames_become_the_patches_of_transformers_own_processor_of_images(tmp_path):
    make_videos(tmp_path)
    model = vision_model_dir(tmp_path / "model", weights=False)
    processor = ImageProcessor(model, AutoTokenizer.from_pretrained(model), ImagesConfig())
    frames = [Image.open(tmp_path / f"{number}.png") for number in range(3)]
    alone = [processor.prepare(frame)["pixel_values"].view(-1, 3, 2, 4, 4) for frame in frames]
    found = processor.prepare_video(frames)
    assert found["image_grid_thw"].tolist() == [[2, 6, 4]]
    steps = found["pixel_values"].view(2, -1, 3, 2, 4, 4)
    for (step, half), frame in zip(((0, 0), (0, 1), (1, 0), (1, 1)), (0, 1, 2, 2), strict=True):
        torch.testing.assert_close(steps[step][:, :, half], alone[frame][:, :, half], rtol=0, atol=1e-6)


def test_limits_of_pixels_are_those_of_the_file_of_videos(tmp_path):
    model = vision_model_dir(tmp_path / "model", "qwen3_vl", weights=False)
    assert FrameProcessor(model, "qwen3_vl").fit((64, 64), 4) == (32, 32)  # 4096 pixels in all frames
    assert FrameProcessor(model, "qwen2_vl").fit((64, 64), 4) == (64, 64)  # in each
    (model / "video_preprocessor_config.json").write_text(
        '{"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}}'
    )
    assert FrameProcessor(model, "qwen3_vl").fit((64, 64), 4) == (16, 16)


def test_what_is_no_video_is_refused_with_what_to_do(tmp_path):
    make_videos(tmp_path)
    model = vision_model_dir(tmp_path / "model", weights=False)
    for row, message in (
        ({"video": "film.mp4"}, r"film\.mp4 has to be decoded.*ffmpeg -i film\.mp4"),
        ({"videos": ["0.png", "1.png"]}, r"0\.png has 1 frame; expected a list or folder of frames"),
        ({"video": ["0.png", "clip/8.png"]}, "frames of 2 sizes"),
        ({"video": []}, "a video has no frames"),
        ({"video": "model"}, "a video has no frames"),  # a folder without them
        ({"video": ["0.png", "none.png"]}, r"none\.png does not exist"),
        ({"prompt": "<video> <video>", "video": "clip"}, "the texts name video 2, and the row has 1"),
    ):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, model, [{"prompt": "What?", **row}])
    images_alone = vision_model_dir(tmp_path / "gemma", "gemma3", weights=False)
    with pytest.raises(ValueError, match="reads images alone; videos are read by qwen2_vl, qwen2_5_vl"):
        load(tmp_path, images_alone, ROWS[:1])


def test_a_frame_that_changes_is_noticed(tmp_path):
    make_videos(tmp_path)
    model = vision_model_dir(tmp_path / "model", weights=False)
    [span] = load(tmp_path, model, ROWS[:1])["images"][0]
    cache = PixelCache(ImageProcessor(model, AutoTokenizer.from_pretrained(model), ImagesConfig()), 2**20)
    picture(tmp_path / "clip" / "9.png", (24, 16), 99)
    with pytest.raises(ValueError, match=r"frame .*9\.png has changed since the data were read"):
        cache.get(span)


@pytest.mark.slow
def test_a_run_learns_from_videos_and_goes_on_where_it_was(tmp_path):
    make_videos(tmp_path)
    rows = [row | {"answer": f"cat {number}"} for number, row in enumerate(ROWS * 3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    runtime = {"steps": 4, "prompts_per_step": 3, "threads": 1, "cluster": "local", "trackers": [], "plots": False}
    config = {
        "algorithm": "sft",
        "output": str(tmp_path / "run"),
        "runtime": runtime | {"save_every": 2},
        "data": {"train": str(tmp_path / "rows.jsonl"), "images": {}},
        "models": {"trainer": {"load": str(vision_model_dir(tmp_path / "model", "qwen3_vl"))}},
    }
    assert run(config) == 0
    again = run_in_two_parts(config)
    found, whole = (load_file(Path(each["output"]) / "model" / "model.safetensors") for each in (again, config))
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
