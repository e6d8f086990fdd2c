"""Low-rank adapters (2106.09685) in Hugging Face models, by peft.

The model keeps its class and module names. An adapted linear layer becomes peft's layer of the same name, which holds
the frozen one as ``base_layer``. Other files do not see that: weights are exported under their original names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coalign.backends.vision_language import find_body, has_towers
from coalign.config.schema import ModelConfig, matches_layer
from coalign.devices import seed_generator
from coalign.files import read_json_object
from coalign.hub import find_directory
from coalign.roles import Context

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER = "default"  # peft's name for an unnamed adapter
INFIX = ".lora_"  # in the name of every parameter of an adapter
BASE = ".base_layer"
SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # before every name in an adapter's file
# key of LoraConfig -> field of peft.LoraConfig
FIELDS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
# Fields in which adapters may differ: an adapter's tensors show where it is, the others say how it was trained.
FREE_FIELDS = {
    *("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("target_parameters", "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "runtime_config"),
    *("ensure_weight_tying", "qalora_group_size"),
}
# Values of fields that change neither the weights beneath an adapter nor what it computes with them.
PLAIN_VALUES = {
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (["score"], ["classifier", "score"], ["score", "classifier"]),
}
GatherTensor = Callable[[Tensor], Tensor]


def attach(model: PreTrainedModel, config: ModelConfig, *, seed: int, name: str) -> None:
    """Add the adapters of ``config.lora`` to ``model``, drawn from ``seed``, and freeze its other weights. The head of
    a value or reward model is still trained. Trained parameters become float32. Layers have the ranks and scales of
    the adapter in ``lora.load``. Raises ValueError, naming ``models.<name>.lora.target``, for a pattern that matches no
    linear layer and no experts, or the head."""
    peft, lora = import_peft(), config.lora
    assert lora is not None
    experts = _find_target_experts(model, lora.target)
    for key in ("dropout", "dora"):  # peft does not know them for stacked experts
        if experts and (value := getattr(lora, key)):
            what = f"adapters of stacked experts (lora.target matches '{experts[0]}') have none; leave it out"
            raise ValueError(f"models.{name}.lora.{key} is {value}: {what}")
    loaded = read_settings(find_directory(lora.load)) if lora.load else None
    settings = peft.LoraConfig(
        **{field: getattr(lora, key) for key, field in FIELDS.items()},
        rank_pattern=loaded.rank_pattern if loaded else {},
        alpha_pattern=loaded.alpha_pattern if loaded else {},
        lora_dropout=lora.dropout,
        target_modules=_find_target_layers(model, lora.target, f"models.{name}.lora.target"),
        target_parameters=experts or None,
        task_type="CAUSAL_LM" if config.head == "lm" else "SEQ_CLS",
        base_model_name_or_path=config.load,
    )
    with seed_generator("cpu", seed):
        peft.inject_adapter_in_model(settings, model)
    for parameter in find_trained_parameters(model).values():
        parameter.requires_grad_(True)
        parameter.data = parameter.data.float()


def _find_target_experts(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The full names of the parameters with stacked experts that ``patterns`` match."""
    names = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    return [name for name in names if any(matches_layer(name, pattern) for pattern in patterns)]


def adapts_experts(model: nn.Module) -> bool:
    """Whether stacked experts of ``model`` have adapters."""
    return any(hasattr(layer, "parameter_name") for layer in _find_adapted_layers(model).values())


def check_separate(model: nn.Module, context: Context) -> None:
    """Raise ValueError for adapters that are synced separately and have no names that engines read."""
    if context.adapter_rank is None:
        return
    key = f"sync.adapters is `apart`, and models.{context.model}.lora"
    if adapts_experts(model):
        raise ValueError(f"{key}.target adapts stacked experts, for which engines read no adapters; use `merged`")
    for layer, adapted in _find_adapted_layers(model).items():
        if (rank := adapted.r[ADAPTER]) != (usual := context.adapter_rank):
            why = f"has rank {rank} in {layer} (rank_pattern), not {usual} as elsewhere"
            raise ValueError(f"{key}.load {why}; use `merged`")


