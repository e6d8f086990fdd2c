"""What a transport of weights is, and what it may ask of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Model(Protocol):
    """What a transport needs of a coalign.cluster.DistModel."""

    store: Any

    def run(self, function: Callable[..., Any], *arguments: Any, fatal: bool = True) -> Any:
        """``function(module, store, *arguments)`` on every rank: a Future of the list of results."""


Transport = Callable[[Model, Model, int, bool], int]
"""(source, target, version, changing) -> bytes moved to each target. Returns when every replica serves the version.
``changing``: only the weights that training changes; the target has the others."""
