"""Names and arguments of functions."""

import importlib
import re
import sys
from functools import partial
from typing import Literal

import pytest

from coalign.config import ConfigError, functions
from coalign.config.functions import (
    bind,
    is_bound_to_process,
    list_columns,
    list_functions,
    name_object,
    resolve,
    resolve_class,
)

HOME = "pretend"


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    folder = tmp_path / HOME
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from math import sqrt\n\ndef ratio(x): ...\n\ndef Clip(x): ...\n\n_hidden = 3\n"
        "CLASSES = {'fsdp': 'pretend.fsdp:FSDPModule'}\n"
    )
    (folder / "fsdp.py").write_text("class FSDPModule(dict):\n    pass\n")
    (folder / "base.py").write_text("class Module(dict):\n    pass\n")
    (folder / "broken.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == HOME]:
        del sys.modules[name]


def test_a_short_name_is_looked_up_at_home_whatever_its_case():
    assert resolve("ratio", HOME).__name__ == "ratio"
    assert resolve("clip", HOME).__name__ == "Clip"


def test_a_dotted_path_is_imported():
    assert resolve("os.path:join", HOME) is __import__("os").path.join
    assert resolve("pretend.fsdp:FSDPModule.fromkeys", HOME) is not None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ratoi", "'ratoi' is not in pretend; did you mean 'ratio'? (a function of your own: `my.module:name`)"),
        ("sqrt", "'sqrt' is not in pretend; there are: ratio, Clip (a function of your own: `my.module:name`)"),
        ("_hidden", "'_hidden' is not in pretend; there are: ratio, Clip (a function of your own: `my.module:name`)"),
        ("nowhere.mod:f", "'nowhere.mod:f': no module 'nowhere' in the current directory or installed"),
        ("pretend.nowhere:f", "'pretend.nowhere:f': no module 'pretend.nowhere' in the current directory or installed"),
        ("pretend:ratoi", "'pretend:ratoi': 'pretend' has no 'ratoi'; did you mean 'ratio'?"),
    ],
)
def test_an_unknown_name(name, expected):
    with pytest.raises(ValueError) as caught:
        resolve(name, HOME)
    assert str(caught.value) == expected


def test_what_is_missing_inside_a_users_module_rises_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        resolve("pretend.broken:f", HOME)


def test_classes_by_short_name_and_path():
    assert resolve_class("fsdp", HOME).__name__ == "FSDPModule"
    assert resolve_class("FSDP", HOME) is resolve_class("pretend.fsdp:FSDPModule", HOME)
    with pytest.raises(ValueError) as caught:
        resolve_class("fdsp", HOME)
    assert (
        str(caught.value) == "'fdsp' is not in pretend; did you mean 'fsdp'? (a class of your own: `my.module:Class`)"
    )
    with pytest.raises(ValueError, match="'base' is not in pretend; there are: fsdp"):
        resolve_class("base", HOME)


@pytest.mark.parametrize(
    ("name", "home", "meant"),
    [
        ("sigmoid", "coalign.algorithms.losses", "dpo"),
        ("ipo_loss", "coalign.algorithms.losses", "ipo"),
        ("ppo", "coalign.algorithms.losses", "policy_gradient"),
        ("reinforce++", "coalign.algorithms.advantages", "reinforce_pp"),
        ("adaptive", "coalign.algorithms.divergence", "adaptive_kl"),
        ("accuracy_reward", "coalign.rewards", "math"),
    ],
)
def test_what_others_call_it(name, home, meant):
    with pytest.raises(ValueError, match=f"'{re.escape(name)}' is not in {home}; did you mean '{meant}'"):
        resolve(name, home)


def test_what_is_no_function_is_refused(tmp_path):
    (tmp_path / HOME / "plain.py").write_text("value = 3")
    with pytest.raises(ValueError, match=r"'pretend\.plain:value' is 3; expected a function or a class"):
        resolve("pretend.plain:value", HOME)


