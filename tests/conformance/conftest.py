"""Engines that several files test alike: one of each kind for a file, built once."""

import pytest

from tests.conformance.engines import ENGINES, build, model_dir


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, directory):
    module = build(request.param, directory)
    yield module
    module.close()