def _find_target_layers(model: PreTrainedModel, patterns: Sequence[str], key: str) -> list[str]:
    """The full names of the linear layers that ``patterns`` match. ``key`` is the setting that errors name."""
    names = {module: name for name, module in model.named_modules()}
    head, embeddings = names[_head(model)], names[model.get_input_embeddings()]
    linears = [name for module, name in names.items() if isinstance(module, nn.Linear)]
    inner = [name for name in linears if name != head]
    if has_towers(model.config):  # patterns reach the tower, if it is there
        inside = {id(module) for module in find_body(model).modules()}
        inner = [name for module, name in names.items() if name in inner and id(module) in inside]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        hits = inner if pattern == "all-linear" else [name for name in linears if matches_layer(name, pattern)]
        if head in hits:
            raise ValueError(
                f"{key}: '{pattern}' matches the head '{head}', which takes no adapter: Coalign reads its weight "
                "without calling it. `all-linear` is every linear layer but the head"
            )
        if not hits and not _find_target_experts(model, [pattern]):
            if matches_layer(embeddings, pattern):
                raise ValueError(f"{key}: '{pattern}' matches the embeddings; adapters go into linear layers")
            layers = f"the linear layers of {type(model).__name__} ({_examples(inner, pattern)})"
            raise ValueError(f"{key}: '{pattern}' matches none of {layers}")
        chosen |= dict.fromkeys(hits)
    return list(chosen)


def _head(model: PreTrainedModel) -> nn.Module:
    """The layer that makes logits or a score of hidden states."""
    return model.get_output_embeddings() or cast(nn.Module, model.score)


def _examples(names: list[str], pattern: str) -> str:
    """The layers whose last names are most like the pattern's, or one of each name, for messages."""
    layers = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = get_close_matches(pattern.rpartition(".")[2].strip("*?"), layers, n=3, cutoff=0.5)
    return ", ".join(layers[key] for key in near or sorted(layers)) + ", …" if layers else "there are none"


def find_trained_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The live parameters of the adapters, and of a `score` head, by their names in an adapter's file."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if INFIX in name}
    if model.get_output_embeddings() is None:
        parameters |= {f"score.{name}": parameter for name, parameter in _head(model).named_parameters()}
    # On disk peft gives the parameter of DoRA's module the name of the module.
    short = {name: name.replace(f".{ADAPTER}.", ".").replace("vector.weight", "vector") for name in parameters}
    return {PREFIX + short[name]: parameter for name, parameter in parameters.items()}


def get_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and persistent buffers, live."""
    parameters, persistent = dict(model.named_parameters()), model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return parameters | buffers


def export_merged(
    model: nn.Module, gather: GatherTensor = lambda tensor: tensor, *, changing: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of all weights, with adapters merged in, in the dtype of the frozen weights.

    Weights without an adapter are the live tensors; others are new tensors, made one at a time. ``gather`` returns the
    full tensor of a sharded one (a collective). ``changing``: only what training changes, and the weights in the same
    block as an adapted one (queries, keys, values), because engines fuse some of them.
    """
    layers = find_adapted_weights(model)
    blocks = {find_block(name) for name in layers}
    for name, tensor in get_weights(model).items():
        fusible = name.endswith(".weight") or tensor.dim() == 3
        if INFIX in name or (changing and not (tensor.requires_grad or (fusible and find_block(name) in blocks))):
            continue
        value, layer = gather(_dense(tensor)), layers.get(name)
        yield name.replace(BASE, ""), value if layer is None else _merge(layer, value, gather)


