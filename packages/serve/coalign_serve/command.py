"""Commands that compute with a model: generate, score, chat, serve, serve-reward; and pipeline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[Path, typer.Argument(help="A model directory, a run folder, a name of the hub, or a GGUF file.")]
RewardModel = Annotated[
    Path | None,
    typer.Argument(help="A reward model: a directory with a reward head, a run folder, or a hub's name."),
]
Key = Annotated[str, typer.Option(help="The prompt's key in the input: a string, or a list of messages.")]
MaxNewTokens = Annotated[int, typer.Option(min=1)]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopK = Annotated[int, typer.Option(min=0, help="0: off.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0)]
MinP = Annotated[float, typer.Option(min=0.0, max=1.0)]
RepetitionPenalty = Annotated[float, typer.Option(min=0.01)]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends a response; may be given again.")]
Template = Annotated[
    str | None,
    typer.Option(
        help="`auto`, `none`, a training template, or a Jinja file; default: as the run trained that made the model, "
        "else `auto`."
    ),
]
TemplateArguments = Annotated[
    str | None, typer.Option(help="Arguments of the chat template, as in YAML: `{enable_thinking: false}`.")
]
ScoreAt = Annotated[
    Literal["last_trained", "end_of_text"] | None,
    typer.Option(help="Where the reward model's score is read; default: as its config.json says, else `last_trained`."),
]
Seed = Annotated[int, typer.Option(min=0)]
Images = Annotated[bool, typer.Option("--images", help="Read images, with a model that sees (docs/images.md).")]
ImageRoot = Annotated[Path | None, typer.Option(help="Folder of image files that requests may name; implies --images.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="auto: bfloat16 for a model stored in 16 bits or fewer, if the device multiplies it."),
]
Device = Annotated[str, typer.Option(help="auto (the machine's accelerator, or else the CPU), cpu, cuda, cuda:1.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output if it exists; without, only what this command began.")
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        help="A reward function: a name (`math`), a dotted path (`my.rewards:fn`), or as in YAML "
        "(`{fn: math, answer_key: gold}`); may be given again.",
    ),
]


def generate(
    model: Model,
    prompts: Annotated[Path | None, typer.Option("--input", "-i", help="A data file of prompts.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSONL to write; default: the screen.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="A single prompt instead of a file.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="An image before the prompt, or in place of its `<image>`; repeatable.")
    ] = None,
    images: Images = False,
    key: Key = "prompt",
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses for each prompt.")] = 1,
    best: Annotated[bool, typer.Option("--best", help="Keep only the best-scored response to each prompt.")] = False,
    reward: Rewards = None,
    reward_model: Annotated[
        Path | None, typer.Option(help="Score with this model: a Hugging Face directory with a reward head.")
    ] = None,
    reward_template: Annotated[
        str | None, typer.Option(help="The reward model's chat template: as `--chat-template`.")
    ] = None,
    reward_score_at: ScoreAt = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    chat_template: Template = None,
    chat_template_kwargs: TemplateArguments = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    overwrite: Overwrite = False,
):
    """Generate responses: JSONL in, JSONL out. After an interruption the same command resumes."""
    from coalign.report.display import Display
    from coalign_serve.api import generate as respond

    source = prompts if prompt is None else prompt
    if source is None or None not in (prompt, prompts):
        raise ValueError("give either --prompt TEXT or --input FILE.jsonl")
    if image and prompt is None:
        raise ValueError("--image is for --prompt; rows of a file name their images (--images)")
    respond(
        model,
        [{key: prompt, "images": [str(path.absolute()) for path in image]}] if image else source,
        output=output,
        samples=samples,
        keep="best" if best else "all",
        reward=_reward_sections(reward),
        reward_model=reward_model,
        reward_template=reward_template,
        reward_score_at=reward_score_at,
        prompt_key=key,
        chat_template=chat_template,
        chat_template_kwargs=_read_template_arguments(chat_template_kwargs),
        seed=seed,
        dtype=dtype,
        device=device,
        images=images or bool(image),
        on_record=None if output else lambda record: Display().show(record["response"]),
        overwrite=overwrite,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or [],
    )


def score(
    responses: Annotated[
        Path, typer.Option("--input", "-i", help="Rows {prompt, response}, {messages} or {prompt, chosen, rejected}.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL to write: the rows with their scores.")],
    model: RewardModel = None,
    reward: Rewards = None,
    key: Key = "prompt",
    images: Images = False,
    chat_template: Template = None,
    score_at: ScoreAt = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    overwrite: Overwrite = False,
):
    """Score responses with a reward model or reward functions. After an interruption the same command resumes."""
    from coalign.config.schema import DataConfig, ImagesConfig, RewardConfig, SourceConfig
    from coalign.report.display import Display
    from coalign_serve.config.stages import ScoreConfig
    from coalign_serve.score import score as judge

    if (model is None) == (not reward):
        raise ValueError("give either MODEL (a reward model's directory) or --reward FN")
    config = ScoreConfig(
        data=DataConfig(
            train=[SourceConfig(path=str(responses))], prompt_key=key, images=ImagesConfig() if images else None
        ),
        reward=[RewardConfig.model_validate(section) for section in _reward_sections(reward)],
        reward_model=str(model) if model else None,
        reward_template=chat_template,
        reward_score_at=score_at,
        dtype=dtype,
        device=device,
    )
    display = Display()
    display.table("scores", judge(config, output, display, overwrite=overwrite))


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    images: Images = False,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    chat_template: Template = None,
    chat_template_kwargs: TemplateArguments = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
):
    """Talk to a model in the terminal. /image FILE, /reset, /save FILE and /quit; Ctrl-C stops an answer."""
    from coalign.config.schema import SamplingConfig
    from coalign.report.display import Display
    from coalign_serve.chat import ChatSettings, read_typed_lines
    from coalign_serve.chat import chat as talk

    sampling = SamplingConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or [],
    )
    arguments = _read_template_arguments(chat_template_kwargs)
    settings = ChatSettings(model, sampling, system, chat_template, arguments, seed, dtype, device, images)
    talk(settings, read_typed_lines("> ") if sys.stdin.isatty() else sys.stdin, Display())


def serve_reward(
    model: RewardModel = None,
    reward: Rewards = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with `reward:` or `reward_model:`; options override it.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Default 127.0.0.1; 0.0.0.0 accepts requests from other machines.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Default 5000; 0: any free port.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the API key.")] = None,
    images: Images = False,
    image_root: ImageRoot = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="The reward model's: `auto`, `none`, or a Jinja file; default: as its run had it."),
    ] = None,
    score_at: ScoreAt = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto (default, as of `coalign generate`), float32, bfloat16.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto (default; see `coalign generate`), cpu, cuda.")] = None,
):
    """Serve a reward model or functions over HTTP, as OpenRLHF's `/get_reward`. SIGTERM finishes current requests."""
    from coalign.config import load_section
    from coalign.report.display import Display
    from coalign_serve.config.serving import ServeConfig
    from coalign_serve.serving.reward_server import serve

    settings = {
        "reward": _reward_sections(reward) or None,
        "reward_model": str(model) if model else None,
        "reward_template": chat_template,
        "reward_score_at": score_at,
        "host": host,
        "port": port,
        "api_key_env": api_key_env,
        "images": _image_section(images, image_root),
        "dtype": dtype,
        "device": device,
    }
    options = [f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None]
    serve(load_section(ServeConfig, config or {}, options), Display())


