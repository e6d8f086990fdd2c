from __future__ import annotations

from collections.abc import Iterator

import pytest

from coalign.roles import Context


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only rank, on the CPU."""
    pytest.importorskip("megatron.core")
    from coalign_megatron.backend import build
    from coalign_megatron.backend.cpu import on_cpu
    from coalign_megatron.backend.partition import ParallelSizes

    with on_cpu():
        build.join_ranks(ParallelSizes(), Context())
        yield
        build.leave_ranks()
