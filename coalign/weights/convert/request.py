"""What a conversion is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Flavour = Literal["local", "te"]  # whose names of norms: megatron-core's own layers, or Transformer Engine's


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRequest:
    """``source``, ``output``: directories. ``to``: the format that is written.

    ``hf``: for a Megatron checkpoint that we did not write, a Hugging Face directory of the same model (config.json,
    tokenizer). ``tensor`` … ``expert_tensor``: the layout that the model will be used in; torch_dist files are the same
    for all, but the vocabulary is padded to a multiple of ``vocab_divisor`` × tensor, and all must divide the model.
    ``dtype``: of the output (None: as it is; tensors that must be float32 stay so). ``file_size``: bytes of an output
    file. ``pickles``: `.bin` files may be read (weights only). ``without_mtp``: layers after the last one, which
    predict further tokens, are left out.
    """

    source: Path
    output: Path
    to: Literal["hf", "megatron"]
    hf: Path | None = None
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    vocab_divisor: int = 128
    flavour: Flavour = "te"
    dtype: str | None = None
    file_size: int = 4 * 2**30
    processes: int = 1
    pickles: bool = False
    without_mtp: bool = False
    resume: bool = False
    verify: bool = False
