"""Commands that make a model directory from another one: another format, or more tokens."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

MIB = 2**20


def extend_vocab(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model directory, a name of the hub, or a GGUF file.")],
    tokens: Annotated[
        Path,
        typer.Option(
            help="New tokens: a text file with one token per line (they become added tokens, which match inside words "
            "too), or a `tokenizer.json` or SentencePiece `.model` (its pieces are merged into the tokenizer's BPE)."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write; must not exist or be empty.")],
    special: Annotated[bool, typer.Option(help="Make the tokens of a list special: decoded texts omit them.")] = False,
    pad_to_multiple: Annotated[
        int,
        typer.Option(min=1, help="Rows are padded to a multiple of this, if the model's unused rows do not suffice."),
    ] = 64,
    sample: Annotated[Path | None, typer.Option(help="A text file whose tokens are counted before and after.")] = None,
):
    """Add tokens to a tokenizer and a model. A new row is the mean of the rows of the token's old pieces."""
    from coalign.hub import fetch
    from coalign.report.display import Display
    from coalign_megatron.vocab import extend

    report = extend(fetch(str(model)), tokens, output, special=special, pad_to_multiple=pad_to_multiple, sample=sample)
    display = Display()
    display.table(f"{model} -> {output}", report.table())
    for why, what in report.tokens.skipped.items():
        if what:
            display.note(f"skipped, {why}: {', '.join(map(repr, what[:8]))}{', ...' if len(what) > 8 else ''}")


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face model directory, or a Megatron checkpoint (torch_dist or mp_rank_*; its folder or "
            "the folder of one iteration)."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write; must not exist or be empty.")],
    to: Annotated[Literal["hf", "megatron"], typer.Option(help="The format to write; megatron: torch_dist.")],
    hf: Annotated[
        Path | None,
        typer.Option(help="For a Megatron checkpoint: a Hugging Face directory of the model (config.json, tokenizer)."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of later use.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages of later use.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size of later use.")] = 1,
    etp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size within experts, of later use.")] = 1,
    vocab_divisor: Annotated[
        int, typer.Option(min=1, help="The vocabulary is padded to a multiple of this × --tp.")
    ] = 128,
    flavour: Annotated[
        Literal["local", "te"], typer.Option(help="Names of megatron-core's own layers, or of Transformer Engine's.")
    ] = "te",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Of the output; default: the source's.")
    ] = None,
    file_size: Annotated[int, typer.Option(min=1, help="Most MiB of an output file.")] = 4096,
    processes: Annotated[int, typer.Option(min=1, help="How many processes write files.")] = 1,
    pickles: Annotated[bool, typer.Option(help="Read `.bin` pickles, without running code from them.")] = False,
    without_mtp: Annotated[
        bool, typer.Option("--without-mtp", help="Leave out the multi-token-prediction layers (DeepSeek V3).")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted conversion.")] = False,
    verify: Annotated[
        bool, typer.Option(help="Compare every tensor bit for bit, and the log-probs of both models.")
    ] = False,
):
    """Convert a model between Hugging Face's and Megatron's formats."""
    from coalign.hub import fetch
    from coalign.report.display import Display
    from coalign.weights.sync.transport import WeightError
    from coalign_megatron.convert import ConversionRequest
    from coalign_megatron.convert import convert as run

    display = Display()

    @contextmanager
    def progress(title: str, total: int):
        """Show bytes as MiB, so that the rate is readable."""
        done = shown = 0
        with display.progress(f"{title}, MiB", -(-total // MIB)) as bar:

            def advance(n: int) -> None:
                nonlocal done, shown
                done += n
                bar(done // MIB - shown)
                shown = done // MIB

            yield advance

    request = ConversionRequest(
        source=fetch(str(source)),
        output=output,
        to=to,
        hf=None if hf is None else fetch(str(hf), weights=False),
        tensor=tp,
        pipeline=pp,
        expert=ep,
        expert_tensor=etp,
        vocab_divisor=vocab_divisor,
        flavour=flavour,
        dtype=dtype,
        file_size=file_size * MIB,
        processes=processes,
        pickles=pickles,
        without_mtp=without_mtp,
        resume=resume,
        verify=verify,
    )
    if find_spec("megatron") is None:
        compare = lambda *_: "no model was run: megatron-core is not installed (coalign[megatron])"  # noqa: E731
    else:
        from coalign_megatron.backend.verify import compare_models as compare
    try:
        report = run(request, progress, compare)
    except WeightError as problem:
        raise ValueError(f"--verify: {problem}") from problem
    reused = f", {report.reused} of them from an interrupted run" if report.reused else ""
    display.note(
        f"{source} ({report.source}) -> {output} ({to}): {report.family}, {report.tensors} tensors, "
        f"{report.bytes / MIB:.1f} MiB in {report.files} files{reused}"
    )
    if report.left_out:
        display.note(f"left out: {len(report.left_out)} tensors, {report.left_out[0]} to {report.left_out[-1]}")
    if report.verified is not None:
        display.note(
            f"verified: the output was read back, {report.verified} tensors of the source are the same bit for bit; "
            f"{report.models}"
        )
