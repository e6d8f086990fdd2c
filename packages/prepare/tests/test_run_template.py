"""What `coalign init` and `recipes` write, and what `check` and `inspect-data` say of a run that awaits another one."""

import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coalign import load_config, train
from coalign.cli import app
from coalign.recipes import CLASSES
from coalign.report.display import Display
from coalign_prepare.data_view import show_data
from coalign_prepare.run_template import DATA, MODEL, REWARD, RunTemplate
from tests.runs import settings, show_check, write_data
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("needed")
    tiny_model_dir(path / "tiny")
    write_data(path, "dpo")
    return path


def fill_in(text, home):
    for needed, value in {DATA: home / "dpo.jsonl", MODEL: home / "tiny", REWARD: "math"}.items():
        text = text.replace(needed, str(value))
    settings = [line.partition("#")[0] for line in text.splitlines()]
    assert not [line for line in settings if "<" in line.replace("<rm_score>", "")]
    return text


@pytest.mark.parametrize("recipe", CLASSES)
def test_what_init_marks_is_enough(home, recipe):
    template, plain = RunTemplate(recipe), None
    for full in (True, False):
        text = template.write(full=full)
        (home / f"{recipe}.yaml").write_text(fill_in(text, home))
        config = load_config(home / f"{recipe}.yaml")
        plain = plain or config
        assert config == plain  # both forms are the recipe as it is
    assert len(text.splitlines()) <= 25
    assert "no problem found" in show_check(config)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in CLASSES if name != "rlaif"])  # a random judge says nothing
def test_what_check_passes_of_init_trains(home, recipe):
    file = home / f"{recipe}.yaml"
    file.write_text(fill_in(RunTemplate(recipe).write(), home))
    size = "tokens_per_step" if "tokens_per_step" in file.read_text() else "prompts_per_step"
    more = {"runtime.steps": 1, f"runtime.{size}": 64 if size == "tokens_per_step" else 2, "output": str(home / recipe)}
    result = train(file, more, quiet=True)
    assert len(result.metrics) == 1 and result.model


def test_the_long_form_has_the_arguments_of_functions_and_no_section_that_is_not_read():
    ppo, dpo = (RunTemplate(name).write(full=True) for name in ("ppo", "dpo"))
    assert "\nkl:\n  fn: FixedKL\n  coef: 0.05\n" in ppo and "\n#   {fn: adaptive_kl, coef: …, target: …," in ppo
    assert "\nadvantage:\n  fn: gae\n  gamma: 1.0\n  lam: 0.95\n  # whiten: true\n" in ppo
    assert "\n#   {fn: math, answer_key: answer, strict: false}\n" in ppo and "\n  # weight: 1.0\n" in ppo
    assert "\n  beta: 0.1\n  # label_smoothing: 0.0\n" in dpo
    keys = r"(?m)^(?:# )?(rollout|filter|reward|advantage|kl|sync)\b:|^ {4}(?:# )?(native|vllm):"
    assert len(re.findall(keys, ppo)) == 8 and not re.findall(keys, dpo)


def test_init_writes_a_new_file_and_leaves_others_alone(tmp_path):
    file = tmp_path / "run.yaml"
    assert CliRunner().invoke(app, ["init", "dpo", str(file)]).output == ""
    assert file.read_text() == CliRunner().invoke(app, ["init", "dpo"]).output
    again = CliRunner().invoke(app, ["init", "sft", str(file)]).exception
    assert isinstance(again, ValueError) and str(again).startswith(f"{file} is there already")
    assert "algorithm: dpo" in file.read_text()
    wrong = CliRunner().invoke(app, ["init", "grpp", str(tmp_path / "other.yaml")]).exception
    assert isinstance(wrong, ValueError) and "did you mean 'grpo'?" in str(wrong) and len(list(tmp_path.iterdir())) == 1


def test_recipes_lists_each_with_its_models_within_80_columns():
    lines = CliRunner().invoke(app, ["recipes"]).output.splitlines()
    at = lines.index("  ppo: needs policy, reward; also has reference, trainer, value")
    assert lines[at + 1].startswith("      Proximal Policy Optimisation") and max(map(len, lines)) <= 80
    named = [line[:2] + line[2:].partition(":")[0] for line in lines if re.match(r"[* ] \w", line)]
    assert sorted(name[2:] for name in named) == sorted(CLASSES)
    assert [name[2:] for name in named if name.startswith("*")] == ["grpo", "sft", "dpo"]


def test_what_init_marks_is_missed_by_its_key(home):
    (home / "empty.yaml").write_text(CliRunner().invoke(app, ["init", "grpo"]).output)
    with pytest.raises(ValueError) as caught:
        load_config(home / "empty.yaml")
    file = home / "empty.yaml"
    assert str(caught.value).splitlines() == [
        f"{file}:9: data.train.path: {DATA} is still to be filled in",
        f"{file}:12: models.policy.load: {MODEL} is still to be filled in",
    ]


def test_a_model_that_another_run_will_make_is_named(home, tmp_path):
    config = settings(tmp_path, "dpo")
    trainer = config["models"]["trainer"]
    trainer |= {"tokenizer": trainer["load"], "load": str(tmp_path / "sft" / "model")}
    with pytest.raises(ValueError, match=r"there is no directory .*sft/model"):
        load_config(config)
    planned = load_config(config, planned=True)
    shown = show_check(planned)
    assert f"trainer, reference: {tmp_path}/sft/model is not there yet, a run with `output: {tmp_path}/sft`" in shown
    assert "no problem found" in shown
    display = Display(out=Console(file=io.StringIO()))
    show_data(planned, 1, display)
    assert "dpo.jsonl row" in display.out.file.getvalue()
    trainer["load"] = str(tmp_path / "typo")
    with pytest.raises(ValueError, match="there is no directory"):
        load_config(config, planned=True)
