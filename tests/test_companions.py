"""Companions bring things by entry points; what a missing one would bring is refused in one line that names it."""

import importlib
import sys

import pytest
import torch

import coalign
import coalign.rewards
from coalign import companions
from coalign.cli import main
from coalign.config import ConfigError, load_section
from coalign.config.functions import resolve, resolve_class
from coalign.config.schema import DataConfig
from coalign.cpu import _NoKernels


@pytest.fixture
def alone(monkeypatch):
    """No companion is installed."""
    for module in ("companions", "cli", "config.functions", "rewards", "launch.check"):
        __import__(f"coalign.{module}")
        names = vars(sys.modules[f"coalign.{module}"])
        if "list_entries" in names:
            monkeypatch.setitem(names, "list_entries", lambda group: {})


def test_what_is_installed_is_found():
    assert {"board", "plan", "launch"} <= companions.list_entries(companions.COMMANDS).keys()
    assert {"coalign", "coalign_board", "coalign_graders"} <= companions.list_modules()
    for companion, brings in companions.COMPANIONS.items():
        for group, names in brings.items():
            assert names and companions.list_entries(group).keys() >= set(names), companion
            assert all(companions.list_entries(group)[name].load() for name in names)
            assert all(companions.name_missing(group, name) is None for name in names)


def test_a_missing_companion_is_named(alone, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coalign", "board", "runs"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and said == [
        "error: `coalign board` comes with a companion of Coalign: pip install coalign-board"
    ]
    with pytest.raises(
        ImportError, match=r"'megatron' comes with a companion of Coalign: pip install coalign-megatron"
    ):
        resolve_class("megatron", "coalign.backends")
    with pytest.raises(ImportError, match="'math' comes with a companion of Coalign: pip install coalign-graders"):
        resolve("math", "coalign.rewards")
    with pytest.raises(ImportError, match=r"coalign\.generate comes with a companion of Coalign: .* coalign-serve"):
        coalign.generate  # noqa: B018
    assert not hasattr(coalign, "generat")


def test_without_companions_errors_are_plain(alone):
    assert companions.ask(companions.EXPLAINS, "foreign_key", ("actor_rollout_ref",), {}) is None
    with pytest.raises(ConfigError, match="unknown key"):
        load_section(DataConfig, {"train_files": "x"})
    with pytest.raises(ValueError, match=r"'mathh' is not in coalign\.rewards"):
        resolve("mathh", "coalign.rewards")


def test_a_name_that_has_moved_says_where_to():
    with pytest.raises(AttributeError, match=r"coalign\.rewards\.math is coalign_graders\.math_answer:math now"):
        coalign.rewards.math  # noqa: B018


def test_a_module_that_has_moved_says_where_to():
    """No one finds it, so Python asks the finder that Coalign has added."""
    with pytest.raises(ModuleNotFoundError, match=r"families has moved: import coalign_megatron.families"):
        importlib.import_module("coalign.weights.families")
    with pytest.raises(ModuleNotFoundError, match=r"No module named .coalign\.nothing."):
        importlib.import_module("coalign.nothing")


def test_without_kernels_torch_computes():
    assert not _NoKernels.has_kernel(torch.zeros(1)) and not _NoKernels.has_copy_kernel(torch.zeros(1))
