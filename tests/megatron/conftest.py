from __future__ import annotations

from collections.abc import Iterator

import pytest

from coalign.roles import Context


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only rank, on the CPU."""
    pytest.importorskip("megatron.core")
    from coalign.modules.megatron_core import ranks
    from coalign.modules.megatron_core.cpu import on_cpu
    from coalign.modules.megatron_core.cut import Sizes

    with on_cpu():
        ranks.join(Sizes(), Context())
        yield
        ranks.leave()
