"""The command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="coalign",
    help="Alignment training of language models: SFT, PPO, GRPO and relatives, from a laptop to a Ray cluster.\n\n"
    "Begin with `coalign init grpo > run.yaml`, look at it with `coalign check run.yaml`, "
    "start it with `coalign train run.yaml`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Argument(help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings over those of the file, e.g. `models.trainer.optimizer.lr=1e-6 runtime.steps=50`."),
]


def _load(path: Path, overrides: list[str] | None):
    from coalign.config import load
    from coalign.runtime.build import recipe

    return load(path, overrides or [], defaults=lambda algorithm: recipe(algorithm).defaults)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option(help="Warnings and the summary only.")] = False,
):
    """Train. Stops at the last step, or after the step under way on Ctrl-C, with a checkpoint; run again to go on."""
    from coalign.runtime.display import Display
    from coalign.runtime.run import train as run

    raise typer.Exit(run(_load(config, overrides), Display(quiet=quiet)))


@app.command()
def check(config: Config, overrides: Overrides = None):
    """Validate configuration, data and flow, draw the flow, estimate memory. Loads no weights."""
    from coalign.runtime.checking import check as examine
    from coalign.runtime.display import Display

    examine(_load(config, overrides), Display())


@app.command(name="eval")
def evaluate(
    config: Config,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="Evaluate this model directory instead of the configuration's.")
    ] = None,
):
    """Measure a model on the evaluation set of a run: mean@n, pass@k (or the loss, for SFT)."""
    from coalign.runtime.display import Display
    from coalign.runtime.inference import evaluate as measure

    measure(_load(config, overrides), model, Display())


@app.command()
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


@app.command(name="inspect-data")
def inspect_data(
    config: Config,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", "-r", min=1, help="How many rows to show.")] = 3,
):
    """Show rows as the trainer will see them: the template's text, the tokens, which of them are trained."""
    from coalign.runtime.display import Display
    from coalign.runtime.inference import inspect

    inspect(_load(config, overrides), rows, Display())


@app.command()
def init(recipe: Annotated[str, typer.Argument(help="`sft`, `grpo`, `ppo`, or a dotted path to an Engine subclass.")]):
    """Print a commented YAML for a recipe: every key with its meaning, the recipe's defaults filled in."""
    from coalign.config.export import to_commented_yaml
    from coalign.runtime.build import recipe as find

    typer.echo(to_commented_yaml({"algorithm": recipe, **find(recipe).defaults}))


@app.command()
def schema():
    """Print the JSON Schema of the YAML, for editors."""
    import json

    from coalign.config.export import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


def main() -> None:
    """Entry point. What a person can mend is told in one line; anything else keeps its traceback."""
    sys.path.insert(0, "")  # `my.pkg:fn` in a YAML means a module of the current directory
    try:
        app()
    except (ValueError, OSError) as problem:
        typer.secho(f"error: {problem}", fg="red", err=True)
        raise SystemExit(2) from problem


if __name__ == "__main__":
    main()
