"""What is read from the sources of recipes and backends is what importing them says."""

import pytest

from coalign.config.functions import list_arguments, list_classes, list_functions, resolve, resolve_class
from coalign.jobs.declarations import forms_group, read_defaults, reads_reference, syncs_weights


@pytest.mark.parametrize("name", list_classes("coalign.recipes"))
def test_the_defaults_of_a_recipe_are_those_of_its_class(name):
    recipe = resolve_class(name, "coalign.recipes")
    assert read_defaults(name) == recipe.defaults
    assert syncs_weights(name) == bool(recipe.sync)


def test_a_backend_forms_a_group_as_its_class_says():
    for name in ("fsdp", "native", "transformers", "reward", "judge", "preference", "cached", "retokenize"):
        assert forms_group(name) == resolve_class(name, "coalign.backends").spmd, name


@pytest.mark.parametrize("name", list_functions("coalign.algorithms.losses"))
def test_a_loss_reads_the_reference_as_it_declares(name):
    loss = resolve(name, "coalign.algorithms.losses")
    for arguments in ({}, {"kl_coef": 0.0}, {"kl_coef": 0.1}):
        if set(arguments) <= set(list_arguments(loss)):
            settings = {key: p.default for key, p in list_arguments(loss).items()} | arguments
            assert reads_reference(name, arguments) == ("ref" in getattr(loss, "needs", lambda **_: ())(**settings))
    assert reads_reference("my.module:loss", {}) is None and reads_reference(name.upper(), {}) is None


def test_a_recipe_of_ones_own_is_imported():
    assert read_defaults("tests.jobs.test_declarations:Own") == {"seed": 3}
    with pytest.raises(ValueError, match="did you mean 'sft'"):
        read_defaults("sftt")


class Own:
    defaults = {"seed": 3}
