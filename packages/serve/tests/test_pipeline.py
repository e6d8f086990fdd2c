"""Pipelines: what stages hand on, what is done again, killed anywhere, the examples, bad input."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coalign.cli import app
from coalign.config import ConfigError
from coalign.engine.hooks.recorder import MetricsRecorder
from coalign.report.display import Display
from coalign_serve import pipeline
from coalign_serve.config.pipeline_file import load_pipeline
from coalign_serve.pipeline_check import is_pipeline
from coalign_serve.resumable import ResumableOutput
from packages.serve.tests.interruption import Killed, kill_after, read_rows, write_rows
from tests.runs import ROOT
from tests.tiny import tiny_model_dir

EXAMPLES = ROOT / "examples" / "pipelines"
TINY = """
output: {home}/{output}
model: {home}/model
rounds: {rounds}
stages:
  - generate:
      data: {{train: {home}/gsm8k_train.jsonl, prompt_key: question, chat_template: none}}
      prompts: 4
      samples: 4
      sampling: {{max_new_tokens: 8}}
      native: {{max_sequences: 2}}
  - score: {{reward: "tests.digits:digits"}}
  - select: {{keep: best, truncated: keep}}
  - train:
      algorithm: sft
      runtime:
        {{steps: 3, prompts_per_step: 2, save_every: 1, threads: 1, plots: false, trackers: [], cluster: local}}
      data: {{train: "${{stages.select.output}}", chat_template: none}}
      models: {{trainer: {{load: "${{model}}", optimizer: {{lr: 3.0e-3}}}}}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    tiny_model_dir(path / "model")
    rows = [{"question": f"{i}+{i + 3}=", "answer": f"#### {2 * i + 3}"} for i in range(10)]
    write_rows(path / "gsm8k_train.jsonl", *rows)
    return path


def write(home, output, rounds=2, text=TINY):
    path = home / f"{output}.yaml"
    path.write_text(text.format(home=home, output=output, rounds=rounds))
    return path


def run(path, *overrides):
    """The exit code, and what was shown."""
    display = Display(out=Console(record=True, width=200), err=Console(record=True, width=200), quiet=True)
    code = pipeline.run_pipeline(load_pipeline(path, overrides), display)
    return code, display.out.export_text() + display.err.export_text()


def weights(folder):
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(home):
    """Two rounds without a disturbance."""
    assert run(write(home, "whole"))[0] == 0
    return home / "whole"


def test_what_the_stages_hand_on(home, whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, second = (read_rows(whole / f"round_{k}" / "01_generate" / "responses.jsonl") for k in (1, 2))
    assert [len(first), len(second)] == [16, 16]
    assert not {r["_row"] for r in first} & {r["_row"] for r in second}  # other prompts in each round
    scored = read_rows(whole / "round_1" / "02_score" / "scored.jsonl")
    assert [{k: v for k, v in r.items() if k != "score"} for r in scored] == first
    best = {g: max(r["score"] for r in scored if r["group"] == g) for g in range(4)}
    chosen = read_rows(whole / "round_1" / "03_select" / "selected.jsonl")
    assert {r["group"]: r["score"] for r in chosen} == best
    trained = [whole / f"round_{k}" / "04_train" for k in (1, 2)]
    assert len({weights(folder) for folder in trained}) == 2
    settings = (trained[1] / "config.yaml").read_text()
    assert f"load: {trained[0] / 'model'}" in settings and f"output: {trained[1]}" in settings
    AutoModelForCausalLM.from_pretrained(trained[1] / "model")
    AutoTokenizer.from_pretrained(trained[1] / "model")
    state = json.loads((trained[0] / "stage.json").read_text())
    assert state["done"] and state["counts"] == {"step": 3} and state["seconds"] > 0
    assert state["depends"]["models.trainer.optimizer.lr"] == 3e-3 and "output" not in state["depends"]


def test_what_is_done_is_not_done_again(home, whole):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file() and p.name != ".lock"}
    code, shown = run(home / "whole.yaml")
    assert code == 0 and shown.count("done before") == 8
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file() and p.name != ".lock"} == before
    assert run(home / "whole.yaml", "stages.train.runtime.save_every=2")[1].count("done before") == 8


