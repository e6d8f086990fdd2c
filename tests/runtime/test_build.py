"""From a configuration to an engine: what is refused before anything loads."""

import pytest

from coalign.config.schema import RunConfig
from coalign.runtime.build import prepare


def test_a_recipe_of_ones_own_with_an_unknown_kind_of_data(tmp_path, monkeypatch):
    (tmp_path / "with_unknown_source.py").write_text(
        "from coalign.runtime.engine import Engine\nclass Mine(Engine):\n    source = 'preference'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"Mine\.source: 'preference' is no kind of data.*preferences"):
        prepare(RunConfig(algorithm="with_unknown_source:Mine", models={}))
