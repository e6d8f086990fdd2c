"""Merges an adapter of any type that peft can merge into the weights of its base model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from coalign.backends import lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Fields of adapters that compute more, or elsewhere, than a sum of weights.
UNMERGEABLE = ("alora_invocation_tokens", "arrow_config", "layer_replication", "monteclora_config")
# factor in a file -> (axis of a linear layer's weight, axis of the factor) that have the same size
FACTORS = {"lora_A": (1, 1), "lora_B": (0, 0), "lora_embedding_A": (0, 1), "lora_embedding_B": (1, 0)}
# Between an embedding's name and `.weight`, in a file.
EMBEDDING_INFIXES = ("", lora.BASE, ".original_module", f".token_adapter{lora.BASE}")


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, directory: str | Path) -> PreTrainedModel:
    """Merge a LoRA adapter of any type that peft can merge into the weights of ``model``.

    Embeddings have the adapter's rows if it holds them all. Embeddings and a head that share a weight have one each if
    the adapter changes them unequally. Raises ValueError for an adapter of layers that the model lacks, or has in
    another size, and for one without tensors that its settings ask for.
    """
    settings, tensors = lora.read_adapter(directory)
    for field in UNMERGEABLE:
        if value := getattr(settings, field, None):
            raise ValueError(f"{directory}/{lora.SETTINGS} has {field}: {value!r}, which no weights can hold merged")
    if "_niter_" in str(init := settings.init_lora_weights):
        raise ValueError(
            f"{directory}/{lora.SETTINGS} has init_lora_weights: {init!r}, so it belongs to weights that were drawn at "
            "random and not saved; save it with peft's path_initial_model_for_weight_conversion"
        )
    _resize_embeddings(model, tensors, directory)
    _check_shapes(model, settings, tensors, directory)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*tie_word_embeddings")  # they are separated below
        adapted = lora.import_peft().get_peft_model(model, settings)
        loaded = adapted.load_adapter(directory, lora.ADAPTER)
        # Embeddings that were resized stand in the file twice.
        taken = [tensor for key, tensor in tensors.items() if key not in loaded.unexpected_keys]
        unknown = [key for key in loaded.unexpected_keys if not any(torch.equal(tensors[key], t) for t in taken)]
        if wrong := loaded.missing_keys or unknown:
            side = "lacks" if loaded.missing_keys else "has, and its settings do not ask for,"
            raise ValueError(f"the adapter {directory} {side} {', '.join(sorted(wrong)[:3])}")
        if head is not None and tied:
            head.weight = nn.Parameter(head.weight.clone())
        merged = adapted.merge_and_unload(safe_merge=True)
    if head is not None and tied:  # they share a weight again if they are equal
        embeddings, head = merged.get_input_embeddings(), merged.get_output_embeddings()
        if equal := torch.equal(embeddings.weight, head.weight):
            head.weight = embeddings.weight
        for config in (merged.config, merged.config.get_text_config()):
            config.tie_word_embeddings = equal
    return merged


def _resize_embeddings(model: PreTrainedModel, tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Give embeddings and head of ``model`` as many rows as they have in an adapter that holds them whole."""
    names = {module: name for name, module in model.named_modules()}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = {
        layer: tensors[key].shape[0]
        for layer in (embeddings, head)
        for suffix in EMBEDDING_INFIXES
        if (key := f"{lora.PREFIX}{names.get(layer)}{suffix}.weight") in tensors
    }
    model_rows = cast(nn.Embedding, embeddings).weight.shape[0]
    if not rows or {*rows.values()} == {model_rows}:
        return
    separate = head is not None and head.weight is not embeddings.weight
    if len({*rows.values()}) > 1 or (separate and len(rows) == 1):
        there = " and ".join(f"{names[layer]} of {count} rows" for layer, count in rows.items())
        needed = f"{model_rows} in embeddings and head, and needs both"
        raise ValueError(f"the adapter {directory} holds {there}; the model has {needed}")
    model.resize_token_embeddings(rows.popitem()[1], mean_resizing=False)


def _check_shapes(model: PreTrainedModel, settings: Any, tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Raise ValueError for adapters of layers that ``model`` lacks, or has in another size."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    wrong = []
    for key, tensor in tensors.items():
        owner, _, factor = key.removeprefix(lora.PREFIX).removesuffix(".weight").rpartition(".")
        if (expected := shapes.get(key.removeprefix(lora.PREFIX), tuple(tensor.shape))) != tensor.shape:
            wrong.append(f"{key.removeprefix(lora.PREFIX)} is {expected}, there {tuple(tensor.shape)}")
        # For stacked experts the key does not name the parameter; peft compares their sizes.
        if factor not in FACTORS or (settings.target_parameters and f"{owner}.weight" not in shapes):
            continue
        shape, (side, axis) = shapes.get(f"{owner}.weight"), FACTORS[factor]
        if shape is None:
            wrong.append(f"there is no {owner}")
        elif shape[side != (settings.fan_in_fan_out and "embedding" not in factor)] != tensor.shape[axis]:
            wrong.append(f"{owner}.weight is {shape}, {factor} {tuple(tensor.shape)}")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ValueError(f"the adapter {directory} is of another model: {'; '.join(wrong[:3])}{more}")
