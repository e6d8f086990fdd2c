"""The Python API: each function, functions passed as objects, hooks, errors, and docs/python.md as it stands."""

import json
import os
import re
import signal
import sys

import pytest
import rich.console
from typer.testing import CliRunner

import coalign
from coalign.cli import app
from coalign.config import ConfigError
from coalign.launch.plan import prepare
from coalign.report.display import Display
from tests.digits import digits
from tests.runs import ROOT, settings
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("api") / "model")


def grpo(path, **runtime):
    return settings(path, "grpo", steps=2, eval_at_start=False, **runtime)


def test_every_public_name_is_there():
    assert all(getattr(coalign, name) is not None for name in coalign.__all__)
    assert {"train", "load_config", "evaluate", "generate"} <= set(dir(coalign))
    with pytest.raises(AttributeError, match="module 'coalign' has no attribute 'trian'"):
        _ = coalign.trian


def test_train_takes_a_file_and_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings(tmp_path, "sft")))
    result = coalign.train(file, {"runtime.steps": 2, "runtime.eval_at_start": False}, quiet=True)
    assert [line["step"] for line in result.metrics] == [1, 2] and "loss/value" in result.metrics[0]
    assert result.folder == tmp_path / "run" and (result.model / "config.json").is_file()
    longer = coalign.train(str(file), {"runtime.steps": 3, "runtime.eval_at_start": False}, quiet=True)
    assert [line["step"] for line in longer.metrics] == [1, 2, 3]


def test_functions_are_passed_as_objects(tmp_path):
    calls = tmp_path / "calls"  # a list would stay empty here: the function runs in a process of its own

    def count(sample, *, worth=1.0):
        with calls.open("a") as file:
            file.write(f"{sample.group}\n")
        return worth * digits(sample)

    def reinforce(x, *, scale=1.0):
        return coalign.LossOutput(-scale * x.advantages * x.logprobs, {"own": coalign.Stat(scale)})

    config = grpo(tmp_path) | {"reward": [count, {"fn": lambda sample: 1.0, "name": "one", "weight": 0.0}]}
    result = coalign.train(config, loss={"fn": reinforce, "scale": 2.0}, quiet=True)
    assert len(calls.read_text().split()) == 2 * 4 * 4 + 4  # two steps, and the evaluation at the end
    assert {"reward/count/mean", "reward/one/mean"} <= set(result.metrics[0]) and result.metrics[0]["loss/own"] == 2.0


def test_a_function_of_a_module_is_written_as_its_path(tmp_path):
    by_name = coalign.load_config(grpo(tmp_path))
    by_object = coalign.load_config(grpo(tmp_path) | {"output": tmp_path / "run"}, reward=digits)
    assert by_object == by_name and by_object.reward[0].fn == "tests.digits:digits"


def test_ray_refuses_what_only_this_process_has(tmp_path, monkeypatch):
    config = coalign.load_config(grpo(tmp_path), {"runtime.cluster": "ray"}, reward=lambda sample: 1.0)
    with pytest.raises(ValueError, match=r"reward\[0\]\.fn: '<this process>:\d+\.lambda' is known to this process"):
        prepare(config)
    monkeypatch.setattr(sys.modules["__main__"], "digits", digits, raising=False)
    with pytest.raises(ValueError, match="'__main__:digits' is known to this process"):
        prepare(coalign.load_config(grpo(tmp_path), {"runtime.cluster": "ray", "reward": "__main__:digits"}))
    prepare(coalign.load_config(grpo(tmp_path), {"runtime.cluster": "ray"}, reward=digits))


def test_load_config_takes_a_configuration_again(tmp_path):
    config = coalign.load_config(grpo(tmp_path), {"models.trainer.optimizer.lr": 0.5})
    assert config.models["trainer"].optimizer.lr == 0.5 and config.advantage.fn == "group"
    assert coalign.load_config(config) is config
    assert coalign.load_config(config, {"seed": 7}) == config.model_copy(update={"seed": 7})
    with pytest.raises(ConfigError, match=r"override 'runtime.step': runtime.step: unknown key; did you mean 'steps'"):
        coalign.load_config(grpo(tmp_path), {"runtime.step": 1})


