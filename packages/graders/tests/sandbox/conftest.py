"""Fixtures: a test on each kind of machine."""

import pytest

from packages.graders.tests.sandbox.machines import MACHINES, OLD_MACHINES, make_machine

# The fast suite has the machines that can do most and least.
FAST = ("everything", "no rights at all")


@pytest.fixture(params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MACHINES])
def machine(request, tmp_path, monkeypatch):
    """Runs the test on a machine of each kind, and looks afterwards whether anything is left."""
    check_nothing_is_left = make_machine(MACHINES[request.param], tmp_path, monkeypatch)
    yield request.param
    check_nothing_is_left()


@pytest.fixture(params=["old", "old, no namespaces"])
def old_machine(request, tmp_path, monkeypatch):
    """The same for machines whose Landlock can do as little as the first did."""
    check_nothing_is_left = make_machine(OLD_MACHINES[request.param], tmp_path, monkeypatch)
    yield request.param
    check_nothing_is_left()
