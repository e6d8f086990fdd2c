"""`--dtype auto`: bfloat16 for models of 16 bits where the processor multiplies it, and the line that says so."""

import json
import logging

import pytest
import torch

import coalign
from coalign.backends.engines.native import kernels
from coalign.config import load_section
from coalign.report.display import Display
from coalign_serve.config.stages import GenerateConfig
from coalign_serve.generate import generate
from coalign_serve.run_model import choose_dtype
from tests.runs import settings
from tests.tiny import tiny_model_dir


def rewrite(directory, path, dtype, name="model.safetensors"):
    """A copy of a model whose weights are stored in another dtype."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    if name == "pytorch_model.bin":
        model.config.save_pretrained(path)
        torch.save(model.state_dict(), path / name)
    else:
        model.save_pretrained(path)
    AutoTokenizer.from_pretrained(directory).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    plain = tiny_model_dir(folder / "float32", layers=1)
    short = {name: rewrite(plain, folder / name, getattr(torch, name)) for name in ("bfloat16", "float16")}
    pickle = folder / "pickle"
    pickle.mkdir()
    return {"float32": plain, **short, "pickle": rewrite(plain, pickle, torch.bfloat16, "pytorch_model.bin")}


@pytest.fixture
def fast(monkeypatch):
    def set_speed(is_fast):
        monkeypatch.setattr(kernels, "multiplies_bf16", lambda: is_fast)

    return set_speed


@pytest.mark.parametrize(("name", "chosen"), [("float32", 32), ("bfloat16", 16), ("float16", 16), ("pickle", 16)])
def test_the_checkpoint_and_the_processor_choose(models, fast, name, chosen):
    fast(True)
    assert choose_dtype("auto", str(models[name]), "cpu") == {32: "float32", 16: "bfloat16"}[chosen]
    assert choose_dtype("auto", str(models[name]), "mps") == {32: "float32", 16: "bfloat16"}[chosen]
    fast(False)
    assert choose_dtype("auto", str(models[name]), "cpu") == "float32"
    for asked in ("float32", "bfloat16"):
        assert choose_dtype(asked, str(models[name]), "cpu") == asked


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_an_older_gpu_computes_in_float32(models, monkeypatch, capability, chosen):
    monkeypatch.setattr("coalign_serve.run_model.get_compute_capability", lambda device: capability)
    assert choose_dtype("auto", str(models["bfloat16"]), "cuda:0") == chosen


@pytest.mark.parametrize(("bytes_", "chosen"), [(0.3, "bfloat16"), (0.52, "bfloat16"), (1.01, "float32")])
def test_a_gguf_file_has_as_many_bits_as_it_has_bytes(tmp_path, models, monkeypatch, fast, bytes_, chosen):
    fast(True)
    size = (models["float32"] / "model.safetensors").stat().st_size
    (tmp_path / "m.gguf").write_bytes(bytes(int(size * bytes_)))
    monkeypatch.setattr("coalign_serve.run_model.find_directory", lambda name: models["float32"])
    assert choose_dtype("auto", str(tmp_path / "m.gguf"), "cpu") == chosen


def test_generate_says_what_it_computes_in(tmp_path, models, fast, capsys):
    fast(True)
    for name, told in (("float32", "float32"), ("bfloat16", "bfloat16")):
        data = tmp_path / "p.jsonl"
        data.write_text('{"prompt": "1+1="}\n')
        section = {"model": str(models[name]), "data": {"train": str(data)}, "sampling": {"max_new_tokens": 2}}
        generate(load_section(GenerateConfig, section), lambda record: None, Display())
        assert f"tokens/s, {told})" in capsys.readouterr().err


def test_a_slow_processor_is_not_warned_about_by_auto(models, fast, caplog):
    fast(False)
    with caplog.at_level(logging.WARNING):
        choose_dtype("auto", str(models["bfloat16"]), "cpu")
    assert not caplog.records


def test_another_model_is_evaluated_in_its_own_dtype(tmp_path, models, fast, capsys):
    fast(True)
    config = settings(tmp_path, "sft")
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config))
    losses = {}
    for name, dtype in (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        losses[name, dtype] = coalign.evaluate(file, model=models[name], dtype=dtype, quiet=True)["eval/loss/value"]
        expected = name if dtype == "auto" else dtype
        assert capsys.readouterr().err.splitlines()[-1] == f"{models[name]}: {expected}"
    assert len({*losses.values()}) > 1
    with pytest.raises(ValueError, match=r"dtype bfloat16 is for another model.*models\.NAME\.dtype"):
        coalign.evaluate(file, dtype="bfloat16")
