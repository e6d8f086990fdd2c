"""The directory and the loader of the tests of configurations."""

from tests.config.conftest import here, run, write  # noqa: F401  (fixtures)