def test_a_changed_setting_makes_that_stage_and_what_follows_again(home, whole):
    path = write(home, "changed")
    run(path, "rounds=1")
    code, shown = run(path, "rounds=1", "stages.select.keep=threshold", "stages.select.threshold=0.1")
    assert code == 0 and shown.count("done before") == 2
    assert "round 1 select is done anew: keep, threshold changed" in shown
    assert "round 1 train is done anew: data.train[0].path changed" in shown
    assert weights(home / "changed" / "round_1" / "04_train") != weights(whole / "round_1" / "04_train")
    run(path, "rounds=1")
    assert weights(home / "changed" / "round_1" / "04_train") == weights(whole / "round_1" / "04_train")


NEUTRAL = [
    *("runtime.cluster=auto", "runtime.ray_address=127.0.0.1:1", "runtime.wait_for_devices=1.0", "runtime.stall=5.0"),
    *("runtime.device_memory=2.0", "runtime.call_timeout=60.0", "runtime.timeline_every=1", "sync.transport=disk"),
    *("runtime.profile={steps: [2], models: [trainer]}", "data.cache=nowhere", "models.trainer.placement=spread"),
]


def test_settings_without_effect_keep_a_finished_stage(whole):
    states = {path: path.read_text() for path in whole.rglob("stage.json")}
    overrides = [*(f"stages.train.{setting}" for setting in NEUTRAL), "stages.generate.data.cache=nowhere"]
    code, shown = run(whole.with_name("whole.yaml"), *overrides)
    assert code == 0 and shown.count("done before") == 8 == len(states), shown
    assert {path: path.read_text() for path in whole.rglob("stage.json")} == states


def test_a_stage_that_no_longer_fits_is_moved_aside(home):
    text = TINY[: TINY.index("  - train:")]
    path = write(home, "aside", rounds=1, text=text)
    assert run(path)[0] == 0
    stage = home / "aside" / "round_1" / "03_select"
    contents = []
    for number, threshold in ((1, 0.0), (2, 0.05)):
        contents.append((stage / "selected.jsonl").read_bytes())
        (stage / "notes.txt").write_text(f"mine {number}")
        code, shown = run(path, f"stages.select.threshold={threshold}")
        assert code == 0
        assert f"03_select.before-{number}" in shown.replace("\n", "")
    for number, expected in enumerate(contents, start=1):
        moved = stage.with_name(f"03_select.before-{number}")
        assert (moved / "selected.jsonl").read_bytes() == expected
        assert (moved / "notes.txt").read_text() == f"mine {number}"
    assert not (stage / "notes.txt").exists() and (stage / "selected.jsonl").exists()


