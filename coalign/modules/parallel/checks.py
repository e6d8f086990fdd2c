"""What a model's architecture has to say to the ways in which it is to be cut, before anything is loaded or started."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from coalign.config.schema import ModelConfig
from coalign.modules.parallel import blocks, experts


def check(model: PreTrainedModel, layers: list[nn.Module], config: ModelConfig, name: str) -> None:
    """Raises ValueError, naming the key of ``models.<name>``, for what does not divide or is not known how to cut.

    ``model`` needs no storage, ``layers`` are its decoder layers.
    """
    for key, reason in _problems(model, layers, config):
        raise ValueError(f"models.{name}.{key} is {getattr(config, key)}: {reason}")


def _problems(model: PreTrainedModel, layers: list[nn.Module], config: ModelConfig) -> Iterator[tuple[str, str]]:
    text = model.config.get_text_config()
    queries = text.num_attention_heads
    values = getattr(text, "num_key_value_heads", None) or queries
    ways, turns = config.tensor_parallel, config.context_parallel
    if ways > 1:
        if reason := blocks.unfit(model, layers):
            yield "tensor_parallel", reason
        if values % ways:
            yield "tensor_parallel", f"it does not divide the {values} heads of keys and values"
        if config.lora is not None and config.lora.dora:
            yield "tensor_parallel", "DoRA (lora.dora) needs the norms of whole rows of the weights"
        if config.optimizer.name == "muon" and not config.frozen:
            yield "tensor_parallel", "Muon (optimizer.name) orthogonalises matrices, not parts of them"
        if config.fp8:
            yield "tensor_parallel", "8-bit products (fp8) scale weights by their largest entry, and a rank has a part"
    if turns > 1:
        own = values // ways
        if queries // ways % turns:
            yield "context_parallel", f"it does not divide the {queries // ways} heads of queries of a process"
        if own % turns and turns % own:
            yield "context_parallel", f"the {own} heads of keys and values of a process do not divide over it"
    if config.compile and (ways > 1 or config.expert_parallel > 1):
        yield "compile", "layers that exchange tokens inside (tensor_parallel, expert_parallel) are not compiled"
    if config.expert_parallel > 1 and (reason := experts.unfit(model, config.expert_parallel)):
        yield "expert_parallel", reason
