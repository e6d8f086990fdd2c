"""The request for a conversion, and its source: the format of a directory, its model and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coalign.files import read_model_config
from coalign.weights.metadata import METADATA
from coalign_megatron import families
from coalign_megatron.convert import huggingface, legacy, torch_dist
from coalign_megatron.families import Family, MegatronConfig, Parameter

ITERATION = "latest_checkpointed_iteration.txt"
HF = "hf"  # folder of a Megatron directory with config.json, tokenizer and the like


# The weights of a checkpoint, as boxes of Hugging Face tensors. `ranks`: the shards that each rank's file holds (one
# rank in formats without). `dtypes`: the stored dtype of each Hugging Face tensor. `fetch`: a tensor of a file, mapped.
CheckpointReader = huggingface.HuggingFaceWeights | legacy.LegacyWeights | torch_dist.TorchDistWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRequest:
    """The settings of a conversion from the directory ``source`` to the directory ``output``, in the format ``to``.

    ``hf``: a Hugging Face directory of the same model (config.json, tokenizer), for Megatron checkpoints of other
    tools. ``tensor`` … ``expert_tensor``: parallel sizes of later use. They must divide the model, and the vocabulary
    is padded to a multiple of ``vocab_divisor`` × tensor; otherwise torch_dist files do not depend on them.
    ``flavour``: names of norms, as in megatron-core's own layers or in Transformer Engine's. ``dtype``: that of the
    output (None: the source's); tensors that must be float32 stay so. ``file_size``: most bytes of an output file.
    ``pickles``: read `.bin` files, without running code from them. ``without_mtp``: leave out multi-token-prediction
    layers.
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
    flavour: torch_dist.Flavour = "te"
    dtype: str | None = None
    file_size: int = 4 * 2**30
    processes: int = 1
    pickles: bool = False
    without_mtp: bool = False
    resume: bool = False
    verify: bool = False


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint that can be read.

    ``format``: `hf`, `torch_dist` or `legacy`. ``hf``: folder of config.json and the tokenizer. ``files``: those with
    weights. ``details``: entries for the manifest. ``changes``: keys that the output's config.json has otherwise (None:
    does not have).
    """

    format: str
    hf: Path
    family: Family
    config: MegatronConfig
    files: list[Path]
    weights: CheckpointReader
    details: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)


def open_source(request: ConversionRequest) -> OpenedCheckpoint:
    """Open the source of a conversion. Raises ValueError for other formats and for weights that do not fit config.json.

    Raises FileNotFoundError if there is no directory.
    """
    if not request.source.is_dir():
        raise FileNotFoundError(f"{request.source} is not a directory")
    folder = find_iteration(request.source)
    if folder is None:
        return _open_huggingface(request)
    return _open_megatron(request, folder)


def find_iteration(source: Path) -> Path | None:
    """Return the folder of a Megatron checkpoint's newest iteration, or None for other formats.

    ``source`` is the checkpoint or the folder of one iteration.
    """
    if (source / METADATA).is_file() or legacy.is_legacy(source):
        return source
    tracker = source / ITERATION
    if not tracker.is_file():
        return None
    newest = tracker.read_bytes()[:100].strip().decode(errors="replace")
    if newest != "release" and not newest.isdecimal():
        raise ValueError(f"{tracker} says {newest!r}; expected the number of an iteration, or release")
    folder = source / (newest if newest == "release" else f"iter_{int(newest):07d}")
    if not folder.is_dir():
        raise ValueError(f"{tracker} says {newest!r}, but there is no {folder}")
    return folder


def _open_huggingface(request: ConversionRequest) -> OpenedCheckpoint:
    hf = read_model_config(request.source)
    family = families.find_family(hf)
    config = family.config(hf)
    changes = _check_quantization(hf)
    reader = huggingface.HuggingFaceReader(request.source, pickled=request.pickles)
    beyond = [name for name in reader.names if (family.layer_of(name) or 0) >= config.num_layers]
    if hf.get("num_nextn_predict_layers") and beyond:
        if not request.without_mtp:
            raise ValueError(
                f"{request.source}: layers from {config.num_layers} on are for multi-token prediction: "
                f"{len(beyond)} tensors ({beyond[0]} …), which are not converted: --without-mtp leaves them out"
            )
        changes["num_nextn_predict_layers"] = 0
    left_out = beyond if request.without_mtp else []
    stored = family.stored_names(config, [name for name in reader.names if name not in set(left_out)])
    weights = huggingface.HuggingFaceWeights(reader, family.sources(config), stored)
    details = {"left_out": left_out}
    return OpenedCheckpoint("hf", request.source, family, config, reader.files, weights, details, changes)


def _check_quantization(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of config.json for FP8 weights. Raises ValueError for other quantisations."""
    how = hf.get("quantization_config")
    if how is None:
        return {}
    if (how.get("quant_method"), how.get("weight_block_size")) != ("fp8", [huggingface.BLOCK, huggingface.BLOCK]):
        raise ValueError(
            f"config.json: 'quantization_config' is {how}; what can be read is 'quant_method' 'fp8' with "
            f"'weight_block_size' [{huggingface.BLOCK}, {huggingface.BLOCK}]"
        )
    return {"quantization_config": None, **dtype_keys(hf, "bfloat16")}


def dtype_keys(hf: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the changes of config.json for weights of this dtype."""
    return dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in hf] or ["dtype"], dtype)


def _open_megatron(request: ConversionRequest, folder: Path) -> OpenedCheckpoint:
    candidates = [request.hf] if request.hf else [request.source / HF, request.source.parent / HF]
    hf_folder = next((candidate for candidate in candidates if (candidate / "config.json").is_file()), None)
    if hf_folder is None:
        raise ValueError(
            f"{request.source} has no config.json: --hf names a Hugging Face directory of the same model "
            "(config.json, tokenizer)"
        )
    hf = read_model_config(hf_folder)
    family = families.find_family(hf)
    config = family.config(hf)
    if legacy.is_legacy(folder):
        ranks = legacy.read_ranks(folder)
        parameters = list_parameters(family, config, legacy.count_vocabulary_rows(ranks))
        weights = legacy.LegacyWeights(ranks, parameters, config)
        return OpenedCheckpoint("legacy", hf_folder, family, config, [rank.path for rank in ranks], weights, {})
    if not (folder / METADATA).is_file():
        raise ValueError(f"{folder} has neither mp_rank_* nor {METADATA}: no format that can be read")
    parameters = list_parameters(family, config, torch_dist.count_vocabulary_rows(folder))
    weights = torch_dist.TorchDistWeights(folder, parameters, config)
    files = sorted({stored.file for stored in weights.chunks.values()})
    details = {"flavour": weights.naming.flavour}
    return OpenedCheckpoint("torch_dist", hf_folder, family, config, files, weights, details)


def list_parameters(family: Family, config: MegatronConfig, rows: int) -> dict[str, Parameter]:
    """Return the parameters with a vocabulary of ``rows``. Raises ValueError for fewer than the model has."""
    if rows < config.vocab_size:
        raise ValueError(f"the word embedding has {rows} rows, config.json says vocab_size {config.vocab_size}")
    return family.parameters(config, vocab_divisor=rows)
