"""How long a row may be: what the models of a run read at once, beside the limits of `data`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, order=True)
class RowLimit:
    """The most that a model takes at once of a row; ``key`` names the setting that says so.

    ``scope``: tokens of one sequence, tokens of all sequences of a row (which a loss compares), or patches of its
    images.
    """

    amount: int
    key: str
    scope: Literal["sequence", "row", "patches"] = "sequence"

    @property
    def origin(self) -> str:
        """The key in brackets, for a message; empty for a limit of `data`, whose keys the reader of a row knows."""
        return "" if self.key.startswith("data.") else f" ({self.key})"

    def describe_excess(self, amount: int, images: str = "") -> str:
        """Say that a sequence of ``amount`` tokens is too long; ``images``: how many of them stand for images."""
        if not self.origin:
            return f"{amount} tokens{images}; at most {self.amount} are allowed"
        return f"a sequence of it has {amount} tokens{images}, and {self.amount} are what is read at once{self.origin}"

    @staticmethod
    def choose(setting: int | None, key: str, limits: Sequence[RowLimit]) -> dict[str, RowLimit]:
        """Choose the least of each scope; ``setting`` is that of `data`, under ``key``."""
        named = [*limits, *([] if setting is None else [RowLimit(setting, key)])]
        return {scope: min(limit for limit in named if limit.scope == scope) for scope in {one.scope for one in named}}

    def __str__(self) -> str:
        words = {"sequence": "tokens", "row": "tokens in all responses together", "patches": "patches of images"}
        return f"{self.amount} {words[self.scope]}{self.origin}"