def test_what_others_call_it_exists():
    homes = ("losses", "advantages", "divergence")
    known = [*(n for home in homes for n in list_functions(f"coalign.algorithms.{home}"))]
    known += [*list_functions("coalign.rewards"), *importlib.import_module("coalign.recipes").CLASSES]
    assert set(functions._SYNONYMS) <= set(known)


def test_an_argument_of_another_framework_is_translated():
    with pytest.raises(ConfigError, match=r"loss\.epsilon: is TRL's; here it is loss.clip_low and loss.clip_high"):
        bind(resolve("policy_gradient", "coalign.algorithms.losses"), {"epsilon": 0.2}, "loss")


def test_a_file_is_no_module():
    with pytest.raises(ValueError, match=r"'my/rw.py' is no name of a module; .* such as `rw:fn`"):
        resolve("my/rw.py:fn", HOME)
    with pytest.raises(ValueError, match=r"'rw.py' is no name of a module; .* such as `rw:fn`"):
        resolve("rw.py:fn", HOME)


@pytest.mark.parametrize("home", ["coalign.backends", "coalign.recipes"])
def test_every_name_of_a_table_is_a_class(home):
    for name in importlib.import_module(home).CLASSES:
        assert isinstance(resolve_class(name, home), type)


def loss(
    x, *, clip: float = 0.2, mode: Literal["a", "b"] = "a", limits: tuple[float, float] = (0.0, 1.0), k: int | None
):
    return x


def test_bind_gives_all_arguments():
    assert bind(loss, {"k": None}, "loss") == {"clip": 0.2, "mode": "a", "limits": (0.0, 1.0), "k": None}
    assert bind(loss, {"k": 1, "clip": 1, "limits": [0, 2]}, "loss")["limits"] == (0.0, 2.0)


def test_bind_tells_all_problems():
    with pytest.raises(ConfigError) as caught:
        bind(loss, {"clip": "x", "mode": "c", "clap": 1, "x": 1, "limits": [1, "b"]}, "models.value.loss")
    assert str(caught.value).splitlines() == [
        "models.value.loss.clip: is 'x'; expected a number",
        "models.value.loss.mode: is 'c'; expected a | b",
        "models.value.loss.clap: unknown argument of loss; did you mean 'clip'?",
        "models.value.loss.x: unknown argument of loss; there are: clip, mode, limits, k",
        "models.value.loss.limits[1]: is 'b'; expected a number",
        "models.value.loss.k: missing: loss needs it",
    ]


def test_bind_takes_classes_untyped_and_open_signatures():
    class Controller:
        def __init__(self, *, coef: float, target=6):
            pass

    def open_ended(x, *, a=1, **more):
        return x

    assert bind(Controller, {"coef": 1}, "kl") == {"coef": 1.0, "target": 6}
    assert bind(open_ended, {"b": [1]}, "loss") == {"a": 1, "b": [1]}
    with pytest.raises(ConfigError) as caught:
        bind(list_columns, {"a": 1}, "reward[0]")
    assert str(caught.value) == "reward[0].a: unknown argument; list_columns takes none"


def test_columns_are_the_positional_parameters():
    def gae(token_rewards, values, /, loss_mask, segment=None, *, gamma=1.0):
        return {}

    assert list_columns(gae) == (["token_rewards", "values", "loss_mask"], ["segment"])


def test_objects_have_names_that_find_them():
    assert name_object(resolve) == "coalign.config.functions:resolve"
    made = [lambda: 0, lambda: 1]
    bound = partial(max, 1)
    names = [name_object(value) for value in (*made, bound)]
    assert [resolve(name, "coalign.rewards") for name in names] == [*made, bound]
    assert names == [name_object(value) for value in (*made, bound)] and len(set(names)) == 3
    assert all(is_bound_to_process(name) for name in (*names, "__main__:digits"))
    assert not is_bound_to_process("coalign.config.functions:resolve")
    with pytest.raises(ValueError, match="was passed as an object to another process"):
        resolve("<this process>:99.lambda", "coalign.rewards")
