"""Rows with images: packed with shared prompts, beside transformers' own processor and forward of each row alone."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from coalign.backends.engines.sampling import sample
from coalign.backends.vision import find_owner, list_placeholder_ids, name_components
from coalign.config.functions import resolve_class
from coalign.config.schema import DataConfig, ImagesConfig, ModelConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.data.images.processor import ImageProcessor
from coalign.data.loader import build_loader
from coalign.roles import Context
from tests.backends import architectures
from tests.backends.architectures import Gradients
from tests.vision import FAMILIES, VOCABULARY, picture, vision_model_dir

QUICK = ("qwen2_5_vl", "gemma3")
ALL = [pytest.param(each, marks=() if each in QUICK else pytest.mark.backends) for each in FAMILIES]
ROWS: list[dict[str, Any]] = [
    {"content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]},
    {"content": "Only text."},
    {
        "content": [
            {"type": "text", "text": "One "},
            {"type": "image", "image": "b.png"},
            {"type": "text", "text": " and two "},
            {"type": "image", "image": "a.png"},
        ]
    },
]


def build_trainer(path: Path, *, context: Mapping[str, Any] | None = None, **config: Any) -> Gradients:
    return architectures.build_trainer(path, context, **{"vision": {}, "max_tokens_per_micro": 400} | config)


def load_prompts(path: Path, model: Path) -> Batch:
    """The batch of ROWS, whose images are in ``path``."""
    for name, size, seed in (("a.png", (24, 16), 0), ("b.png", (40, 52), 1)):
        picture(path / name, size, seed)
    return _load(path, model, [{"prompt": [{"role": "user", **row}]} for row in ROWS])


def load_pictures(folder: Path, model: Path) -> Batch:
    """Eight prompts with a picture each."""
    pictures = [str(picture(folder / f"{i}.png", seed=i)) for i in range(8)]
    return _load(folder, model, [{"prompt": "<image>?", "images": [path]} for path in pictures])


def _load(folder: Path, model: Path, rows: list[dict[str, Any]]) -> Batch:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(train=[{"path": str(folder / "rows.jsonl")}], images=ImagesConfig(), shuffle=False)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return build_loader(data, tokenizer, kind="prompts", split="train", batch_size=len(rows), seed=0).next()


def count_images(model: torch.nn.Module) -> list[int]:
    """Return a list to which each pass of a model's tower adds how many images it computes."""
    owner, seen = find_owner(model), []
    make = owner.get_image_features
    owner.get_image_features = lambda pixel_values, image_grid_thw, **more: (
        seen.append(len(image_grid_thw)) or make(pixel_values, image_grid_thw, **more)
    )
    return seen


def answer(prompts: Batch, samples: int = 3) -> Batch:
    """Random answers to each prompt, as a rollout makes them."""
    draw = torch.Generator().manual_seed(3)
    tokens, mask, rows = [], [], []
    for row, prompt in enumerate(prompts.rows()):
        for _ in range(samples):
            own = torch.randint(0, 256, (int(torch.randint(1, 6, (), generator=draw)),), generator=draw)
            tokens.append(torch.cat([prompt["tokens"], own.int()]))
            mask += [False] * len(prompt["tokens"]) + [True] * len(own)
            rows.append(row)
    own = prompts.select(torch.tensor(rows))
    lengths = torch.tensor([len(each) for each in tokens])
    return Batch(
        lengths,
        {"tokens": torch.cat(tokens), "loss_mask": torch.tensor(mask)},
        {"group": own["group"], "prompt_length": own.lengths.int(), "images": own["images"]},
    )


def compute_alone(
    path: Path, images: Path, batch: Batch, samples: int = 3
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs f32[T] and gradients, by the whole processor and the model's own forward of each row."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(path)
    processor = ImageProcessor(path, tokenizer, ImagesConfig())._processor
    loss, found = torch.zeros(()), []
    for number, row in enumerate(batch.rows()):
        content = ROWS[number // samples]["content"]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        pictures = (
            [Image.open(images / part["image"]).convert("RGB") for part in content if part["type"] == "image"]
            if isinstance(content, list)
            else []
        )
        inputs: Any = processor(text=[text], images=pictures or None, return_tensors="pt", add_special_tokens=False)
        prompt, tokens, mask = inputs["input_ids"][0], row["tokens"].long(), row["loss_mask"][1:]
        assert prompt.tolist() == tokens[: len(prompt)].tolist()
        rest = tokens[len(prompt) :][None]
        inputs = {k: v for k, v in inputs.items() if k not in ("attention_mask", "num_crops", "num_patches")}
        for key in ("input_ids", "mm_token_type_ids", "token_type_ids"):
            if key in inputs:
                inputs[key] = torch.cat([inputs[key], rest if key == "input_ids" else torch.zeros_like(rest)], 1)
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        forbidden = [
            i for i in (model.config.image_token_id, getattr(model.config, "video_token_id", None)) if i is not None
        ]
        logits = logits.index_fill(1, torch.tensor(forbidden), -torch.inf)
        own = torch.where(mask, logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0], 0.0)
        loss = loss - own.sum() / len(batch)
        found += [torch.zeros(1), own.detach()]
    loss.backward()
    return torch.cat(found), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ALL)
