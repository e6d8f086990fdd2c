"""Reward models, value models and judges that see, beside the model's own forward of each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from coalign.algorithms.losses.policy import ValueLoss
from coalign.algorithms.losses.supervised import BradleyTerryLoss
from coalign.algorithms.objective import Objective
from coalign.backends.engines.request import begin_samples
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.scorers.retokenize import RetokenizeModule
from coalign.backends.vision import name_components
from coalign.config.schema import ImagesConfig, ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.data.images.processor import ImageProcessor
from coalign.data.templates import _collapse_images
from coalign.launch.plan import _let_models_see
from coalign.roles import Context
from coalign_graders.services.judge import JudgeModule, PreferenceModule
from tests.backends.test_images import QUICK, answer, load_prompts
from tests.tiny import tiny_model_dir
from tests.vision import FAMILIES, vision_model_dir

BLIND = {"show_images": False}
ALL = [pytest.param(each, marks=() if each in QUICK else pytest.mark.backends) for each in FAMILIES]


def build(path: Path, head: str, **config: Any) -> FSDPModule:
    own = {"load": str(path), "vision": {}, "head": head, "head_init": "zero", "optimizer": {"lr": 0.0}}
    objective = Objective(BradleyTerryLoss() if head == "reward" else ValueLoss())
    module = FSDPModule(ModelConfig(**own | config), Context(model=head, steps=1, loss=objective))
    module.setup()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        module.model.model.get_parameter("score.weight").normal_(std=0.5)
    return module


def compute_states(path: Path, batch: Batch) -> list[torch.Tensor]:
    """The states of each row alone, after the final norm, by the model's own forward: f32[n, hidden]."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    processor = ImageProcessor(path, AutoTokenizer.from_pretrained(path), ImagesConfig())
    found = []
    for row in batch.rows():
        from PIL import Image

        tokens, kinds = row["tokens"].long(), torch.zeros_like(row["tokens"].long())
        pixels = []
        for span in row["images"]:
            kinds[span.start : span.stop] = 1
            if not span.first:
                pixels.append(processor.prepare(Image.open(span.path).convert("RGB")))
        names = [name for name in ("pixel_values", "image_grid_thw") if pixels and name in pixels[0]]
        axis = int(bool(pixels) and pixels[0]["pixel_values"].dim() == 5)
        inputs = {name: torch.cat([own[name] for own in pixels], axis) for name in names}
        key = {"qwen": "mm_token_type_ids", "glm4": "mm_token_type_ids", "gemm": "token_type_ids"}.get(path.name[:4])
        inputs |= {key: kinds[None]} if key else {}
        with torch.no_grad():
            found.append(model.model(input_ids=tokens[None], use_cache=False, **inputs).last_hidden_state[0])
    return found


