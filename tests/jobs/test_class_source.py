"""What is read from the sources of recipes and backends is what importing them says."""

import pytest

from coalign.config.functions import list_classes, resolve_class
from coalign.jobs.class_source import forms_group, read_defaults, syncs_weights


@pytest.mark.parametrize("name", list_classes("coalign.recipes"))
def test_the_defaults_of_a_recipe_are_those_of_its_class(name):
    recipe = resolve_class(name, "coalign.recipes")
    assert read_defaults(name) == recipe.defaults
    assert syncs_weights(name) == bool(recipe.sync)


def test_a_backend_forms_a_group_as_its_class_says():
    for name in ("fsdp", "native", "transformers", "reward", "judge", "preference", "cached", "retokenize"):
        assert forms_group(name) == resolve_class(name, "coalign.backends").spmd, name


def test_a_recipe_of_ones_own_is_imported():
    assert read_defaults("tests.jobs.test_class_source:Own") == {"seed": 3}
    with pytest.raises(ValueError, match="did you mean 'sft'"):
        read_defaults("sftt")


class Own:
    defaults = {"seed": 3}
