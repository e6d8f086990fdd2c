"""Vision-language checkpoints, of which Coalign trains and samples the language model.

The model keeps its class, so weights and adapters have the names that they have in the whole. What only images need,
the towers, is taken out of memory. An export gets it back from the files that were loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from coalign.files import list_weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform

LEGACY_TEMPLATE = "chat_template.json"
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    LEGACY_TEMPLATE,
)
INDEX = "model.safetensors.index.json"


def has_towers(config: PretrainedConfig) -> bool:
    """Whether the model of ``config`` has a language model beside others."""
    return config.get_text_config() is not config


def find_body(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder below the head of ``model``, which makes hidden states of tokens."""
    if has_towers(model.config):
        decoder = cast("PreTrainedModel", model.get_decoder())
        return decoder if decoder.get_output_embeddings() is None else find_body(decoder)
    from transformers import PreTrainedModel

    body = cast(PreTrainedModel, model.base_model)
    # Language models that are parts of others (Llama 4) name it wrongly.
    return body if body is not model else next(m for m in body.children() if isinstance(m, PreTrainedModel))


@lru_cache
def build_classifier(generating: type[PreTrainedModel]) -> Any:
    """Build the sequence classifier of a family for which transformers has none, from ``generating``, its other class.
    It is what transformers would make of its own parts, so its files have the usual names: `score.weight`, and the
    model's own weights without a language-model head."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_layers import GenericForSequenceClassification

    def from_config(cls: Any, config: PretrainedConfig, *, trust_remote_code: bool = False, **options: Any) -> Any:
        return cls._from_config(config, **options)

    name = generating.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    # transformers converts the names of weights by the name of a class, and for classes of its own modules alone.
    if (conversions := get_checkpoint_conversion_mapping(generating.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    members = {"__module__": generating.__module__, "from_config": classmethod(from_config)}
    return type(name, (GenericForSequenceClassification, generating.__bases__[0]), members)


def drop_towers(model: PreTrainedModel) -> None:
    """Take everything out of ``model`` but its language model with the head; nothing where there is nothing else."""
    head = model.get_output_embeddings()
    if head is None or not has_towers(model.config):
        return
    body = find_body(model)
    path = next(name for name, module in model.named_modules() if module is body).split(".")
    for depth in range(len(path)):
        module = model.get_submodule(".".join(path[:depth]))
        for name, child in [*module.named_children()]:
            if not {body, head}.intersection(child.modules()):
                setattr(module, name, None)
        for name, _ in [*module.named_parameters(recurse=False)]:
            setattr(module, name, None)


def carry_towers(model: PreTrainedModel, weights: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Complete the export of ``model`` in ``target`` by what `drop_towers` took from it, and by the processor's files.
    The tensors come from the files in ``source``, bit for bit and under the names that they have there: all those that
    transformers would load into none of ``weights``, the model's."""
    copy_processor(source, target)
    if not (towers := _read_towers(model, weights, source)):
        return
    files = list_weight_files(target)
    count = len(files) + 1
    names: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        shard = file.rename(target / f"model-{number:05}-of-{count:05}.safetensors")
        with safe_open(shard, "pt") as opened:
            names |= dict.fromkeys(opened.keys(), shard.name)
    last = f"model-{count:05}-of-{count:05}.safetensors"
    save_file(towers, target / last, metadata={"format": "pt"})
    names |= dict.fromkeys(towers, last)
    size = sum((target / file).stat().st_size for file in set(names.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_processor(source: Path, target: Path) -> None:
    """Copy the files that say how images are read, where there are any."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def find_conversions(model: PreTrainedModel, names: Iterable[str]) -> list[WeightTransform]:
    """Return the conversions of a checkpoint's names and tensors into those of ``model``. Prefixes that some files have
    and others do not (`vision_model.` in the towers of LLaVA) are among them only if ``names``, the checkpoint's, have
    them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, rename_source_key

    mapping, state = get_model_conversion_mapping(model, add_legacy=False), dict(model.state_dict())
    renamings, converters = _split_conversions(mapping)
    for name in names:
        rename_source_key(name, renamings, converters, model.base_model_prefix, state)
    return [conversion for conversion in mapping if conversion.was_used() or not isinstance(conversion, PrefixChange)]


def list_weight_names(source: Path) -> list[str]:
    """List the names of all weights in the files of a directory; none without files."""
    names: list[str] = []
    for file in list_weight_files(source):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


def _split_conversions(mapping: Sequence[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    return renamings, [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]


def _read_towers(model: PreTrainedModel, weights: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import rename_source_key

    prefix, mapping, state = model.base_model_prefix, get_model_conversion_mapping(model), dict(weights)
    renamings, converters = _split_conversions(mapping)
    towers = {}
    for file in list_weight_files(source):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):  # transformers renames them in this order
                if name not in state and rename_source_key(name, renamings, converters, prefix, state)[0] not in state:
                    towers[name] = opened.get_tensor(name)
    return towers
