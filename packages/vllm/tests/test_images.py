"""vLLM with images: tokens and log-probs beside the trainer's, synced towers, prefix cache, partial responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from coalign.backends.engines.request import begin_samples, extend_samples, plan_requests
from coalign.backends.vision import list_placeholder_ids, name_components
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.data.images.image_files import ImageFiles
from coalign.roles import Context
from coalign.run_files.records import read_records
from coalign.types import Status
from coalign_vllm.module import VLLMModule
from packages.vllm.tests.vllm_process import call, find_torchvision
from tests.backends.test_images import Gradients, build_trainer, load_prompts
from tests.backends.test_videos import ROWS as VIDEO_ROWS
from tests.backends.test_videos import load as load_videos
from tests.backends.test_videos import make_videos
from tests.conformance.engines import SMALL, VLLM
from tests.runs import run
from tests.vision import FAMILIES, picture, vision_model_dir

# All that vLLM's kernels for CPUs compute.
ALL = [
    pytest.param(each, marks=() if each in ("qwen2_5_vl", "llava", "idefics3") else pytest.mark.backends)
    for each in FAMILIES
    if each != "gemma3"
]
SHAPE = {"hidden": 64, "heads": 2}  # vLLM's kernels for CPUs know heads of 32 numbers


@pytest.fixture(scope="module")
def torchvision() -> None:
    if not find_torchvision():
        pytest.skip("torchvision, which vLLM needs for images, cannot be had")


def build_policy(path: Path) -> VLLMModule:
    settings: dict[str, Any] = {"module": "vllm", "load": str(path), "vision": {}, "vllm": SMALL}
    policy = VLLMModule(ModelConfig(**settings, sampling={"max_new_tokens": 8}), Context(model="policy", seed=5))
    policy.setup()
    policy.engine.end_tokens = frozenset()
    return policy


def compare(trainer: Gradients, batch: Batch, version: int) -> float:
    """The mean distance of the log-probs of what these weights sampled from the trainer's."""
    own = trainer.forward_step(batch)["ref_logprobs"]
    return (own - batch["rollout_logprobs"])[batch["versions"] == version].abs().mean().item()


def show_another(prompts: Batch, path: Path) -> Batch:
    """The first prompt with another picture of the same size, so with the same tokens."""
    files = ImageFiles(path, 10**6)
    image = files.find(files.store(str(picture(path / "c.png", (24, 16), 9))))
    [spans] = prompts.slice(0, 1)["images"]
    own = tuple(replace(span, image=image.sha256, path=image.path) for span in spans)
    return prompts.slice(0, 1).with_(images=[own])


def train(trainer: Gradients, policy: VLLMModule, batch: Batch, version: int) -> set[str]:
    """Take a step and sync; return the parts of the model that it changed."""
    before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    trainer.train_step(batch)
    policy.load_weights(trainer.export_weights(), version=version)
    parts = {f"model.{name}" if f"model.{name}" in before else name: part for name, part in _parts(trainer).items()}
    return {parts[name] for name, tensor in trainer.export_weights() if not torch.equal(tensor, before[name])}


def _parts(trainer: Gradients) -> dict[str, str]:
    return name_components(trainer.model.model)


def play(folder: str, family: str) -> dict[str, Any]:
    """What a policy that sees does, as plain values. In a process that has torchvision."""
    path, found = Path(folder) / "model", {}
    prompts = load_prompts(Path(folder), path)
    trainer, policy = build_trainer(path, optimizer={"lr": 2e-2}), build_policy(path)
    batch = policy.generate(prompts, samples=3)
    found["first"], found["made"] = compare(trainer, batch, 0), policy.engine.images.pixels.made
    # The same in another batch, with keys and values of the first one, and not with those of another picture.
    again = policy.generate(prompts.select([2, 1]), samples=3)
    found["same"] = torch.equal(again["tokens"], batch.select([*range(6, 9), *range(3, 6)])["tokens"])
    found["another"] = compare(trainer, policy.generate(show_another(prompts, Path(folder)), samples=3), 0)
    # Partial responses go on.
    part = policy.generate(prompts, samples=3, round_tokens=3)
    found["partial"] = set(part["status"].tolist())
    found["continued"] = torch.equal(policy.generate(part)["tokens"], batch["tokens"])
    # Other weights, also of the tower; then others in the middle of responses.
    found["moved"] = train(trainer, policy, batch, 1)
    found["synced"] = compare(trainer, policy.generate(prompts, samples=3), 1)
    mixed = generate_over_a_sync(trainer, policy, prompts, batch)
    found["versions"], found["resumed"] = mixed["versions"].unique().tolist(), compare(trainer, mixed, 2)
    # A model that would say nothing but placeholders.
    weights = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    ends = ("lm_head.weight", "embed_tokens.weight")  # of a tied model the second alone
    head = next(name for end in ends for name in weights if name.endswith(end))
    placeholders = list_placeholder_ids(trainer.model.model.config, len(trainer.model.head.weight))
    weights[head][placeholders] = 1e3 * weights[head].sum(0).sign()
    policy.load_weights(weights.items(), version=3)
    said = policy.generate(prompts, samples=8)
    found["said"] = bool(set(placeholders) & set(said["tokens"][said["loss_mask"]].tolist()))
    policy.close()
    return found


def generate_over_a_sync(trainer: Gradients, policy: VLLMModule, prompts: Batch, batch: Batch) -> Batch:
    """Samples of which the first tokens are of version 1 and the others of version 2."""
    policy.engine.recomputes_kv = True
    begun = begin_samples(prompts, 2)
    rows, requests = plan_requests(begun, 8, None, None)
    answers: dict[int, Any] = {}
    with policy.engine.open(policy.config.sampling) as session:
        first = 0
        for request in requests:
            session.submit(request, lambda place, own, first=first: answers.__setitem__(first + place, own))
            first += request.samples
        for step in range(64):
            if not session.unfinished:
                break
            with policy.engine.stepping():
                session.step()
            if step == 3:
                train(trainer, policy, batch, 2)
    return extend_samples(begun, rows, [answers[i] for i in range(len(rows))])


