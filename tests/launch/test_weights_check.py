"""`coalign check` compares what files say of their weights with the architecture and the head that a run asks for."""

from __future__ import annotations

import json
import re
import shutil

import pytest

import coalign
from coalign import load_config
from coalign.launch.check import check
from coalign.report.display import Display
from tests.runs import run, settings
from tests.tiny import tiny_model_dir, tiny_reward_model_dir
from tests.weights.test_model_files import LFS, NAME, content


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("heads")


@pytest.fixture
def configured(home, tmp_path):
    """A run whose models are a copy of ``source``."""

    def build(algorithm, source=None, **changes):
        shutil.copytree(source or settings(home, "sft")["models"]["trainer"]["load"], tmp_path / "model")
        config = settings(tmp_path, algorithm)
        config["models"]["policy" if algorithm == "grpo" else "trainer"] |= changes
        return config

    return build


def refusal(config):
    with pytest.raises(ValueError) as refused:
        check(load_config(config), Display(quiet=True))
    return str(refused.value)


def edit(folder, **changes):
    file = folder / "config.json"
    content = {name: value for name, value in json.loads(file.read_text()).items() if name != "layer_types"}
    file.write_text(json.dumps(content | changes))


SIZES = {
    "hidden_size": (64, r"models\.trainer\.load: .*the weights do not fit: model\.embed_tokens\.weight is \[320, 32\]"),
    "vocab_size": (384, r"the weights do not fit: model\.embed_tokens\.weight is \[320, 32\] there and \[384, 32\]"),
    "num_hidden_layers": (3, r"lacks \['model\.layers\.1\.input_layernorm\.weight'.* and 16 more for a model"),
    "tie_word_embeddings": (False, r"lacks \['lm_head\.weight'\] for a model with head 'lm'"),
}


@pytest.mark.parametrize("key", SIZES)
def test_a_configuration_of_another_model(configured, tmp_path, key):
    value, message = SIZES[key]
    config = configured("sft")
    edit(tmp_path / "model", **{key: value})
    assert re.search(message, refusal(config))


def test_weights_of_more_layers_than_the_configuration_says(configured, tmp_path, caplog):
    config = configured("sft", tiny_model_dir(tmp_path / "two", layers=2))
    edit(tmp_path / "model", num_hidden_layers=1)
    said = refusal(config)
    assert "weights of more layers than its config.json says" in said and "model.layers.1." in said
    assert run(config, "runtime.steps=1") == 0 and "weights of more layers" in caplog.text  # as config.json asks


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_reward_model_is_no_policy(configured, tmp_path, algorithm):
    config = configured(algorithm, tiny_reward_model_dir(tmp_path / "judge"))
    assert "is a reward or value model (it has a `score.weight`), and no language model" in refusal(config)


def test_a_language_model_is_no_reward_model_unless_a_head_is_begun(configured, tmp_path):
    config = configured("reward_model", head_init="load")
    assert "lacks ['score.weight'] for a model with head 'reward'; head_init: zero starts a new head" in refusal(config)
    config["models"]["trainer"]["head_init"] = "zero"
    check(load_config(config), Display(quiet=True))


def test_weights_that_are_drawn_need_no_files(configured, tmp_path):
    config = configured("sft", init="random")
    (tmp_path / "model" / NAME).write_bytes(LFS)
    check(load_config(config), Display(quiet=True))


def test_adapters_that_are_a_pointer(configured, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(LFS)
    config = configured("sft", lora={"load": str(tmp_path / "adapter")})
    assert "models.trainer.lora.load: " in (said := refusal(config)) and "is a pointer of Git LFS" in said


def test_a_tokenizer_is_named_before_the_data(configured, tmp_path):
    config = configured("grpo")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    assert "has no tokenizer" in (said := refusal(config)) and "models.policy.tokenizer" in said
    (tmp_path / "model/tokenizer.json").write_text('{"version": "1.0", "trunc')
    (tmp_path / "model/tokenizer_config.json").write_text("{}")
    assert "tokenizer.json" in refusal(config)


def test_a_run_names_the_file_too(configured, tmp_path):
    config = configured("sft")
    content(lambda data: data[:-1])(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model\.safetensors has 79,871 bytes, and 79,872 are"):
        run(config)


def test_commands_name_the_file_too(configured, tmp_path):
    configured("sft")
    (tmp_path / "model" / NAME).write_bytes(LFS)
    with pytest.raises(ValueError, match=r"is a pointer of Git LFS"):
        coalign.generate(tmp_path / "model", "1+1=", max_new_tokens=2)
