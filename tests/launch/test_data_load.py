"""From a configuration to an engine: what is refused before anything loads."""

from collections import Counter

import pytest

from coalign import load_config
from coalign.config.schema import RunConfig
from coalign.engine.engine import Engine
from coalign.launch.check import check
from coalign.launch.data_load import load_data
from coalign.launch.plan import prepare
from coalign.recipes.grpo import GRPO
from coalign.report.display import Display
from tests.runs import run, settings


def test_a_recipe_of_ones_own_with_an_unknown_kind_of_data(tmp_path, monkeypatch):
    (tmp_path / "with_unknown_source.py").write_text(
        "from coalign.engine.engine import Engine\nclass Mine(Engine):\n    source = 'preference'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"Mine\.source: 'preference' is no kind of data.*preferences"):
        prepare(RunConfig(algorithm="with_unknown_source:Mine", models={}))


@pytest.mark.parametrize("name", ["tokenizer", "hooks", "transform"])
def test_a_model_whose_name_the_engine_uses(tmp_path, name):
    config = settings(tmp_path, "grpo")
    config["models"][name] = {"load": config["models"]["policy"]["load"], "head": "reward", "head_init": "zero"}
    config["reward"] = [{"model": name}]
    with pytest.raises(ValueError, match=rf"models\.{name}: GRPO has an attribute of that name; rename it"):
        check(load_config(config), Display(quiet=True))


@pytest.fixture
def counts(monkeypatch):
    """How often a run was prepared (``prepare`` asks the recipe to check each time), and engines were built."""
    counts = Counter()
    checked, built = GRPO.check, Engine.__init__

    def count_check(cls, config, loss):
        counts["prepared"] += 1
        checked(config, loss)

    def count_engine(self, plan, cluster, data=None):
        counts[type(cluster).__name__] += 1
        built(self, plan, cluster, data)

    monkeypatch.setattr(GRPO, "check", classmethod(count_check))
    monkeypatch.setattr(Engine, "__init__", count_engine)
    return counts


def test_a_run_is_prepared_once(tmp_path, counts):
    assert run(settings(tmp_path, "grpo", steps=1)) == 0
    assert counts == {"prepared": 1, "DryCluster": 1, "LocalCluster": 1}


def test_check_prepares_once_and_builds_one_engine(tmp_path, counts):
    check(load_config(settings(tmp_path, "grpo")), Display(quiet=True))
    assert counts == {"prepared": 1, "DryCluster": 1}


@pytest.mark.parametrize("samples, rows", [(1, 16), (3, 5), (32, 1)])
def test_an_evaluation_batch_gives_as_many_sequences_as_a_step(tmp_path, samples, rows):
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 4, "eval_samples": samples}
    config = settings(tmp_path, "grpo", **sizes, eval_sampling={"temperature": 1.0})
    held_out = load_data(prepare(load_config(config))).eval
    assert held_out is not None and held_out.batch_size == rows
