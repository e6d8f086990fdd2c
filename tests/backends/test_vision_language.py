"""Vision-language checkpoints that are trained on text: beside plain Hugging Face's class of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from coalign.backends import pretrained
from coalign.config.schema import ModelConfig
from coalign.files import list_weight_files
from coalign_serve.weights.merge import merge
from tests.backends.architectures import PlainStep, build_trainer, compare_tokens, find_shape, load_plain, make
from tests.backends.batches import rollout
from tests.runs import run, run_in_two_parts, settings

# family -> how the engines `native` and `transformers` sample it; empty: not
FAMILIES = dict.fromkeys(
    (
        *("qwen2_5_vl", "mistral3", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "llava_next", "llava_onevision"),
        *("gemma3", "internvl", "glm4v", "glm46v", "smolvlm", "idefics2", "idefics3", "mllama", "kimi_k25", "lfm2_vl"),
        *("ovis2", "vipllava", "video_llava", "exaone4_5", "minimax_m3_vl", "got_ocr2"),
    ),
    ("yes", "padded"),
)
FAMILIES |= dict.fromkeys(("llama4", "deepseek_vl", "janus", "qwen3_omni_moe_thinker"), ("", "padded"))
FAMILIES |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("", "equal"))
QUICK = ("qwen2_5_vl", "mistral3")
PICTURE = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}


def make_whole(path: Path, family: str, **keys: object) -> Path:
    path.mkdir()
    make(path, family, AutoModelForImageTextToText, **find_shape(family) | keys)
    (path / "preprocessor_config.json").write_text('{"do_resize": true}')
    return path


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in list_weight_files(path) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.backends) for each in FAMILIES]
)
def test_its_language_model_learns_and_samples_as_in_the_whole(family, tmp_path):
    path = make_whole(tmp_path / "model", family)
    batch = rollout((5, 9), 3)
    trainer = build_trainer(path)
    PlainStep.of(path, batch).compare(trainer)
    for engine, expected in zip(("native", "transformers"), FAMILIES[family], strict=True):
        if expected:
            assert compare_tokens(path, engine) == expected
        else:
            with pytest.raises(ValueError, match="the native engine cannot run"):
                compare_tokens(path, engine)
    names = {name for name, _ in trainer.model.model.named_parameters()}
    whole = load_plain(path)
    towers = {name for name, _ in whole.named_parameters()} - names
    assert towers and not names - dict(whole.named_parameters()).keys()
    assert not any(torch.equal(whole.get_parameter(n), p) for n, p in trainer.model.named_parameters() if n in towers)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.backends) for each in FAMILIES]
)
def test_an_export_is_the_whole_model_with_its_towers_bit_for_bit(family, tmp_path):
    path, batch = make_whole(tmp_path / "model", family), rollout((5, 9), 3)
    trainer = build_trainer(path, optimizer={"lr": 1e-2})
    text = trainer.model.model.state_dict()
    whole = load_plain(path)
    towers = {name: tensor for name, tensor in whole.state_dict().items() if name not in text}
    trainer.train_step(batch)
    trainer.save_hf(tmp_path / "export")
    before, after = read_tensors(path), read_tensors(tmp_path / "export")
    assert before.keys() == after.keys()
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert 5 < len(same) < len(before) - 5
    loaded, info = type(whole).from_pretrained(tmp_path / "export", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in towers.items())
    assert (tmp_path / "export" / "preprocessor_config.json").read_text() == '{"do_resize": true}'
    found = trainer.forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(found, PlainStep.of(tmp_path / "export", batch).logprobs, rtol=0, atol=3e-5)


def test_an_export_reads_images_as_the_whole_model_with_its_language_weights(tmp_path):
    """The tower is in another dtype than that in which the language model is trained."""
    path = make_whole(tmp_path / "model", "qwen2_5_vl", **PICTURE)
    tensors = {n: t.bfloat16() if n.startswith("visual.") else t for n, t in read_tensors(path).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    trainer = build_trainer(path, optimizer={"lr": 1e-2})
    trainer.train_step(rollout((5, 9), 3))
    trainer.save_hf(tmp_path / "export")
    after = read_tensors(tmp_path / "export")
    for name, tensor in tensors.items():
        if name.startswith("visual."):
            assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], tensor)
    expected, found = load_plain(path), load_plain(tmp_path / "export")
    left = expected.load_state_dict(trainer.model.model.state_dict(), strict=False)
    assert not left.unexpected_keys and all(name.startswith("model.visual.") for name in left.missing_keys)
    tokens = torch.tensor([[5, 302, 300, 300, 300, 300, 303, 17, 40]])
    image = {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (tokens == 300).long(),
    }
    with torch.no_grad():
        logits = found(input_ids=tokens, **image).logits
        assert torch.equal(logits, expected(input_ids=tokens, **image).logits)
        image["pixel_values"] = image["pixel_values"] + 1
        assert not torch.allclose(logits, found(input_ids=tokens, **image).logits)


def test_what_has_no_text_alone_or_no_tower_to_export_is_refused(tmp_path):
    path = make_whole(tmp_path / "model", "mistral3")
    with pytest.raises(ValueError, match=r"models\.policy\.init is random: Mistral3For.* use `init: load`"):
        pretrained.build_skeleton(ModelConfig(load=str(path), init="random"), name="policy")
    with pytest.raises(ValueError, match=r"no sequence classifier, as `head: value` needs one, for .*`mistral3`"):
        pretrained.build_skeleton(ModelConfig(load=str(path), head="value"), name="critic")
    blip = make_whole(tmp_path / "blip", "blip-2")
    with pytest.raises(ValueError, match=r"Blip2For.* computes no text alone: it needs \['pixel_values'\]"):
        pretrained.build_skeleton(ModelConfig(load=str(blip)), name="policy")


@pytest.mark.backends
@pytest.mark.parametrize("family", ["qwen2_5_vl", "mistral3"])
def test_adapters_fit_the_whole_model_and_merge_into_it(family, tmp_path):
    peft = pytest.importorskip("peft")
    path, batch = make_whole(tmp_path / "model", family), rollout((5, 9), 3)
    trainer = build_trainer(path, lora={"rank": 4}, optimizer={"lr": 1e-2})
    for _ in range(2):
        trainer.train_step(batch)
    trainer.save_adapter(tmp_path / "adapter")
    trainer.save_hf(tmp_path / "export")
    adapted = peft.PeftModel.from_pretrained(load_plain(path), tmp_path / "adapter")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        found, expected = (model(input_ids=tokens).logits for model in (adapted, load_plain(tmp_path / "export")))
        assert not torch.allclose(found, load_plain(path)(input_ids=tokens).logits, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)
    merge(path, tmp_path / "adapter", tmp_path / "merged")
    merged, exported = read_tensors(tmp_path / "merged"), read_tensors(tmp_path / "export")
    torch.testing.assert_close(merged, exported, rtol=1e-6, atol=1e-7)
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()


@pytest.mark.backends
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
def test_a_run_goes_on_where_it_was_and_exports_the_whole_model(algorithm, tmp_path):
    make_whole(tmp_path / "model", "qwen2_5_vl")
    config = settings(tmp_path, algorithm, save_every=2)
    run(config)
    whole = read_tensors(tmp_path / "run" / "model")
    assert whole.keys() == read_tensors(tmp_path / "model").keys()
    again = read_tensors(Path(run_in_two_parts(config)["output"]) / "model")
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