@torch.no_grad()
def export_separate(
    model: nn.Module, gather: GatherTensor = lambda tensor: tensor, *, changing: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """As ``export_merged``, but adapters come beside the frozen weights, by their names in an adapter's file. B is
    multiplied by the scaling. Not for DoRA, whose magnitudes are left out."""
    layers = _find_adapted_layers(model)
    for name, tensor in get_weights(model).items():
        owner, infix, _ = name.partition(INFIX)
        if infix:
            value, scaling = gather(tensor), layers[owner].scaling[ADAPTER]
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), value * scaling if f"{INFIX}B." in name else value
        elif tensor.requires_grad or not changing:
            yield name.replace(f"{BASE}.", "."), gather(_dense(tensor))


def _find_adapted_layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def find_adapted_weights(model: nn.Module) -> dict[str, Any]:
    """The adapted layer of each frozen weight, by the weight's name in the model. An adapter of stacked experts belongs
    to a parameter. Those of one module are nested in each other."""
    layers = {}
    for name, layer in _find_adapted_layers(model).items():
        inner = layer
        while hasattr(inner, "base_layer"):
            name, inner = f"{name}{BASE}", inner.base_layer
        layers[f"{name}.{getattr(layer, 'parameter_name', 'weight')}"] = layer
    return layers


def find_block(name: str) -> str:
    """The module around the layer that has the weight ``name``."""
    return name.replace(BASE, "").rpartition(".")[0].rpartition(".")[0]


@torch.no_grad()
def _merge(layer: Any, base: Tensor, gather: GatherTensor) -> Tensor:
    """base + scaling · B A; with DoRA, rows are then scaled to its magnitudes (2402.09353, eq. 5). Stacked experts have
    a product each: A [E r, in] has the rows of one expert after the other, B [out, r E] columns of all in turn."""
    a, b = (gather(factor[ADAPTER].weight).float() for factor in (layer.lora_A, layer.lora_B))
    if base.dim() == 3:
        experts = len(base)
        product = torch.einsum("ore,eri->eoi", b.unflatten(1, (-1, experts)), a.unflatten(0, (experts, -1)))
        turned = getattr(layer.get_base_layer(), "is_transposed", False)
        return (base.float() + layer.scaling[ADAPTER] * (product.mT if turned else product)).to(base.dtype)
    total = base.float().addmm(b, a, alpha=layer.scaling[ADAPTER])
    if layer.use_dora[ADAPTER]:
        magnitude = gather(layer.lora_magnitude_vector[ADAPTER].weight).float()
        total.mul_((magnitude / total.norm(dim=1))[:, None])
    return total.to(base.dtype)


def _dense(tensor: Tensor) -> Tensor:
    """The weight itself, or its values if it is stored in 4 bits."""
    if getattr(tensor, "quant_state", None) is None:
        return tensor
    from peft.utils.integrations import dequantize_bnb_weight

    return dequantize_bnb_weight(cast(nn.Parameter, tensor))


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """A context in which ``model`` computes without its adapters."""
    layers = _find_adapted_layers(model).values()
    parameters = [p for layer in layers for n, p in layer.named_parameters() if "lora_" in n]
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in parameters:  # FSDP relies on what required a gradient in its first forward
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def collect(model: PreTrainedModel, gather: GatherTensor) -> dict[str, Tensor]:
    """Return the adapters' tensors by the names of an adapter's file. A collective, if ``gather`` is one."""
    return {name: gather(parameter.detach()) for name, parameter in find_trained_parameters(model).items()}


