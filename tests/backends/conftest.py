"""A model that the tests of this folder share."""

from __future__ import annotations

import pytest

from tests.tiny import tiny_model_dir


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> str:
    """The directory of a tiny language model, which nobody changes."""
    return str(tiny_model_dir(tmp_path_factory.mktemp("model") / "model"))