def test_a_changed_reward_function_is_another_setting(home, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "rewards_of_mine.py"
    source.write_text("def reward(sample):\n    return float(len(sample.response))\n")
    path = write(home, "source", rounds=1)
    run(path, "stages.score.reward=rewards_of_mine:reward")
    # Of another length: Python keeps compiled code while second and size of a source are those that it knows.
    source.write_text("def reward(sample):\n    return -2.0 * float(len(sample.response))\n")
    monkeypatch.delitem(sys.modules, "rewards_of_mine")  # as in another process
    _, shown = run(path, "stages.score.reward=rewards_of_mine:reward")
    assert "round 1 score is done anew: reward[0].fn (source) changed" in shown
    assert "round 1 select is done anew: data[0] changed" in shown
    assert "round 1 train is done anew: data.train[0].path changed" in shown
    assert shown.count("done before") == 1


@pytest.mark.parametrize(
    ("owner", "name", "times"),
    [
        pytest.param(ResumableOutput, "add", 1, id="while generating", marks=pytest.mark.slow),
        pytest.param(ResumableOutput, "finish", 1, id="between a stage's output and its record"),
        pytest.param(ResumableOutput, "add", 3, id="while scoring", marks=pytest.mark.slow),
        pytest.param(pipeline, "select", 1, id="after selecting", marks=pytest.mark.slow),
        pytest.param(MetricsRecorder, "after_step", 2, id="while training", marks=pytest.mark.slow),
        pytest.param(pipeline, "train", 1, id="after training", marks=pytest.mark.slow),
        pytest.param(MetricsRecorder, "after_step", 5, id="while training in the second round", marks=pytest.mark.slow),
    ],
)
def test_killed_anywhere_the_weights_are_the_same(home, whole, monkeypatch, request, owner, name, times):
    output = request.node.callspec.id.replace(" ", "_").replace("'", "")
    path = write(home, output)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, owner, name, times)
        run(path)
    code, shown = run(path)
    assert code == 0 and "goes on" in shown
    for k in (1, 2):
        assert weights(home / output / f"round_{k}" / "04_train") == weights(whole / f"round_{k}" / "04_train")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigkill_again_and_again(home, whole):
    path = write(home, "sigkill")
    command = [sys.executable, "-m", "coalign.cli", "pipeline", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for awaited in (
        "round_1/01_generate/responses.jsonl.partial",
        "round_1/04_train/checkpoints/step_1/manifest.json",
        "round_2/04_train/checkpoints/step_2/manifest.json",
    ):
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (home / "sigkill" / awaited).exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    assert weights(home / "sigkill" / "round_2" / "04_train") == weights(whole / "round_2" / "04_train")


SMALL = [
    *("rounds=2", "stages.generate.data.chat_template=none", "stages.generate.prompts=4", "stages.generate.samples=4"),
    *("stages.generate.sampling.max_new_tokens=8", "stages.score=tests.digits:digits", "stages.select.truncated=keep"),
    "stages.train.runtime={steps: 2, prompts_per_step: 2, threads: 1, plots: false, trackers: []}",
    "stages.train.data.chat_template=none",
]


EXAMPLE_RUNS = [("rejection_sampling", ["stages.select.threshold=null"]), ("iterative_dpo", [])]


@pytest.mark.parametrize(("name", "more"), EXAMPLE_RUNS)
def test_the_examples(home, monkeypatch, name, more):
    monkeypatch.setenv("MODEL", str(home / "model"))
    monkeypatch.setenv("GSM8K", str(home))
    path = EXAMPLES / f"{name}.yaml"
    assert len(path.read_text().splitlines()) < 40
    pipeline.check_pipeline(load_pipeline(path), Display(out=Console(quiet=True)))
    assert run(path, f"output={home / name}", *SMALL, *more)[0] == 0
    first, second = (home / name / f"round_{k}" / "04_train" for k in (1, 2))
    assert weights(first) != weights(second)


def test_a_run_of_its_own_as_a_stage(home):
    (home / "sft.yaml").write_text(
        "algorithm: sft\noutput: elsewhere\nseed: 5\nruntime: {steps: 2, prompts_per_step: 2, plots: false}\n"
        "data: {train: '${stages.select.output}', chat_template: none}\n"
        "models: {trainer: {load: '${model}', optimizer: {lr: 1.0e-3, warmup: '${round}'}}}\n"
    )
    text = TINY[: TINY.index("  - train:")]
    path = write(home, "file", text=text + "  - train: sft.yaml\n")
    more = write(home, "more", text=text + "  - {{name: fine, train: {{include: sft.yaml, seed: 6}}}}\n")
    (first, second), (other, _) = (
        [s for s in pipeline.plan_stages(load_pipeline(p)) if s.task == "train"] for p in (path, more)
    )
    assert (first.settings.seed, other.settings.seed, other.name) == (5, 6, "fine")
    assert [s.settings.models["trainer"].optimizer.warmup for s in (first, second)] == [1, 2]
    assert second.settings.models["trainer"].load == str(first.output)


def test_short_forms(home):
    overrides = ["stages.score=math", "stages.select=best_worst"]
    stages = pipeline.plan_stages(load_pipeline(write(home, "short"), overrides))
    assert [reward.fn for reward in stages[1].settings.reward] == ["math"]
    assert stages[2].settings.keep == "best_worst" and stages[2].settings.data == [str(stages[1].output)]


def test_a_reward_model_does_not_become_the_current_model(home):
    text = TINY + (
        "  - name: judge\n    train:\n      algorithm: reward_model\n      data: {{train: pairs.jsonl}}\n"
        '      models: {{trainer: {{load: "${{model}}"}}}}\n'
        '  - name: again\n    score: {{reward_model: "${{stages.judge.output}}"}}\n'
    )
    (home / "pairs.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    stages = {(s.round, s.name): s for s in pipeline.plan_stages(load_pipeline(write(home, "judge", text=text)))}
    trained = stages[1, "train"].output
    assert stages[1, "judge"].settings.models["trainer"].load == str(trained)
    assert stages[2, "generate"].settings.model == str(trained)
    assert stages[1, "again"].settings.reward_model == str(stages[1, "judge"].output)
    assert stages[1, "again"].settings.data.train[0].path == str(stages[1, "judge"].output)


BAD_TEXTS = [  # what stands in TINY, what is put there, and what is said
    ("samples: 4", "sample: 4", "line 9: stages[0].generate.sample: unknown key; did you mean 'samples'?"),
    ("keep: best,", "keep: bset,", "line 13: stages[2].select.keep: is 'bset'; expected best | threshold | all | b"),
    ("- select:", "- selct:", "line 13: stages[2].selct: unknown key; did you mean 'select'?"),
    ("stages.select.out", "stages.selct.out", "line 18: stages[3].train.data.train: '${stages.selct.output}'"),
    ("lr: 3.0e-3", "l: 3.0e-3", "line 19: stages[3].train.models.trainer.optimizer.l: unknown key"),
    ("algorithm: sft", "algorithm: sff", "line 15: stages[3].train.algorithm: 'sff' is not in coalign.recipes"),
    ("digits:digits", "digits:digit", "'tests.digits:digit': 'tests.digits' has no 'digit'; did you mean 'digits'?"),
    ("/model\n", "/modle\n", "line 3: model: there is no directory"),
    ("gsm8k_train", "gsm8k_trian", "line 7: stages[0].generate.data.train.path: there is no file"),
    ("  - score: ", "  - {{name: select, score: ", "a second stage is called 'select'; give it a `name`"),
    ("rounds: 2", "round: 2", "line 4: round: unknown key; did you mean 'rounds'?"),
    ("model: {home}/model\n", "", "stages[0].generate.model: missing: give the pipeline's `model`, or one here"),
]
BAD_OVERRIDES = [
    ("stages.tran.seed=1", "there is no stage 'tran'; did you mean 'train'?"),
    ("stages.train=5", "stages[3].train: is 5; expected a mapping of keys to values"),
    ("stages.generate=best", "stages[0].generate: is 'best'; expected a mapping of keys to values"),
    ("stages.train.sed=1", "override 'stages[3].train.sed=1': stages[3].train.sed: unknown key"),
    ("stages.select.data=nothing.jsonl", "there is no file 'nothing.jsonl'"),
    ("stages.train.runtime.save_copies_to=s3://bucket/run", "is not for stages"),
]
BAD_FILES = [
    ("output: {home}/x\n", "stages: missing"),
    ("stages: [{{score: {{}}, select: {{}}}}]\n", "stages[0]: has `score` and `select`; a stage is one of generate"),
    ("stages: [{{select: {{keep: best}}}}]\n", "stages[0].select.data: missing: no stage comes before"),
]


def bad_inputs():
    whole = TINY.replace("rounds: {rounds}", "rounds: 2")
    for old, new, message in BAD_TEXTS:
        text = whole.replace(old, new, 1)
        if "name: select" in new:
            text = text.replace('"tests.digits:digits"}}', '"tests.digits:digits"}}}}')
        yield pytest.param(text, [], message, id=new.strip())
    yield from (pytest.param(whole, [override], message, id=override) for override, message in BAD_OVERRIDES)
    yield from (pytest.param(text, [], message, id=text.strip()) for text, message in BAD_FILES)


@pytest.mark.parametrize(("text", "overrides", "message"), bad_inputs())
def test_bad_input(home, text, overrides, message):
    path = write(home, "bad", text=text)
    with pytest.raises(ValueError) as caught:
        pipeline.plan_stages(load_pipeline(path, overrides))
    assert message.replace("line ", f"{path}:") in str(caught.value)


def test_check_knows_a_pipeline_from_a_run(home):
    assert is_pipeline(write(home, "whole"))
    assert not is_pipeline(ROOT / "examples" / "gsm8k_sft.yaml")
    assert not is_pipeline(home / "nothing.yaml")  # reading it as a run says what is wrong
    with pytest.raises(ConfigError, match="there is no file"):
        load_pipeline(home / "nothing.yaml")
    shown = CliRunner().invoke(app, ["check", str(home / "whole.yaml"), "rounds=1"])
    assert shown.exit_code == 0 and "round 1 select: keep best" in shown.stdout and "round 2" not in shown.stdout


@pytest.mark.slow
def test_a_training_run_that_is_stopped_ends_the_pipeline_with_its_code(home, whole, monkeypatch):
    path = write(home, "stopped")
    with monkeypatch.context() as patch:
        real = MetricsRecorder.after_step

        def after_step(self, engine, stats, batch):
            real(self, engine, stats, batch)
            os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr(MetricsRecorder, "after_step", after_step)
        assert run(path)[0] == 128 + signal.SIGTERM
    assert not (Path(home) / "stopped" / "round_2").exists()
    assert run(path)[0] == 0
    assert weights(home / "stopped" / "round_2" / "04_train") == weights(whole / "round_2" / "04_train")
