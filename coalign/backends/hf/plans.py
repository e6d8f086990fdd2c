"""How a model of transformers can be cut over ranks: its plans, experts and decoder layers; and what is refused.

Reads the model alone, with or without weights. What cuts it is in coalign.backends.hf.parallel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, cast

from torch import nn

from coalign.backends.lora import adapts_experts
from coalign.backends.vision_language import find_body
from coalign.config.schema import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DISPATCH, SLICED = "ep_dispatch_experts", "moe_tp_experts"  # styles in the plans of transformers


def find_style(name: str, plan: dict[str, str]) -> str | None:
    """Return the style of ``name`` in a model's ``plan``, whose keys are patterns (`layers.*.mlp.up_proj`)."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


# Language models that have no plan in transformers 5.19, and a family whose layers are the same.
SAME_LAYERS = {"qwen3_vl_text": "qwen3"}


def read_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's plan of tensor parallelism, by patterns of full names."""
    relative = SAME_LAYERS.get(model.config.get_text_config().model_type)
    if model.tp_plan or relative is None:
        return model.tp_plan
    body = find_body(model)
    prefix = next(name for name, module in model.named_modules() if module is body)
    from transformers import CONFIG_MAPPING  # slow

    plan = CONFIG_MAPPING[relative].base_model_tp_plan or {}
    return {f"{prefix}.{name}": style for name, style in plan.items()}


def find_experts(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that hold the stacked experts of a layer, according to the model's plans."""
    modules, plan = model.named_modules(), read_plan(model)
    return [m for n, m in modules if find_style(n, model.ep_plan) == DISPATCH or find_style(n, plan) == SLICED]


def _find_unfit_experts(model: PreTrainedModel, ways: int) -> str | None:
    """Why the experts of a model cannot be distributed over so many ranks; None if they can."""
    experts = [module for name, module in model.named_modules() if find_style(name, model.ep_plan) == DISPATCH]
    if not experts and find_experts(model):
        return f"the plans of transformers {version('transformers')} cut experts and distribute none; those of 5.19 do"
    if not experts:
        return f"{type(model).__name__} has no experts to distribute"
    counts = {cast(int, module.num_experts) for module in experts}
    return None if not any(count % ways for count in counts) else f"it does not divide the {max(counts)} experts"


# How a plan of transformers cuts a linear layer: its outputs, its inputs, or not at all. The styles in UNCUT repair
# gradients in transformers' own implementation; here they are right without.
OUTPUTS, INPUTS = "colwise", "rowwise"
UNCUT = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}


def _find_unfit_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> str | None:
    """Why the plan of a model cannot be applied; None if it can."""
    blocks = [block for layer_blocks in list_cut_blocks(model, layers) for block in layer_blocks]
    names, plan = {module: name for name, module in model.named_modules()}, read_plan(model)
    styles = {names[module]: find_style(names[module], plan) for block in blocks for module in block.modules()}
    for name, style in styles.items():
        if style not in {OUTPUTS, INPUTS, None} | UNCUT:
            return f"the model's plan cuts '{name}' as `{style}`, which Coalign does not know"
    return None if {OUTPUTS, INPUTS} <= set(styles.values()) else f"{type(model).__name__} brings no plan for it"


def list_cut_blocks(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The blocks of each layer that the plan cuts. One with experts computes each rank's chunk of the row instead."""
    names, plan = {module: name for name, module in model.named_modules()}, read_plan(model)
    experts = set(find_experts(model))

    def is_cut(block: nn.Module) -> bool:
        inner = set(block.modules())
        return experts.isdisjoint(inner) and any(find_style(names[module], plan) for module in inner)

    return [[block for block in layer.children() if is_cut(block)] for layer in layers]


def check_cuts(model: PreTrainedModel, layers: list[nn.Module], config: ModelConfig, name: str) -> None:
    """Raises ValueError, naming the key of ``models.<name>``, for an architecture that cannot be cut as configured.
    ``model`` may be on the meta device; ``layers`` are its decoder layers."""
    if config.tensor_parallel == config.context_parallel == config.expert_parallel == 1:
        return
    for key, reason in _find_problems(model, layers, config):
        raise ValueError(f"models.{name}.{key} is {getattr(config, key)}: {reason}")


def _find_problems(model: PreTrainedModel, layers: list[nn.Module], config: ModelConfig) -> Iterator[tuple[str, str]]:
    text = model.config.get_text_config()
    queries = text.num_attention_heads
    values = getattr(text, "num_key_value_heads", None) or queries
    ways, turns = config.tensor_parallel, config.context_parallel
    if ways > 1:
        is_muon = config.optimizer.name == "muon" and not config.frozen
        for is_refused, reason in (
            (unfit := _find_unfit_layers(model, layers), unfit),
            (values % ways, f"it does not divide the {values} heads of keys and values"),
            (config.lora and config.lora.dora, "DoRA (lora.dora) needs the norms of whole rows of the weights"),
            (is_muon, "Muon (optimizer.name) orthogonalises matrices, not parts of them"),
            (config.fp8, "8-bit products (fp8) scale weights by their largest entry, and a rank has a part"),
        ):
            if is_refused:
                yield "tensor_parallel", str(reason)
    if adapts_experts(model):
        for key in ("tensor_parallel", "expert_parallel"):
            if getattr(config, key) > 1:
                yield key, "adapters of stacked experts (lora.target) are computed from whole stacks"
    if turns > 1:
        local_values = values // ways
        if queries // ways % turns:
            yield "context_parallel", f"it does not divide the {queries // ways} heads of queries of a process"
        if local_values % turns and turns % local_values:
            yield "context_parallel", f"the {local_values} heads of keys and values of a process do not divide over it"
    if config.compile and (ways > 1 or config.expert_parallel > 1):
        yield "compile", "layers that exchange tokens inside (tensor_parallel, expert_parallel) are not compiled"
    if config.expert_parallel > 1 and (reason := _find_unfit_experts(model, config.expert_parallel)):
        yield "expert_parallel", reason


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the language model."""
    return _find_layers(model, inside=True)


def tower_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a vision-language model outside of its language model. Every rank computes all of them."""
    return _find_layers(model, inside=False)


def _find_layers(model: PreTrainedModel, *, inside: bool) -> list[nn.Module]:
    """The modules of the classes in `_no_split_modules`. (Sharding replaces their class by a subclass.)"""
    blocks, body = set(model._no_split_modules or ()), {*find_body(model).modules()}
    layers = [m for m in model.modules() if blocks & {base.__name__ for base in type(m).__mro__}]
    return [layer for layer in layers if (layer in body) == inside]