def test_packed_rows_are_those_of_each_image_alone(family, tmp_path):
    path = vision_model_dir(tmp_path / "model", family)
    batch = answer(load_prompts(tmp_path, path))
    logprobs, gradients = compute_alone(path, tmp_path, batch)
    trainer = build_trainer(path)
    found = trainer.forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
    trainer.train_step(batch)
    assert trainer.gradients.keys() >= gradients.keys()
    parts = name_components(trainer.model.model)
    for part in ("tower", "projector", "language"):
        names = [name for name in gradients if parts[name] == part]
        error = sum(float((trainer.gradients[n] - gradients[n]).square().sum()) for n in names) ** 0.5
        norm = sum(float(gradients[n].square().sum()) for n in names) ** 0.5
        assert error <= 1e-5 * norm, f"{part}: {error / norm:.1e}"


def build_policy(engine: str, path: Path, **config: Any) -> Any:
    own = {"module": engine, "load": str(path), "vision": {}, "sampling": {"max_new_tokens": 8}} | config
    policy = resolve_class(engine, "coalign.backends")(ModelConfig(**own), Context(model="policy", seed=5))
    policy.setup()
    return policy


@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize("family", ALL)
def test_what_is_sampled_has_the_trainers_log_probs(engine, family, tmp_path):
    path = vision_model_dir(tmp_path / "model", family)
    prompts, policy = load_prompts(tmp_path, path), build_policy(engine, path)
    policy.engine.end_tokens = frozenset()
    batch = policy.generate(prompts, samples=3)
    met = batch["rollout_logprobs"]
    found = build_trainer(path).forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(found, met, rtol=0, atol=1e-5)
    assert policy.engine.model.images.pixels.made == 2  # pictures; 9 samples of 3 prompts read them
    other = policy.generate(prompts.select([2, 1]), samples=3)  # in another batch
    again = batch.select([*range(6, 9), *range(3, 6)])
    assert torch.equal(other["tokens"], again["tokens"])


def test_a_placeholder_is_never_sampled_and_never_probable(tmp_path):
    path = vision_model_dir(tmp_path / "model")
    model, trainer = build_policy("native", path).engine.model, build_trainer(path)
    placeholders = list_placeholder_ids(trainer.model.model.config, len(trainer.model.head.weight))
    logits = torch.randn(20_000, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[:, placeholders] = 50.0
    chances = torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.0), SamplingConfig(top_k=5, min_p=0.1)):
        tokens, logprobs = sample(model.forbid(logits), chances, sampling)
        assert not torch.isin(tokens, torch.tensor(placeholders)).any() and torch.isfinite(logprobs).all()
    said = Batch(torch.tensor([2 + len(placeholders)]), {"tokens": torch.tensor([7, *placeholders, 9]).int()})
    found = trainer.model(trainer.model.pack(said), needs=("entropy",))
    assert found["logprobs"][: len(placeholders)].exp().eq(0).all() and torch.isfinite(found["entropy"]).all()


def test_the_tower_sees_each_image_of_a_step_once(tmp_path):
    """64 samples of 8 prompts with a picture each."""
    path = vision_model_dir(tmp_path / "model")
    prompts = load_pictures(tmp_path, path)
    batch, trainer = answer(prompts, samples=8), build_trainer(path, max_tokens_per_micro=10**4)
    assert len(batch) == 64 and len(pickle.dumps(batch["images"])) < 64 * 1024
    seen = count_images(trainer.model.model)
    trainer.train_step(batch)
    assert sum(seen) == trainer.model.images.pixels.made == 8


def test_adapters_reach_the_tower_and_merge_into_it(tmp_path):
    pytest.importorskip("peft")
    path = vision_model_dir(tmp_path / "model")
    batch = answer(load_prompts(tmp_path, path))
    lora = {"rank": 2, "target": ["*.q_proj", "*visual.blocks.*"]}
    trainer = build_trainer(path, lora=lora, optimizer={"lr": 1e-2})
    before = build_trainer(path).forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(trainer.forward_step(batch)["ref_logprobs"], before, rtol=0, atol=1e-6)
    trainer.train_step(batch)
    trained = {name for name, gradient in trainer.gradients.items() if gradient.any()}
    assert all("lora_" in name for name in trained) and {True, False} == {"visual" in name for name in trained}
    after = trainer.forward_step(batch)["ref_logprobs"]
    assert (after - before).abs().max() > 1e-2
    trainer.save_hf(tmp_path / "merged")
    merged = build_trainer(tmp_path / "merged").forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(merged, after, rtol=0, atol=1e-5)
    torch.testing.assert_close(trainer.forward_step(batch, base=True)["ref_logprobs"], before, rtol=0, atol=1e-6)


def test_a_run_refuses_what_check_refuses(tmp_path):
    model = vision_model_dir(tmp_path / "model")
    with pytest.raises(NotImplementedError, match="computes padded rows, and images need packed ones"):
        build_trainer(model, rows="padded")
