"""`coalign convert`."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

MIB = 2**20


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face model directory, or a Megatron checkpoint (torch_dist or mp_rank_*; the folder "
            "of an iteration will do)."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write; must not exist or be empty.")],
    to: Annotated[Literal["hf", "megatron"], typer.Option(help="The format to write; megatron: torch_dist.")],
    hf: Annotated[
        Path | None,
        typer.Option(help="For a Megatron checkpoint: a Hugging Face directory of the model (config.json, tokenizer)."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size that it will be used with.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages that it will be used with.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size that it will be used with.")] = 1,
    etp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size within experts.")] = 1,
    vocab_divisor: Annotated[
        int, typer.Option(min=1, help="The vocabulary is padded to a multiple of this × --tp.")
    ] = 128,
    flavour: Annotated[
        Literal["local", "te"], typer.Option(help="Names of megatron-core's own layers, or of Transformer Engine's.")
    ] = "te",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Of the output; default: as it is.")
    ] = None,
    file_size: Annotated[int, typer.Option(min=1, help="MiB of an output file, at most.")] = 4096,
    processes: Annotated[int, typer.Option(min=1, help="That write files side by side.")] = 1,
    pickles: Annotated[bool, typer.Option(help="Read `.bin` files (their weights only).")] = False,
    without_mtp: Annotated[
        bool, typer.Option("--without-mtp", help="Leave out layers that predict further tokens (DeepSeek V3).")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted conversion stopped.")] = False,
    verify: Annotated[
        bool, typer.Option(help="Compare every tensor, bit for bit, and what both models compute.")
    ] = False,
):
    """Convert a model between Hugging Face's and Megatron's formats."""
    from coalign.runtime.display import Display
    from coalign.weights.convert import ConversionRequest
    from coalign.weights.convert import convert as run
    from coalign.weights.transport import WeightError

    display = Display()

    @contextmanager
    def progress(title: str, total: int):
        """In MiB, so that a person can read the rate."""
        done = shown = 0
        with display.progress(f"{title}, MiB", -(-total // MIB)) as bar:

            def advance(n: int) -> None:
                nonlocal done, shown
                done += n
                bar(done // MIB - shown)
                shown = done // MIB

            yield advance

    request = ConversionRequest(
        source=source,
        output=output,
        to=to,
        hf=hf,
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
    try:
        report = run(request, progress, _models())
    except WeightError as problem:
        raise ValueError(f"--verify: {problem}") from problem
    again = f", {report.reused} of them from before" if report.reused else ""
    display.note(
        f"{source} ({report.source}) -> {output} ({to}): {report.family}, {report.tensors} tensors, "
        f"{report.bytes / MIB:.1f} MiB in {report.files} files{again}"
    )
    if report.left_out:
        display.note(f"left out: {len(report.left_out)} tensors, {report.left_out[0]} to {report.left_out[-1]}")
    if report.verified is not None:
        display.note(
            f"verified: the output was read back, {report.verified} tensors of the source are the same bit for bit; "
            f"{report.models}"
        )


def _models():
    """How the models are compared, where megatron-core is installed."""
    if find_spec("megatron") is None:
        return lambda *_: "no model was run: megatron-core is not installed (coalign[megatron])"
    from coalign.modules.megatron_core.verify import models

    return models
