"""`coalign plan` and `coalign check --cluster` from the command line: what they print, write and refuse."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from coalign.cli import app, main
from packages.plan.tests.models import write_config
from tests.runs import ROOT

SCALE = {"7b_on_8": "1x8:H100", "30b_on_32": "4x8:H100", "70b_on_32": "4x8:H100", "300b_on_512": "64x8:H200"}
SCALE |= {"deepseek_v3_on_1024": "128x8:B300"}
GRPO = """# what the comments say
algorithm: grpo
output: {folder}/run
runtime:
  cluster: ray
  steps: 100
  prompts_per_step: 64   # prompts
  colocation: [[policy, trainer]]
data: {{train: {folder}/rows.jsonl}}
reward: {{fn: exact_match}}
models:
  policy:
    module: vllm
    load: {folder}/model
    compute_dtype: bfloat16
    num_gpu: 8             # all
    sampling: {{max_new_tokens: 256}}
  trainer: {{module: fsdp, num_gpu: 8}}
"""
OFFLINE = """
algorithm: {algorithm}
output: {folder}/run
runtime: {{cluster: ray, steps: 100, colocation: {colocation}}}
data: {{train: {folder}/rows.jsonl, max_tokens: 1024}}
models:
  trainer: {{load: {folder}/model, num_gpu: 8, compute_dtype: bfloat16, activation_checkpointing: full{head}}}
