"""The device that commands compute on."""

import json

import pytest
import torch
from typer.testing import CliRunner

from coalign.cli import app
from coalign.report.display import Display
from coalign_serve.config.pipeline_file import load_pipeline
from coalign_serve.judges import choose_device
from coalign_serve.pipeline import check_pipeline
from tests.runs import write_data
from tests.tiny import tiny_model_dir


def test_auto_takes_the_accelerator_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert choose_device("auto") == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize(
    ("device", "reason"),
    [("cuda", "is not here: this machine has 0 cuda devices; use cpu"), ("gpu", "is no device; expected auto, cpu")],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(tmp_path, device, reason):
    with pytest.raises(ValueError, match=reason):
        choose_device(device)
    model, data = tiny_model_dir(tmp_path / "tiny"), write_data(tmp_path, "dpo")
    command = ["generate", str(model), "--prompt", "1+1=", "--device", device]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ValueError) and reason in str(result.exception)
    stage = {"generate": {"data": {"train": str(data)}, "device": device}}
    (tmp_path / "p.yaml").write_text(json.dumps({"model": str(model), "stages": [stage]}))
    with pytest.raises(ValueError, match=reason):
        check_pipeline(load_pipeline(tmp_path / "p.yaml"), Display(quiet=True))
