"""The run without a fault, with whose weights the runs of a file are compared."""

import pytest

from tests.runs import run, weights_hash


@pytest.fixture(scope="module")
def undisturbed(request, tmp_path_factory):
    """A folder with model and data, and the weights that every run of the file's ``configure`` ends with there."""
    directory = tmp_path_factory.mktemp("chaos")
    config = request.module.configure(directory, "undisturbed")
    assert run(config) == 0
    return directory, weights_hash(config, request.module.STEPS)
