"""Commands that answer over a network: serve-reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coalign.cli.inference import Rewards


def serve_reward(
    model: Annotated[
        Path | None, typer.Argument(help="A reward model: a Hugging Face directory with a reward head.")
    ] = None,
    reward: Rewards = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with `reward:` or `reward_model:`; options go over it.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Default 127.0.0.1; 0.0.0.0 lets other machines in.")] = None,
    port: Annotated[int | None, typer.Option(help="Default 5000; 0: a free one.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key that requests need.")
    ] = None,
    label_key: Annotated[
        str | None, typer.Option(help="The row's key for `labels`, default `answer`.", show_default=False)
    ] = None,
    strip: Annotated[
        list[str] | None,
        typer.Option(
            help="A text that may end a `query` and is no part of the response (`<|im_end|>`); again for more."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Responses that are scored together; default 64.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="The reward model's: `auto` (default), `none`, or a Jinja file.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default) or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default), cuda, cuda:1.")] = None,
):
    """Serve a reward model or reward functions over HTTP, as OpenRLHF's `/get_reward`. SIGTERM lets requests finish."""
    from coalign.config import load_section
    from coalign.config.reading import parse
    from coalign.config.schema import ServeConfig
    from coalign.runtime.display import Display
    from coalign.runtime.serving import serve

    given = {
        "reward": [parse(text, f"--reward {text}")[0] for text in reward] if reward else None,
        "reward_model": str(model) if model else None,
        "reward_template": chat_template,
        "host": host,
        "port": port,
        "api_key_env": api_key_env,
        "label_key": label_key,
        "strip": strip or None,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
    }
    options = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    serve(load_section(ServeConfig, config or {}, options), Display())
