"""What a grader reads of a finished sample. Coalign's `Sample` has it; so has any object with these attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class GradedSample(Protocol):
    """A response to grade.

    ``response`` has no special tokens; ``prompt`` is what the model saw. ``meta`` is the row of the data set, with the
    ground truth under the grader's ``answer_key``.
    """

    @property
    def prompt(self) -> str: ...

    @property
    def response(self) -> str: ...

    @property
    def meta(self) -> Mapping[str, Any]: ...
