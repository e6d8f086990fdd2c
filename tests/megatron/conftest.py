from __future__ import annotations

from collections.abc import Iterator

import pytest

from coalign.roles import Context


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only rank, on the CPU."""
    pytest.importorskip("megatron.core")
    from coalign.backends.megatron import build
    from coalign.backends.megatron.cpu import on_cpu
    from coalign.backends.megatron.partition import ParallelSizes

    with on_cpu():
        build.join_ranks(ParallelSizes(), Context())
        yield
        build.leave_ranks()