"""


@pytest.fixture
def folder(tmp_path):
    write_config(tmp_path / "model", num_hidden_layers=8)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text(GRPO.format(folder=tmp_path))
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def refusal(monkeypatch, capsys, *arguments: str) -> str:
    """The one line that a command ends with."""
    monkeypatch.setattr("sys.argv", ["coalign", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    shown = capsys.readouterr()
    [line] = shown.err.strip().splitlines()
    assert left.value.code == 2
    return line


def test_a_plan_shows_the_layout_and_better_ones_and_writes_the_best(folder):
    shown = run(
        "plan", folder / "run.yaml", "--cluster", "1x8:H100", "--top", "2", "--lengths", "100,256", "--write",
        folder / "best.yaml",
    )  # fmt: skip
    assert "as configured (synchronous)" in shown and "best layouts by seconds a step" in shown
    assert "why the others lose" in shown and "GPU-hours" in shown and "[trainer]" not in shown
    assert max(len(line) for line in shown.splitlines() if str(folder) not in line) <= 110
    written = yaml.safe_load((folder / "best.yaml").read_text())
    assert written.pop("include") == "run.yaml" and written
    again = run("plan", folder / "best.yaml", "--cluster", "1x8:H100", "--top", "0", "--lengths", "100,256")
    assert "DOES NOT FIT" not in again and "best layouts" not in again


def test_where_nothing_fits_the_cluster_that_does_is_named(folder):
    shown = run("plan", folder / "run.yaml", "--cluster", "1x1:L40S", "--top", "1")
    assert "none was found that fits" in shown and "with more such nodes, a layout fits: --cluster 2x1:L40S" in shown


@pytest.mark.parametrize(("algorithm", "head"), [("sft", ""), ("dpo", ""), ("reward_model", ", head: reward")])
def test_recipes_without_a_sampler_are_planned(folder, algorithm, head):
    together = "[[trainer, reference]]" if algorithm == "dpo" else "[]"
    text = OFFLINE.format(folder=folder, algorithm=algorithm, head=head, colocation=together)
    if algorithm == "dpo":
        text += "  reference: {num_gpu: 8}\n"
    (folder / "run.yaml").write_text(text)
    shown = run("plan", folder / "run.yaml", "--cluster", "1x8:H100", "--top", "1")
    assert "as configured: " in shown and "generate" not in shown and "GPU-hours" in shown


def test_a_trace_holds_the_predicted_step_beside_a_measured_one(folder):
    timeline = folder / "run" / "timeline"
    timeline.mkdir(parents=True)
    row = {"pid": 1, "tid": 1, "name": "generate", "ph": "X", "ts": 0, "dur": 1000}
    name = {"pid": 1, "tid": 0, "name": "process_name", "ph": "M", "args": {"name": "policy"}}
    thread = {**name, "tid": 1, "name": "thread_name"}
    (timeline / "step_3.json").write_text(json.dumps({"traceEvents": [name, thread, row]}))
    for file in ("step.json", "step.png"):
        shown = run("plan", folder / "run.yaml", "--cluster", "1x8:H100", "--top", "0", "--trace", folder / file)
        assert "step_3.json" in shown and (folder / file).stat().st_size > 100
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"predicted: policy", "predicted: trainer", "measured: policy"} <= named


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--cluster is missing"),
        (["--cluster", "8:H100"], "should be NODESxGPUS:NAME, such as 4x8:H100"),
        (["--cluster", "1x8:H101"], "GPU 'H101' is not known; the nearest is H100"),
        (["--cluster", "1x8:H100", "--lengths", "900,100"], "the mean should be above 0 and not above the maximum"),
        (["--cluster", "1x8:H100", "--lengths", "{folder}/run.yaml"], "each line should be a length in tokens"),
        (["--cluster", "1x8:H100", "--objective", "money"], "expected seconds or gpu-hours"),
        (["--cluster", "1x8:H100", "--write", "{folder}/run.yaml"], "is there already, and is left as it is"),
        (["--cluster", "1x8:H100", "--trace", "{folder}/run.yaml"], "is there already, and is left as it is"),
        (["--cluster", "1x8:H100", "--top", "0", "--trace", "{folder}/step.pdf"], "should end in .json"),
        (["--cluster", "1x8:H100", "--measure"], "--measure is for this machine"),
    ],
)
def test_wrong_options_are_refused_in_one_line(folder, monkeypatch, capsys, options, message):
    given = [option.format(folder=folder) for option in options]
    assert message in refusal(monkeypatch, capsys, "plan", folder / "run.yaml", *given)


def test_a_check_offers_the_nearest_layout_that_fits(folder, monkeypatch, capsys):
    write_config(folder / "model", num_hidden_layers=48)
    changes = ["models.trainer.max_tokens_per_micro=32768", "models.policy.tensor_parallel=2"]
    said = refusal(monkeypatch, capsys, "check", folder / "run.yaml", *changes, "--cluster", "1x8:H100")
    assert "models.trainer does not fit: " in said and "its activations" in said
    offer = said.partition("the nearest layout that fits: ")[2].split(" ")
    assert "no problem found" in run("check", folder / "run.yaml", *changes, *offer, "--cluster", "1x8:H100")


def test_a_check_offers_a_division_of_fewer_devices(folder, monkeypatch, capsys):
    said = refusal(monkeypatch, capsys, "check", folder / "run.yaml", "--cluster", "1x4:H100")
    assert "ask for 8 devices" in said and "there are 4" in said
    offer = said.partition("the nearest layout that fits: ")[2]
    assert "models.policy.num_gpu=4" in offer or "models.policy.num_gpu=2" in offer


@pytest.mark.parametrize("name", SCALE)
def test_the_examples_of_scale_are_accepted_on_their_clusters(name):
    shown = run("check", ROOT / f"examples/scale/{name}.yaml", "--cluster", SCALE[name])
    assert "no problem found" in shown and "has no tokenizer" in shown
    header = (ROOT / f"examples/scale/{name}.yaml").read_text().splitlines()[:5]
    assert any("seconds a step" in line for line in header) and all(line.startswith("#") for line in header)


def test_the_figures_as_json(folder):
    words = ["plan", str(folder / "run.yaml"), "--cluster", "1x8:H100", "--top", "2", "--json"]
    done = CliRunner().invoke(app, words)
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["problems"] == [] and told["cluster"] == "1x8:H100"
    configured, layouts = told["configured"], told["layouts"]
    assert configured["gpu_hours"] == pytest.approx(configured["seconds"] * 8 / 3600)
    assert sum(load["devices"] for load in told["memory"]) >= 8 and all(load["peak"] > 0 for load in told["memory"])
    assert layouts and layouts[0]["settings"] and layouts[0]["seconds"] <= configured["seconds"]
    refused = CliRunner().invoke(app, ["plan", str(folder / "run.yaml"), "--json"])
    assert refused.exit_code == 1 and "--cluster is missing" in json.loads(refused.stdout)["problems"][0]["message"]
