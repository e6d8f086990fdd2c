"""Weights move between models that run: the fixtures of tests/cluster."""

from tests.cluster.conftest import make, prompts, ray_here  # noqa: F401