@VLLM
def test_a_vllm_without_torchvision_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("coalign_vllm.module.find_spec", lambda name: None)
    path = vision_model_dir(tmp_path / "model", weights=False)
    config = ModelConfig(module="vllm", load=str(path), vision={})
    with pytest.raises(ImportError, match=r"models\.policy\.module is `vllm`, which needs torchvision for models that"):
        VLLMModule.check_machine(config, "policy", torch.device("cpu"))


def refuse(folder: str) -> list[str]:
    """What is said of Gemma 3, whose image blocks vLLM's kernels for CPUs do not compute: before anything is loaded,
    by a policy that loads it all the same, and by a run. In a process that has torchvision."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    path, said = Path(folder) / "model", []

    def note(function: Callable[[], Any]) -> None:
        try:
            function()
        except ValueError as error:
            said.append(str(error))

    config = ModelConfig(module="vllm", load=str(path), vision={}, vllm=SMALL)
    note(lambda: VLLMModule.check_machine(config, "policy", torch.device("cpu")))
    with patch.object(CPUAttentionBackend, "supports_mm_prefix", classmethod(lambda cls: True)):
        policy = build_policy(path)
        note(policy.ensure_weights)
        policy.close()
        note(lambda: run_small(Path(folder), path))
    return said


def run_small(folder: Path, path: Path) -> None:
    """Train for a step on images, with vLLM and rollouts of an environment."""
    row = {"prompt": "<image>?", "images": [str(picture(folder / "a.png"))], "answer": "3"}
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for _ in range(4)))
    settings = {
        "algorithm": "grpo",
        "output": str(folder / "run"),
        "seed": 1,
        "data": {"train": str(folder / "rows.jsonl"), "images": {}},
        "reward": {"fn": "exact_match"},
        "rollout": {"fn": "packages.vllm.tests.test_images:ask_twice"},
        "runtime": {"cluster": "local", "steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "threads": 1}
        | {"trackers": []},
        "models": {
            "policy": {"module": "vllm", "load": str(path), "vllm": SMALL, "sampling": {"max_new_tokens": 4}},
            "trainer": {"load": str(path)},
            "reference": {"load": str(path)},
        },
    }
    run(settings)


async def ask_twice(episode: Any) -> None:
    await episode.generate()
    episode.say({"role": "user", "content": "Sure?"})
    await episode.generate()


@VLLM
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("torchvision")
def test_a_family_whose_images_vllm_reads_otherwise_is_refused(tmp_path):
    vision_model_dir(tmp_path / "model", "gemma3", **SHAPE)
    early, *late = call("packages.vllm.tests.test_images:refuse", str(tmp_path), scratch=tmp_path)
    assert "models.policy.load: vLLM" in early and "let no token of an image see a later one" in early
    assert len(late) == 2 and all("models.policy.module is `vllm`, which reads images otherwise" in own for own in late)


@VLLM
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("torchvision")
def test_a_run_whose_engine_agrees_with_its_trainer_begins(tmp_path):
    vision_model_dir(tmp_path / "model", **SHAPE)
    call("packages.vllm.tests.test_images:run_small", tmp_path, tmp_path / "model", scratch=tmp_path)
    *_, record = read_records(tmp_path / "run" / "metrics.jsonl")
    assert record["step"] == 1 and record["loss/mismatch"] < 1e-4


def watch(folder: str) -> list[float] | str:
    """The distances from the trainer of what is sampled of videos, and of images beside them, or what is said of videos
    instead. In a process that has torchvision."""
    path = Path(folder) / "model"
    make_videos(Path(folder))
    trainer, policy = build_trainer(path, max_tokens_per_micro=600), build_policy(path)
    videos, seen = load_videos(Path(folder), path, VIDEO_ROWS), load_prompts(Path(folder), path)
    try:
        return [compare(trainer, policy.generate(prompts, samples=3), 0) for prompts in (videos, seen, videos)]
    except ValueError as error:
        return str(error)
    finally:
        policy.close()


@VLLM
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("qwen3_vl", None),
        # Behind a video that is longer than it is wide, its positions go on from the last step's.
        ("qwen2_5_vl", "vLLM samples with videos of families alone that write a text before each step"),
    ],
)
def test_vllm_samples_with_videos_as_the_trainer_reads_them_or_refuses_them(family, refusal, tmp_path, monkeypatch):
    monkeypatch.setenv("COALIGN_CACHE", str(tmp_path / "cache"))
    vision_model_dir(tmp_path / "model", family, **SHAPE)
    found = call("packages.vllm.tests.test_images:watch", str(tmp_path), scratch=tmp_path)
    assert max(found) < 1e-4 if refusal is None else refusal in found, found


@VLLM
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("family", ALL)
def test_vllm_samples_with_images_as_the_trainer_reads_them(family, tmp_path):
    vision_model_dir(tmp_path / "model", family, **SHAPE)
    found = call("packages.vllm.tests.test_images:play", str(tmp_path), family, scratch=tmp_path)
    for name in ("first", "another", "synced", "resumed"):
        assert found[name] < 1e-4, (name, found)
    assert found["made"] == 2 and found["same"] and found["continued"], found
    assert found["partial"] == {int(Status.PARTIAL)} and found["versions"] == [-1, 1, 2], found
    assert found["moved"] == {"tower", "projector", "language"} and not found["said"], found