@pytest.mark.parametrize("family", ALL)
def test_scores_and_values_are_those_of_each_row_alone(family, tmp_path):
    path = vision_model_dir(tmp_path / family, family)
    batch = answer(load_prompts(tmp_path, path))
    states = compute_states(path, batch)
    reward = build(path, "reward")
    weight = reward.model.model.get_parameter("score.weight").detach()[0]
    expected = torch.stack([own[-1] @ weight for own in states])
    torch.testing.assert_close(reward.forward_step(batch)["reward"], expected, rtol=0, atol=2e-5)
    value = build(path, "value", frozen=True)
    masks = [row["loss_mask"] for row in batch.rows()]
    shifted = [torch.cat([torch.zeros(1), own[:-1] @ weight]) for own in states]
    expected = torch.cat([torch.where(m, own, 0.0) for m, own in zip(masks, shifted, strict=True)])
    torch.testing.assert_close(value.forward_step(batch)["values"], expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_reward_model_that_sees_learns_in_all_parts_and_is_exported_whole(tmp_path):
    path = vision_model_dir(tmp_path / "model")
    batch = answer(load_prompts(tmp_path, path), samples=2)
    batch = batch.with_(preference=torch.tensor([1.0, 0.0] * 3), margin=torch.zeros(6))
    reward = build(path, "reward", optimizer={"lr": 1e-2})
    before = {name: p.detach().clone() for name, p in reward.model.model.named_parameters()}
    reward.train_step(batch)
    parts = name_components(reward.model.model)
    moved = {parts[n] for n, p in reward.model.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"tower", "projector", "language"} and parts["score.weight"] == "language"
    reward.save_hf(tmp_path / "out")
    again = build(tmp_path / "out", "reward", head_init="load", frozen=True)
    again.model.model.load_state_dict(reward.model.model.state_dict())  # `build` drew another head
    torch.testing.assert_close(again.forward_step(batch), reward.forward_step(batch), rtol=0, atol=1e-6)
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    read = FSDPModule(
        ModelConfig(load=str(tmp_path / "out"), head="reward", vision={}, frozen=True), Context(model="judge")
    )
    read.setup()
    torch.testing.assert_close(read.forward_step(batch), reward.forward_step(batch), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_reward_model_with_a_template_of_its_own_sees_the_images_of_the_prompt(tmp_path):
    policy, own = vision_model_dir(tmp_path / "policy"), vision_model_dir(tmp_path / "gemma", "gemma3", seed=3)
    reward = build(own, "reward")
    reward.save_hf(tmp_path / "reward")
    config = ModelConfig(load=str(tmp_path / "reward"), head="reward", frozen=True, vision={}, chat_template="auto")
    module = RetokenizeModule(config, Context(model="judge", tokenizer=str(policy)))
    module.setup()
    batch = answer(load_prompts(tmp_path, policy), samples=1)
    prompts = load_prompts(tmp_path, policy)
    batch = batch.with_(
        rows=prompts["rows"], status=torch.zeros(3, dtype=torch.uint8), index=torch.zeros(3, dtype=torch.int32)
    ).with_(rollout_logprobs=torch.zeros(batch.tokens_total), versions=torch.zeros(batch.tokens_total).int())
    found = module.forward_step(batch)["reward"]
    read = [module.reader.read(sample.messages) for sample in _read(batch, policy)]
    states = compute_states(own, module.reader.pack(read, [0, 1, 2]))
    weight = reward.model.model.get_parameter("score.weight").detach()[0]
    torch.testing.assert_close(found, torch.stack([state[-1] @ weight for state in states]), rtol=0, atol=2e-5)
    assert [len({span.image for span in each.images}) for each in read] == [1, 0, 2]


def _read(batch: Batch, policy: Path) -> list[Any]:
    from coalign.data.templates import read_samples

    return read_samples(batch, AutoTokenizer.from_pretrained(policy))


def _finish(prompts: Batch, texts: list[str], policy: Path) -> Batch:
    """The samples of a policy that answers each prompt so."""
    from coalign.backends.engines.request import extend_samples
    from coalign.types import Response, Status

    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokens = [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32) for text in texts]
    responses = [Response(t, torch.zeros(len(t)), torch.zeros_like(t), Status.OK) for t in tokens]
    count = len(texts) // len(prompts)
    return extend_samples(begin_samples(prompts, count), range(len(texts)), responses)


def _score_two_answers(judge: Any, folder: Path, policy: Path) -> tuple[torch.Tensor, Batch]:
    """The rewards of two answers to each prompt, and the questions that the judge asks its model."""
    asked: list[Batch] = []
    answers = judge._answers
    judge._answers = lambda questions: asked.append(questions) or answers(questions)
    out = judge.forward_step(_finish(load_prompts(folder, policy), ["one", "two"] * 3, policy))
    [questions] = asked
    return out["reward"], questions


@pytest.mark.parametrize("kind", [pytest.param(JudgeModule, marks=pytest.mark.slow), PreferenceModule])
def test_judges_are_shown_the_images_of_the_prompt(kind, tmp_path):
    policy, own = vision_model_dir(tmp_path / "policy"), vision_model_dir(tmp_path / "judge", "gemma3", seed=3)
    labels = {"labels": ("A", "B")} if kind is PreferenceModule else {}
    config = ModelConfig(
        module="native" if kind is JudgeModule else "fsdp", load=str(own), vision={}, frozen=True,
        judge={"fn": "pairwise", "template": "{prompt} {first} or {second}?", **labels},
        sampling={"max_new_tokens": 3},
    )  # fmt: skip
    judge = kind(config, Context(model="judge", tokenizer=str(policy), images=ImagesConfig()))
    judge.setup()
    rewards, questions = _score_two_answers(judge, tmp_path, policy)  # of each prompt both orders
    assert len(rewards) == 6
    assert [len({span.image for span in own}) for own in questions["images"]] == [1, 1, 0, 0, 2, 2]
    shown = [_collapse_images(row["tokens"], row["images"]) for row in questions.rows()]
    first = judge.examiner.tokenizer.decode(shown[0])
    assert first.index("<boi><soft><eoi>") < first.index("What? one or two?")


def test_a_judge_of_text_reads_the_prompt_as_its_row_has_it(tmp_path):
    policy, text = vision_model_dir(tmp_path / "policy"), tiny_model_dir(tmp_path / "text")
    asks = {"fn": "pairwise", "template": "{prompt} {first} or {second}?", "labels": ("A", "B")}
    settings: dict[str, Any] = {"module": "preference", "load": str(text), "frozen": True}
    shown = {"judge": ModelConfig(**settings, judge=asks), "blind": ModelConfig(**settings, judge=asks | BLIND)}
    config = RunConfig(algorithm="grpo", data={"train": "rows.jsonl", "images": {}})
    planned = _let_models_see(shown, config)
    with pytest.raises(ValueError, match=r"reads no images.* set models\.judge\.judge\.show_images: false"):
        PreferenceModule.check_architecture(planned["judge"], "judge")
    judge = PreferenceModule(planned["blind"], Context(model="blind", tokenizer=str(policy), images=ImagesConfig()))
    judge.setup()
    rewards, questions = _score_two_answers(judge, tmp_path, policy)
    assert rewards.isfinite().all()
    assert not any(questions["images"])
    texts = [judge.examiner.tokenizer.decode(row["tokens"].tolist()) for row in questions.rows()]
    assert "<image>What? one or two?" in texts[0] and "One <image> and two <image> one or two?" in texts[4]