def serve(
    model: Annotated[str, typer.Argument(help="A model directory, a run folder, a name of the hub, or a GGUF file.")],
    engine: Annotated[Literal["native", "vllm", "transformers"], typer.Option(help="What computes tokens.")] = "native",
    replicas: Annotated[int, typer.Option(min=1, help="Engines, each in a process with a device of its own.")] = 1,
    host: Annotated[str, typer.Option(help="0.0.0.0 accepts requests from other machines, with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the API key.")] = None,
    chat_template: Template = None,
    chat_template_kwargs: TemplateArguments = None,
    images: Images = False,
    image_root: ImageRoot = None,
    tool_parser: Annotated[
        str | None, typer.Option(help="Format of tool calls: `hermes`, `llama`, a function.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of answers whose request has none.")] = 512,
    max_sequences: Annotated[int, typer.Option(min=1, help="Answers that an engine computes at once.")] = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
):
    """Serve a model over HTTP, as OpenAI's /v1/chat/completions and /v1/completions. SIGTERM finishes requests."""
    from coalign.config import load_section
    from coalign.report.display import Display
    from coalign_serve.config.serving import CompletionServerConfig
    from coalign_serve.serving.completion_server import serve as run

    settings = {
        "model": model,
        "engine": engine,
        "replicas": replicas,
        "host": host,
        "port": port,
        "api_key_env": api_key_env,
        "chat_template": chat_template,
        "chat_template_kwargs": _read_template_arguments(chat_template_kwargs),
        "tool_parser": tool_parser,
        "images": _image_section(images, image_root),
        "max_new_tokens": max_new_tokens,
        "max_sequences": max_sequences,
        "dtype": dtype,
        "device": device,
    }
    run(load_section(CompletionServerConfig, settings), Display())


def _image_section(images: bool, root: Path | None):
    """The settings of a server that reads images; None for one that reads text alone."""
    return ({} if root is None else {"root": str(root)}) if images or root else None


def _read_template_arguments(text: str | None):
    """Parse the arguments of a chat template. ValueError for what is no mapping."""
    from coalign.config.yaml_reader import parse

    arguments = parse(text, "--chat-template-kwargs")[0] if text else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"--chat-template-kwargs: {text!r} is no mapping like {{enable_thinking: false}}")
    return arguments


def _reward_sections(texts: list[str] | None):
    """Parse reward functions as in YAML: a plain string is a function's name."""
    from coalign.config.yaml_reader import parse

    return [parse(text, f"--reward {text}")[0] for text in texts or []]


def pipeline(
    config: Annotated[Path, typer.Argument(help="The pipeline's YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace those of the file: `rounds=2 stages.train.runtime.steps=50`."),
    ] = None,
    quiet: Annotated[bool, typer.Option(help="Warnings and the summaries only.")] = False,
):
    """Run stages (generate, score, select, train) in rounds. Finished stages are skipped; the same command resumes."""
    from coalign.report.display import Display
    from coalign_serve.config.pipeline_file import load_pipeline
    from coalign_serve.pipeline import run_pipeline

    raise typer.Exit(run_pipeline(load_pipeline(config, overrides or []), Display(quiet=quiet)))
