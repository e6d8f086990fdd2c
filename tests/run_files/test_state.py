"""What a run says of itself in state.json, and what is made of a missing or damaged one."""

import json
from pathlib import Path

import pytest

from coalign.engine.engine import Trainer
from coalign.run_files.lock import lock_folder
from coalign.run_files.state import RunState, StateFile, read_state
from tests.runs import run, settings, stopping_after


def read(config):
    return read_state(Path(config["output"]))


def test_a_run_says_where_it_stands_and_how_it_ended(tmp_path, monkeypatch):
    config = settings(tmp_path, "sft", steps=3, eval_at_start=False)
    seen, real = [], Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, batch: (seen.append(read(config)), real(self, batch))[1])
    with stopping_after(2):
        assert run(config) == 0
    assert seen == [RunState("running", "sft", step, 3) for step in (None, 1)]
    assert read(config) == RunState("ended", "sft", 2, 3, "test")
    assert run(config) == 0
    assert seen[2:] == [RunState("running", "sft", 2, 3)] and read(config) == RunState("ended", "sft", 3, 3)
    assert run(config) == 0  # finished already
    assert len(seen) == 3 and read(config) == RunState("ended", "sft", 3, 3)


def test_an_error_is_named_without_secrets(tmp_path, monkeypatch):
    config = settings(tmp_path, "sft", steps=2, eval_at_start=False)
    monkeypatch.setenv("HF_TOKEN", "hf_confidential")

    def fail(self, batch):
        raise RuntimeError("no answer from https://example.com?token=hf_confidential\nmore")

    monkeypatch.setattr(Trainer, "step", fail)
    with pytest.raises(RuntimeError):
        run(config)
    state = read(config)
    assert (state.status, state.reason) == (
        "failed",
        "RuntimeError: no answer from https://example.com?token=${env:HF_TOKEN}",
    )


def test_a_run_that_has_ended_does_not_stall(tmp_path):
    state = StateFile(tmp_path)
    state.note("ended", step=3, steps=3)
    state.note("stalled", reason="no process has been busy for 900 s")
    assert read_state(tmp_path) == RunState("ended", step=3, steps=3)


def test_a_killed_run_has_failed(tmp_path):
    with lock_folder(tmp_path):
        StateFile(tmp_path).note("stalled", algorithm="grpo", step=3, steps=9, reason="nothing for 900 s")
        assert read_state(tmp_path) == RunState("stalled", "grpo", 3, 9, "nothing for 900 s")
    assert read_state(tmp_path) == RunState("failed", "grpo", 3, 9)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, RunState("ended", reason="there is no state.json that says more")),
        ("[1]", RunState("ended", reason="there is no state.json that says more")),
        ('{"step": 1, "steps": -1, "algorithm": 5}', RunState("ended", step=1)),
        ('{"status": "better", "step": true, "reason": ["x"]}', RunState("ended")),
        (json.dumps({"status": "failed", "reason": "x" * 1000}), RunState("failed", reason="x" * 300)),
    ],
)
def test_files_of_strangers(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    assert read_state(tmp_path) == expected
