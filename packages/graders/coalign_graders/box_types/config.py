"""The settings of a box, checked before anything starts."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

TYPES = ("bwrap", "podman", "docker")


class SandboxConfig(BaseModel):
    """What a box is, and what its commands may use."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    type: str
    """`bwrap`, `podman`, `docker`, or `my.module:name`. That is called with the other keys, and returns an asynchronous
    context manager of an object with the methods of CommandBox."""
    image: Annotated[str, Field(pattern="^[^-]")] | None = None
    """The container's image; in `bwrap` a folder, of which /work is a copy."""
    options: list[str] = []
    """Further arguments of `bwrap`, `podman run` or `docker run`: mounts, devices, capabilities."""
    memory_mb: PositiveInt = 1024
    """Memory of the box; in `bwrap` private memory of each process."""
    processes: PositiveInt = 128
    """Processes and threads at a time."""
    cpus: PositiveFloat | None = None
    """Processors; not in `bwrap`. None: no limit."""
    file_mb: PositiveInt = 256
    """The largest file."""
    network: bool = False
    """Whether other machines can be reached; not in `bwrap`, which could only share this machine's network."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if ":" in self.type:
            return self
        if self.type not in TYPES:
            raise ValueError(f"type is '{self.type}'; expected {' | '.join(TYPES)} | my.module:name")
        for key in self.model_extra or ():
            nearest = get_close_matches(key, type(self).model_fields, 1)
            raise ValueError(f"unknown key '{key}'" + (f"; did you mean '{nearest[0]}'?" if nearest else ""))
        if self.type == "bwrap" and (self.cpus or self.network):
            raise ValueError("`cpus` and `network` have no effect in bwrap; podman and docker limit and separate both")
        if self.type != "bwrap" and not self.image:
            raise ValueError(f"missing `image`: {self.type} starts a box from one")
        return self
