"""Runs that keep an average of their weights."""

from pathlib import Path

from safetensors.torch import load_file

from tests.runs import run, settings


def test_it_is_exported_beside_the_weights(tmp_path):
    """tests/engine/test_adapters.py shows that it survives a restart."""
    config = settings(tmp_path, "sft", steps=2, eval_at_start=False)
    config["models"]["trainer"] |= {"ema": {"decay": 0.5}, "optimizer": {"lr": 3e-3, "schedule": "constant"}}
    run(config)
    saved = Path(config["output"]) / "checkpoints" / "step_2"
    start, own, average = (
        load_file(d / "model.safetensors") for d in (tmp_path / "model", saved / "hf", saved / "hf_ema")
    )
    for name, tensor in average.items():  # between where it began and where it came to
        assert (tensor - own[name]).norm() < (start[name] - own[name]).norm()


def test_each_model_that_learns_may_have_its_own(tmp_path):
    config = settings(tmp_path, "ppo", steps=1, eval_at_start=False)
    config["data"].pop("eval")
    config["models"]["value"] = {"ema": {"decay": 0.9}}
    run(config)
    folders = {p.name for p in (Path(config["output"]) / "checkpoints" / "step_1").iterdir() if p.is_dir()}
    assert folders == {"models", "hf", "hf_value", "hf_value_ema"}
