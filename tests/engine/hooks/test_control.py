"""Runs that are asked to save, to stop and to change their processes while they go."""

import json
from pathlib import Path

import pytest

import coalign
from coalign.cli.ask_run import ask_run, scale_run
from coalign.report.display import Display
from coalign.run_files.control import ANSWERS, NAME, ControlRequest, submit
from tests.runs import metrics, run, settings


class AskingAtStep1(coalign.Hook):
    """Writes ``content`` as a request of the run after its first step, and tries to ask for more."""

    def __init__(self, content) -> None:
        self.content = content
        self.problem = ""

    def after_step(self, engine, stats, batch) -> None:
        if engine.step == 1:
            folder = Path(engine.config.output)
            (folder / NAME).write_text(json.dumps({"id": "mine", "requests": self.content}))
            with pytest.raises(ValueError) as caught:
                submit(folder, ControlRequest("save"))
            self.problem = str(caught.value)


def train(config, *content) -> tuple[int, list[dict]]:
    """Train, and ask after the first step; the exit code and the answer."""
    hook = AskingAtStep1(list(content))
    code = run(config, hooks=[hook])
    assert "has another request to answer" in hook.problem
    folder = Path(config["output"])
    assert not (folder / NAME).exists()
    (answer,) = json.loads((folder / ANSWERS).read_text())["answers"]
    assert answer["id"] == "mine"
    return code, answer["results"]


def test_a_run_saves_when_asked_and_refuses_what_it_does_not_know(tmp_path):
    config = settings(tmp_path, "sft", steps=3, eval_at_start=False)
    scale = {"do": "scale", "models": {"trainer": 2, "judge": 1}}
    code, results = train(config, {"do": "sav"}, scale, {"do": "save"})
    folder = Path(config["output"])
    saved = folder / "checkpoints" / "step_1"
    assert code == 0 and saved.is_dir() and len(metrics(config)) == 3
    assert not (folder / "rollouts").exists()  # there are no rollouts
    done = [(result["do"], result["done"]) for result in results]
    assert done == [("", False), ("scale", False), ("scale", False), ("save", True)]
    texts = [result["text"] for result in results]
    assert texts[0].startswith("refused: a run cannot be asked to 'sav'") and "did you mean 'save'" in texts[0]
    assert texts[1].startswith("trainer: refused: models.trainer runs in this process")
    assert texts[2] == "judge: refused: there is no model of that name; there are trainer"
    assert texts[3] == f"step 1 is in {saved}"
    for ask, request in ((ask_run, ControlRequest("stop")), (scale_run, ["trainer=2"])):
        with pytest.raises(ValueError, match="no run is going in") as caught:
            ask(folder, request, Display())
        assert "\n" not in str(caught.value)


def test_a_run_that_is_asked_to_stop_ends_after_its_step_with_a_checkpoint(tmp_path):
    config = settings(tmp_path, "sft", steps=3, eval_at_start=False)
    code, results = train(config, {"do": "stop"})
    saved = Path(config["output"]) / "checkpoints" / "step_1"
    assert code == 143 and [line["step"] for line in metrics(config)] == [1] and (saved / "manifest.json").exists()
    assert results == [{"do": "stop", "done": True, "text": f"the run ends after step 1, which is in {saved}"}]


def test_a_step_that_cannot_be_saved_is_refused_and_ends_nothing(tmp_path, monkeypatch):
    from coalign.checkpoint.folder import CheckpointFolder

    config = settings(tmp_path, "sft", steps=2, eval_at_start=False)
    write = CheckpointFolder.write

    def fail(self, step, files):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointFolder, "write", fail)
    code, results = train(config, {"do": "save"}, {"do": "stop"})
    monkeypatch.setattr(CheckpointFolder, "write", write)
    assert code == 0 and len(metrics(config)) == 2
    assert [result["done"] for result in results] == [False, False]
    assert all("refused: OSError: [Errno 28] No space left" in result["text"] for result in results)
