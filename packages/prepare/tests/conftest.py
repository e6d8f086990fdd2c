"""Fixtures of the tests of configurations and of images."""

from tests.config.conftest import here, run, write  # noqa: F401  (fixtures)
from tests.data.test_images import load, model  # noqa: F401
