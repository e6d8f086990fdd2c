"""Checkpoints that are written while training goes on hold what was there when they began."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_saver

from coalign.backends import trainer_state as checkpoint
from coalign.files import read_report
from tests.backends.batches import rollout
from tests.backends.test_fsdp import module, same, weights


@pytest.fixture
def gate(monkeypatch):
    """Background writers wait until the event is set."""
    gate, write = threading.Event(), checkpoint.BackgroundWriter._write

    def wait(self, *arguments):
        assert gate.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(checkpoint.BackgroundWriter, "_write", wait)
    return gate


@pytest.mark.parametrize("config", [{}, {"lora": {"rank": 2}}, {"ema": {"decay": 0.5}}], ids=["all", "lora", "ema"])
def test_files_are_those_of_a_save_that_waits(path, tmp_path, gate, config):
    trainer = module(path, **config)
    trainer.train_step(rollout(seed=0))
    names = {"model": trainer.save, "hf": trainer.save_hf}
    if "lora" in config:
        names["adapter"] = trainer.save_adapter
    if "ema" in config:
        names["hf_ema"] = lambda dir: trainer.save_hf(dir, average=True)
    for folder in ("waited", "later"):
        (tmp_path / folder).mkdir()
        if folder == "later":
            assert trainer.begin_saves()
        for name, save in names.items():
            save(tmp_path / folder / name)
    saved = weights(trainer)
    trainer.train_step(rollout(seed=1))  # changes tensors in place
    ended = weights(trainer)
    assert not same(saved, ended) and list((tmp_path / "later").iterdir()) == []
    gate.set()
    trainer.finish_saves()
    for name in names:
        assert read_report(tmp_path / "later" / name) == "" and read_report(tmp_path / "waited" / name) is None
        assert _list_files(tmp_path / "later" / name) == _list_files(tmp_path / "waited" / name)
        for file in (tmp_path / "waited" / name).glob("*.safetensors"):
            assert same(load_file(file), load_file(tmp_path / "later" / name / file.name))
    other = module(path, **config)
    other.load(tmp_path / "later" / "model")
    assert same(weights(other), saved)
    other.train_step(rollout(seed=1))
    assert same(weights(other), ended)  # so the optimizer's state is that of the moment, too


def _list_files(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_an_error_is_reported_raised_once_and_leaves_no_files(path, tmp_path, monkeypatch):
    def fail(*arguments, **keywords):
        (tmp_path / "model").mkdir()
        raise OSError(28, "No space left on device")

    trainer = module(path)
    trainer.begin_saves()
    with monkeypatch.context() as patch:
        patch.setattr(state_dict_saver, "save", fail)
        trainer.save(tmp_path / "model")
        with pytest.raises(OSError, match="No space left on device"):
            trainer.finish_saves()
    assert "No space left on device" in read_report(tmp_path / "model") and not (tmp_path / "model").exists()
    trainer.begin_saves()
    trainer.save(tmp_path / "model")
    trainer.finish_saves()
    assert read_report(tmp_path / "model") == ""


def test_what_a_writer_met_is_named_in_one_line(tmp_path):
    (tmp_path / "model").write_text("a file where the checkpoint's folder should be")
    with pytest.raises(
        OSError, match=r"^checkpoint .*model cannot be written: .*(File exists|Not a directory)"
    ) as problem:
        checkpoint.save(tmp_path / "model", {"model.weight": torch.ones(2)}, {"step": 1}, alone=True)
    assert "\n" not in str(problem.value)


def test_tensors_that_share_memory_share_it_in_the_copy():
    one = torch.arange(6.0).reshape(2, 3)
    copies = checkpoint.copy_to_host({"a": one, "b": one.view(2, 3), "part": one[0], "turned": one.t(), "step": 3})
    assert copies["a"].data_ptr() == copies["b"].data_ptr() != one.data_ptr()
    assert copies["part"].data_ptr() != one.data_ptr() and copies["step"] == 3
    expected = one.clone()
    one.zero_()
    assert torch.equal(copies["a"], expected) and torch.equal(copies["turned"], expected.t())
    assert torch.equal(copies["part"], expected[0])
