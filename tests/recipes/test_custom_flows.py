"""The worked examples of docs/writing_a_recipe.md, as they stand: drawn by `coalign check`, run here, run on Ray."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path

import pytest
import torch

from coalign import load_config
from coalign.backends.base import Module
from coalign.data.batch import Batch
from coalign.launch.check import check as examine
from coalign.recipes.sft import SFT
from coalign.report.display import Display
from coalign.roles import Trainable
from coalign.types import Stat
from examples.arithmetic import make_data, make_model
from examples.custom import committee, second_try
from tests.runs import ROOT, run_to_end, settings
from tests.tiny import tiny_model_dir

FLOWS = ("committee", "second_try")
SHORT = ["runtime.steps=2", "runtime.prompts_per_step=4", "runtime.trackers=[]", "runtime.plots=false"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The models and the data of the examples, in small."""
    home = tmp_path_factory.mktemp("examples")
    for seed, name in enumerate(("policy", "helpful", "safe", "judge")):
        tiny_model_dir(home / name, seed=seed)
    rows = [{"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)} for i in range(12)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_model(home / "sums" / "sft" / "model", hidden=16, layers=1)
    make_data(home / "sums" / "data")
    for file in (home / "sums" / "data").iterdir():  # of 10,000 rows, which every run would tokenise
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:48]))
    return home


OVERRIDES = {
    "committee": [
        *("models.policy.sampling.max_new_tokens=6", "models.judge.module=tests.judges:DigitJudge"),
        *("models.helpful.head_init=zero", "models.safe.head_init=zero"),
    ],
    "second_try": ["runtime.eval_every=0", "runtime.eval_at_start=false", "runtime.prompts_per_step=8"],
}


@pytest.fixture
def example(home, tmp_path, monkeypatch):
    """A function from an example's name to its configuration: that file, with the models of a test, and few steps."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PROMPTS", str(home / "prompts.jsonl"))
    for name in ("SUMS", "POLICY", "HELPFUL", "SAFE", "JUDGE"):
        monkeypatch.setenv(name, str(home / name.lower()))

    def example(name, *overrides):
        settings = [*SHORT, f"output={tmp_path / 'run'}", *OVERRIDES[name], *overrides]
        return load_config(ROOT / "examples" / "custom" / f"{name}.yaml", settings)

    return example


@pytest.mark.parametrize(
    "method",
    [
        committee.Committee.env_flow,
        committee.Committee.train_flow,
        committee.Committee.eval_flow,
        committee.Committee.assessed,
        second_try.SecondTry.env_flow,
    ],
    ids=lambda method: method.__qualname__,
)
def test_the_page_shows_the_example_as_it_is(method):
    page = (ROOT / "docs" / "writing_a_recipe.md").read_text()
    assert textwrap.dedent(inspect.getsource(method)).strip() in page


def test_check_draws_five_models(example, capsys):
    examine(example("committee"), Display())
    shown = capsys.readouterr().out
    assert "Committee: 5 models" in shown and "no problem found" in shown
    decide = shown[shown.index("\ndecide\n") : shown.index("\ngroup\n")]
    assert all(f"◀ {name}.forward_step" in decide for name in ("helpful", "safe", "judge"))


def test_check_draws_every_turn_of_the_loop(example, capsys):
    examine(example("second_try"), Display())
    shown = capsys.readouterr().out
    assert "policy.generate#3" in shown and "policy.generate#4" not in shown
    assert "value.train_step" in shown and "no problem found" in shown


def test_the_committee_decides(example):
    for line in run_to_end(example("committee")):
        assert line["unsafe"] == 0.0  # heads of zeros: nothing is below the limit
        assert line["reward/mean"] == pytest.approx(0.5 + 0.5)  # σ(0), and half of all comparisons are won
        assert {"time/helpful.forward_step", "time/safe.forward_step", "judge/verdict"} <= set(line)


def test_what_is_not_safe_counts_for_nothing_else():
    out = committee.decide(
        torch.tensor([0.0, 9.0, 0.0]), torch.tensor([0.1, -0.5, 0.0]), torch.tensor([1.0, 1.0, 0.0]), limit=0.0
    )
    assert out["reward"].tolist() == [1.5, -0.5, 0.5]
    assert out["unsafe"].value == pytest.approx(1 / 3)


def test_the_loop_ends_when_all_is_solved(example):
    config = example("second_try")
    for line in run_to_end(config):
        assert 1 <= line["tries"] <= 3
        assert line["samples/count"] == 8  # one of each prompt
        assert line["time/policy.generate"] > 0
    easy = example("second_try", "reward={fn: tests.functions:always}", f"output={config.output}_easy")
    assert [line["tries"] for line in run_to_end(easy)] == [1.0, 1.0]


class Distance(Module):
    """A module of one's own whose train_step has nothing to do with losses: it keeps the mean length of responses."""

    mean = 0.0

    def forward_step(self, batch, *, into="values"):
        return {into: torch.full((batch.tokens_total,), self.mean)}

    def train_step(self, batch):
        self.mean = float(batch.lengths.float().mean())
        return {"length": Stat(self.mean)}

    def save(self, directory):
        Path(directory).mkdir(parents=True)
        (Path(directory) / "mean").write_text(str(self.mean))

    def save_hf(self, directory):
        self.save(directory)


