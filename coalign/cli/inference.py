"""Commands that use a model: generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model directory.")],
    prompts: Annotated[Path | None, typer.Option("--input", "-i", help="JSONL with one prompt a line.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSONL to write; default: the screen.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="A single prompt instead of a file.")] = None,
    key: Annotated[
        str, typer.Option(help="The prompt's key in the input: a string, or a list of messages.")
    ] = "prompt",
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses for each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01)] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a response; may be given again.")] = None,
    chat_template: Annotated[str, typer.Option(help="`auto`, `none`, or a Jinja file.")] = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
):
    """Generate responses: JSONL in, JSONL out."""
    from coalign.config.schema import SamplingConfig
    from coalign.runtime.display import Display
    from coalign.runtime.inference import Job
    from coalign.runtime.inference import generate as respond

    sampling = SamplingConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or [],
    )
    if (prompt is None) == (prompts is None):
        raise ValueError("give either --prompt TEXT or --input FILE.jsonl")
    job = Job(model, prompts, prompt, output, key, samples, sampling, chat_template, seed, dtype)
    respond(job, Display())
