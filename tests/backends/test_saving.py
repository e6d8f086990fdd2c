"""How a model is written."""

from transformers import modeling_utils

from coalign.backends import pretrained
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from tests.tiny import tiny_model_dir


def test_a_model_is_saved_without_being_unwrapped(tmp_path, monkeypatch):
    """To unwrap it imports DeepSpeed and MLflow where they are installed."""
    config = ModelConfig(load=str(tiny_model_dir(tmp_path / "model")))
    model = pretrained.load(config, seed=0)
    asked = []
    monkeypatch.setattr(modeling_utils, "unwrap_model", asked.append)
    pretrained.build_writer(model, config, Context(), tmp_path / "saved")(model.state_dict())
    assert not asked
    assert modeling_utils.unwrap_model == asked.append  # whatever else saves in this process is left as it was
    written = (tmp_path / "saved" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "model" / "model.safetensors").read_bytes()