class Count(coalign.Hook):
    def __init__(self, at=None):
        self.seen, self.at = 0, at

    def after_step(self, engine, stats, batch):
        self.seen += 1
        stats["hook/seen"] = coalign.Stat(float(self.seen))
        if engine.step == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_hooks_add_metrics_and_keep_their_state(tmp_path):
    coalign.train(grpo(tmp_path), {"runtime.steps": 1}, hooks=[Count()], quiet=True)
    result = coalign.train(grpo(tmp_path), hooks=[Count()], quiet=True)
    assert [line["hook/seen"] for line in result.metrics] == [1, 2]
    with pytest.raises(ValueError, match="2 of them are called Count"):
        coalign.train(grpo(tmp_path), hooks=[Count(), Count()], quiet=True)


def test_a_run_that_was_stopped_raises(tmp_path):
    with pytest.raises(coalign.TrainingStopped, match="a signal or a request stopped the run") as caught:
        coalign.train(grpo(tmp_path), hooks=[Count(at=1)], quiet=True)
    assert caught.value.exit_code == 130
    assert [line["step"] for line in caught.value.result.metrics] == [1]
    assert (caught.value.result.model / "config.json").is_file()


def test_evaluate_and_its_command(tmp_path):
    config = grpo(tmp_path)
    found = coalign.evaluate(config, reward=digits)
    assert 0 <= found["eval/mean"] <= 1
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    shown = CliRunner().invoke(app, ["eval", str(tmp_path / "run.yaml")])
    assert shown.exit_code == 0 and "eval/mean" in shown.stdout
    with pytest.raises(ValueError, match=r"data\.eval: there is nothing to evaluate on"):
        coalign.evaluate(config, {"data.eval": [], "runtime.eval_prompts": None})


def test_generate(model, tmp_path):
    prompts = ["1+4=", [{"role": "user", "content": "2+5="}], {"prompt": "3+6=", "answer": "9"}]
    options = {"chat_template": "none", "samples": 2, "max_new_tokens": 6, "quiet": True}
    seen = []
    records = coalign.generate(model, prompts, on_record=seen.append, **options)
    assert seen == records and [(r["group"], r["index"]) for r in records] == [(g, i) for g in range(3) for i in (0, 1)]
    assert records[4]["answer"] == "9" and all(r["tokens"] <= 6 for r in records)
    best = coalign.generate(model, prompts, reward=lambda s: len(s.response), keep="best", **options)
    assert [r["score"] for r in best] == [max(len(r["response"]) for r in records[i : i + 2]) for i in (0, 2, 4)]
    file = tmp_path / "out.jsonl"
    kept = coalign.generate(model, "1+4=", output=file, **options)
    assert [r["response"] for r in kept] == [r["response"] for r in records[:2]] and file.is_file()
    with pytest.raises(ValueError, match="never reads 'x'; it has no arguments"):
        coalign.generate(model, "1+4=", chat_template_kwargs={"x": 1})
    with pytest.raises(ConfigError, match=r"sampling\.max_new_token: unknown key; did you mean 'max_new_tokens'"):
        coalign.generate(model, "1+4=", max_new_token=6)


def test_a_notebook_gets_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    display = Display()
    display.start(0, 2)
    display.step(1, {"loss/value": 0.5})
    display.close()
    assert capsys.readouterr().out.startswith("step 1/2 │ loss 0.5")


def test_the_page_runs_as_it_stands(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coalign.launch.run.plot_run", lambda folder: None)  # seconds for each of the runs
    (tmp_path / "model").symlink_to(model)
    rows = [{"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(tmp_path, "grpo", steps=2, eval_prompts=2)
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert all(f"coalign.{name}(" in "".join(blocks) for name in ("train", "load_config", "evaluate", "generate"))
    assert "reward/percent" in names["result"].metrics[-1]
