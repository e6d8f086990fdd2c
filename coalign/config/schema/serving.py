"""A reward model or reward functions behind HTTP."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.pipeline import JudgeConfig


class ServeConfig(JudgeConfig):
    """A reward server: who scores, where it listens, and how much it takes."""

    host: str = "127.0.0.1"
    """`0.0.0.0` lets other machines in as well; set `api_key_env` then."""
    port: Annotated[int, Field(ge=0, le=65535)] = 5000
    """0: one that is free."""
    api_key_env: str | None = None
    """Environment variable with a key; requests then need `Authorization: Bearer <key>`."""
    label_key: str = "answer"
    """The row's key under which reward functions find a request's `labels`."""
    strip: list[str] = []
    """Texts at the end of a `query` that do not belong to the response: `<|im_end|>`, as OpenRLHF sends it."""
    batch_size: PositiveInt = 64
    """Responses, of whatever requests, that are scored together."""
    queue: PositiveInt = 4096
    """Responses that may wait; requests beyond them are turned away (429) and may come back."""
    max_bytes: PositiveInt = 64 * 2**20
    """Of a request's body."""
    grace: PositiveFloat = 30.0
    """Seconds that requests under way get to finish when the server is told to stop."""

    @model_validator(mode="after")
    def _there_is_a_judge(self) -> Self:
        if not self.reward and not self.reward_model:
            raise Conflict((), "nothing to serve: give `reward` (functions) or `reward_model` (a directory)")
        return self
