"""What hangs off the loop. A hook sees the engine after each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.runtime.engine import Engine


class Hook:
    """Does nothing at each of the five moments. Hooks run in order and may add to ``stats``."""

    def begin(self, engine: Engine) -> None: ...

    def refuses(self, engine: Engine, stats: Stats, batch: BatchRef) -> bool:
        """Whether the step just trained is to be forgotten: then nobody gets its weights, and no other hook sees it."""
        return False

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None: ...

    def after_evaluation(self, engine: Engine, stats: Stats) -> None: ...

    def end(self, engine: Engine) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