def write(model: PreTrainedModel, directory: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write what `collect` returned so that ``peft.PeftModel.from_pretrained(base, directory)`` loads it."""
    settings = cast("LoraConfig", copy(model.peft_config[ADAPTER]))
    targets = settings.target_modules or ()
    if has_towers(model.config):  # peft has shortened the names to what is unique here, not in the complete model
        layers = _find_adapted_layers(model).items()
        targets = [name for name, layer in layers if not hasattr(layer, "parameter_name")]
    settings.target_modules = sorted(targets)
    if model.get_output_embeddings() is None:
        settings.modules_to_save = ["score"]
    settings.inference_mode = True
    settings.save_pretrained(str(directory))
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(held, Path(directory) / TENSORS, metadata={"format": "pt"})


@torch.no_grad()
def load(model: PreTrainedModel, directory: str | Path, name: str) -> None:
    """Copy the values of a trained adapter into ``model``. Raises ValueError, naming keys under ``models.<name>.lora``,
    unless it has the same settings, rank and layers, and nothing besides."""
    (theirs, tensors), ours = read_adapter(directory), model.peft_config[ADAPTER]
    for key, field in FIELDS.items():
        if (there := getattr(theirs, field)) != (here := getattr(ours, field)):
            raise ValueError(f"models.{name}.lora.{key} is {here}, but {there} in the adapter {directory}")
    _check_plain(theirs, directory, name)
    parameters = find_trained_parameters(model)
    sides = [(parameters.keys() - tensors.keys(), "not there"), (tensors.keys() - parameters.keys(), "only there")]
    if differences := [f"{key.removeprefix(PREFIX)} is {side}" for keys, side in sides for key in sorted(keys)[:3]]:
        raise ValueError(f"models.{name}.lora.target is not that of {directory}: {', '.join(differences)}")
    for key, parameter in parameters.items():
        if tensors[key].shape != parameter.shape:
            raise ValueError(
                f"the adapter {directory} is of another model than models.{name}.load: {key.removeprefix(PREFIX)} is "
                f"{tuple(tensors[key].shape)} there and {tuple(parameter.shape)} here"
            )
        parameter.copy_(tensors[key])


def _check_plain(settings: LoraConfig, directory: str | Path, name: str) -> None:
    """Raise ValueError for fields of an adapter that change what is computed, other than those that are compared."""
    usual = import_peft().LoraConfig()
    compared = FREE_FIELDS | {*FIELDS.values()}
    for field in [field.name for field in fields(usual) if field.name not in compared]:
        value, plain = getattr(settings, field), (getattr(usual, field), *PLAIN_VALUES.get(field, ()))
        if value and value not in plain:
            raise ValueError(
                f"models.{name}.lora.load: {directory}/{SETTINGS} has {field}: {value!r}, which `lora` does not train; "
                f"`coalign merge` it into its base and give the result as models.{name}.load"
            )


def read_adapter(directory: str | Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """peft's configuration of an adapter, and its tensors. ValueError for a directory without a LoRA adapter."""
    return read_settings(directory), load_file(Path(directory) / TENSORS)


def read_settings(directory: str | Path) -> LoraConfig:
    """peft's configuration of an adapter. ValueError for a directory without a LoRA adapter, and for fields that this
    version of peft does not know."""
    peft = import_peft()
    for file in (SETTINGS, TENSORS):
        if not (Path(directory) / file).is_file():
            raise ValueError(f"'{directory}' is not an adapter's directory (no {file} there)")
    settings = peft.PeftConfig.from_pretrained(str(directory))
    if settings.peft_type != peft.PeftType.LORA:
        said = getattr(settings.peft_type, "value", None)
        raise ValueError(f"'{directory}' holds an adapter of type {said}; expected LORA")
    field_names = {field.name for field in fields(settings)}
    for field, value in read_json_object(Path(directory) / SETTINGS).items():
        if field not in field_names and value and (value is True or not isinstance(value, int | float)):
            raise ValueError(
                f"{directory}/{SETTINGS} has {field}: {value!r}, which peft {peft.__version__} does not know; update it"
            )
    return settings


def import_peft() -> ModuleType:
    """Import peft. Raises ImportError, with the remedy, without it."""
    # peft imports bitsandbytes, which warns of a kernel that it would download, whatever it is imported for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import peft
    except ImportError as problem:
        raise ImportError("adapters (models.*.lora, coalign merge) need peft: pip install coalign[peft]") from problem
    return peft
