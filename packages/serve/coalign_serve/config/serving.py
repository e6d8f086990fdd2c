"""Servers over HTTP: what every one has, the reward server, and the server of completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from coalign.config.errors import Conflict
from coalign.config.schema.data import ImagesConfig
from coalign.config.schema.section import InputPath, Section
from coalign_serve.config.stages import JudgeConfig

Port = Annotated[int, Field(ge=0, le=65535)]


class ServerConfig(Section):
    """The address of a server, and its limits."""

    host: str = "127.0.0.1"
    """`0.0.0.0` admits other machines, and then `api_key_env` is required."""
    api_key_env: str | None = None
    """Environment variable that holds a key; requests then need `Authorization: Bearer <key>`."""
    max_bytes: PositiveInt = 64 * 2**20
    """Size limit of a request's body."""
    timeout: PositiveFloat = 60.0
    """Seconds that a connection may wait for the client, to send a request or to take its answer; then it is cut."""
    connections: PositiveInt = 512
    """Open connections; further ones are cut at once."""
    grace: PositiveFloat = 30.0
    """Seconds that running requests get to finish when the server stops."""


class ServeConfig(JudgeConfig, ServerConfig):
    """A reward server: what scores, its address and its limits."""

    port: Port = 5000
    """0: any free port."""
    label_key: str = "answer"
    """Key of the row under which reward functions find a request's `labels`."""
    strip: list[str] = []
    """Texts to remove from the end of a `query`, such as `<|im_end|>`, which OpenRLHF sends."""
    batch_size: PositiveInt = 64
    """Responses that are scored together, from any requests."""
    queue: PositiveInt = 4096
    """Responses that may wait; further requests are refused with status 429 and may be retried."""

    images: ImagesConfig | None = None
    """For conversations with images, which a reward model then sees. `root`: the folder that file paths must lead to;
    None: images come as data URLs only."""

    def check(self) -> None:
        super().check()
        if not self.reward and not self.reward_model:
            raise Conflict((), "nothing to serve: give `reward` (functions) or `reward_model` (a directory)")


class CompletionServerConfig(ServerConfig):
    """A server of completions, in the form of OpenAI's API: the model, its engine, and its limits."""

    model: Annotated[str, InputPath("model")]
    """A model directory, a hub's name, a GGUF file, or a run folder (its newest or best model)."""
    engine: Literal["native", "vllm", "transformers"] = "native"
    replicas: PositiveInt = 1
    """Engines. Several have a process each, and on accelerators a device each."""
    port: Port = 8000
    """0: any free port."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the model. `auto`: bfloat16 for one that is stored in 16 bits a number or fewer, if the device
    multiplies that; else float32."""
    device: str = "auto"
    """Device of the model: `cpu`, `cuda`, `cuda:1`; `auto`: the machine's accelerator, or else `cpu`."""
    chat_template: str | None = None
    """`auto`, `none`, a training template, or a Jinja file. None: what the run was trained with that made the model,
    else `auto`; so with the arguments."""
    chat_template_kwargs: dict[str, Any] = {}
    tool_parser: str | None = None
    """Format of tool calls, such as `hermes`: a name that coalign_serve.formats finds, or a dotted path."""
    max_new_tokens: PositiveInt = 512
    """Token limit of an answer whose request has none."""
    max_sequences: PositiveInt = 64
    """Sequences that an engine computes at the same time; more wait."""
    queue: PositiveInt = 512
    """Answers that may be computed or wait; further requests are refused with status 429."""
    seed: NonNegativeInt = 0
    """Seed of the engine. Requests without a `seed` of their own get other answers every time."""
    images: ImagesConfig | None = None
    """For messages with images, and a model that sees. `root`: the folder that file paths must lead to; None: images
    come as data URLs only."""