class Measured(SFT):
    """One batch without any column that a loss reads, and one as SFT has it."""

    models = {**SFT.models, "distance": Trainable}

    def train_flow(self, batch):
        self.distance.train_step(self.transform(without_masks, batch))
        return super().train_flow(batch)


class Unconfigured(Measured):
    """No loss at all, and a model of one's own is all that learns."""

    models = {"distance": Trainable}
    defaults = {"models": {}}

    @classmethod
    def roles(cls, config, loss):
        return cls.models

    def train_flow(self, batch):
        return self.distance.train_step(batch)


def without_masks(batch):
    return batch.only("tokens", "group")


def test_a_model_of_ones_own_learns_without_a_loss(tmp_path, capsys):
    own = {"module": "tests.recipes.test_custom_flows:Distance", "load": None}
    config = settings(tmp_path, "sft", steps=2, eval_at_start=False)
    config["data"].pop("eval")
    config |= {"algorithm": "tests.recipes.test_custom_flows:Measured"}
    config["models"]["distance"] = own
    loaded = load_config(config)
    examine(loaded, Display())
    assert "distance.train_step" in capsys.readouterr().out
    lines = run_to_end(loaded)
    assert len(lines) == 2 and all(line["distance/length"] > 0 and line["loss/value"] > 0 for line in lines)
    config |= {"algorithm": "tests.recipes.test_custom_flows:Unconfigured", "output": str(tmp_path / "unconfigured")}
    config["models"] = {"distance": own | {"load": config["models"]["trainer"]["load"]}}
    lines = run_to_end(load_config(config))
    assert all(line["length"] > 0 for line in lines)


def test_the_loss_of_ones_own_subclass_of_a_backend_is_tried(tmp_path):
    config = settings(tmp_path, "sft", steps=1)
    config["models"]["trainer"]["module"] = "tests.backends.test_fsdp:Watched"
    config["loss"] = {"fn": "policy_gradient"}
    message = r"models\.trainer: the loss `policy_gradient` fails on what the flow gives it"
    with pytest.raises(ValueError, match=message):
        examine(load_config(config), Display())


def samples(group, reward, at=0):
    rows = len(group)
    return Batch(torch.full((rows,), 2)).with_(
        tokens=torch.arange(at, at + 2 * rows, dtype=torch.int32),
        group=torch.tensor(group),
        reward=torch.tensor(reward),
    )


def test_what_is_solved_is_not_tried_again_and_the_best_of_all_tries_is_kept():
    far = second_try.APART
    first = samples([4, 4, 9, 9, 5], [0.2, 0.0, 1.0, 0.5, 0.0])
    prompts = samples([4, 9, 5], [0.0] * 3).only("tokens", "group")
    left = second_try.unsolved(prompts, first, enough=1.0)
    assert left["group"].tolist() == [4, 5]
    assert second_try.renumbered(left, number=1)["group"].tolist() == [4 + far, 5 + far]
    second = samples([4 + far, 4 + far, 5 + far], [0.1, 0.2, 0.3], at=100)
    best, stats = second_try.best_of(first, second)
    assert best["group"].tolist() == [4, 5, 9]
    assert best["tokens"].tolist() == [0, 1, 104, 105, 4, 5]
    assert stats["tries"].value == pytest.approx((1 + 2 + 1) / 3)
    assert len(second_try.unsolved(left, second, enough=0.2)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
def test_the_same_on_ray(example, name):
    here = run_to_end(example(name))
    config = example(name, "runtime.cluster=ray", f"output={example(name).output}_ray")
    there = run_to_end(config)
    for key in ("reward/mean", "loss/grad_norm"):
        assert [line[key] for line in there] == pytest.approx([line[key] for line in here], rel=1e-4)


def test_the_flow_from_nothing(tmp_path, monkeypatch):
    """The code and the YAML of the page, written to files and run."""
    page = (ROOT / "docs" / "writing_a_recipe.md").read_text()
    code, rest = page.split("```python\n", 1)[1].split("```", 1)
    yaml = rest.split("```yaml\n", 1)[1].split("```", 1)[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mine.py").write_text(code)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.yaml").write_text(yaml.replace("/path/to/model", str(tiny_model_dir(tmp_path / "model"))))
    own = ["runtime.steps=1", "models.policy.sampling.max_new_tokens=4", "runtime.plots=false", "runtime.threads=1"]
    config = load_config("mine.yaml", own)
    examine(config, Display())
    assert "advantage/std" in run_to_end(config)[0]
