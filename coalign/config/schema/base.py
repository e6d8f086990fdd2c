"""What sections are made of: strict mappings of known keys, functions with their arguments, paths that must exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Item = TypeVar("Item")
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Several = Annotated[list[Item], BeforeValidator(lambda value: [value] if isinstance(value, str | dict) else value)]
"""A list; a single item may stand without the brackets."""


@dataclass(frozen=True)
class Input:
    """Marks a text as the path of something that must exist before a run."""

    kind: Literal["file", "directory"]


class NoEffect:
    """Marks a setting that does not change what is computed, whatever its value."""


ResultNeutral = Annotated[Item, NoEffect()]
"""A setting that leaves results as they are. A finished stage of a pipeline stays valid when it changes. A setting
without this mark counts as one that changes results."""


class Section(BaseModel):
    """A mapping of known keys. ``shorthand`` names the key that a plain text in place of the mapping stands for."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, use_attribute_docstrings=True
    )
    shorthand: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value


class Function(Section):
    """A function by short name or dotted path (``my.pkg:fn``); every other key is one of its keyword-only arguments."""

    model_config = ConfigDict(extra="allow")
    shorthand = "fn"

    fn: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the function."""
        return dict(self.model_extra or {})
