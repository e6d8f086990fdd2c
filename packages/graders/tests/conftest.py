"""What calls rewards, and services that answer as they are told to."""

import pytest

from coalign.rewards.calls import RewardCaller
from packages.graders.tests.service import Service, lengths


@pytest.fixture
def caller():
    caller = RewardCaller()
    yield caller
    caller.close()


@pytest.fixture
def service():
    """``service(*answers, answer=...)``: a service that gives each of ``answers`` once, and then ``answer``."""
    services = []

    def start(*answers, answer=lengths):
        services.append(Service(answer, answers))
        return services[-1]

    yield start
    for server in services:
        server.close()
