"""A directory with a data file and a model directory, and a way to write and load YAML in it."""

from textwrap import dedent

import pytest

from coalign.config import ConfigError, load

DEFAULTS = {
    "runtime": {"samples_per_prompt": 8},
    "advantage": {"fn": "group", "scale": True},
    "loss": {"fn": "policy_gradient", "kl_coef": 0.0, "aggregation": "token_mean"},
    "models": {
        "policy": {"module": "native"},
        "trainer": {"module": "fsdp", "like": "policy"},
        "reference": {"like": "trainer", "frozen": True},
    },
}


def recipe_defaults(algorithm):
    if algorithm != "grpo":
        raise ValueError(f"'{algorithm}' is no recipe; did you mean 'grpo'?")
    return DEFAULTS


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory: `train.jsonl`, `eval.jsonl` and the model directory `model`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "eval.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    return tmp_path


@pytest.fixture
def write(here):
    def write(text, name="run.yaml"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(dedent(text))
        return name

    return write


@pytest.fixture
def run(write):
    """Load YAML text with overrides over the defaults of `grpo`."""
    return lambda text, *overrides: load(write(text), overrides, recipe_defaults)


@pytest.fixture
def complaint(run):
    """The text of the error that YAML text with overrides raises."""

    def complaint(text, *overrides):
        with pytest.raises(ConfigError) as caught:
            run(text, *overrides)
        return str(caught.value)

    return complaint
