"""Where a Megatron parameter lies in a `torch_dist` directory: the key of the stacked tensor, and the place in it.

Layers are stacked on the first axis, experts on the next one; where dense layers and layers with experts alternate,
each layer has a key of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from coalign.weights.convert.request import Flavour
from coalign.weights.families import MegatronConfig, Parameter
from coalign.weights.families.model import EXPERT, LAYER
from coalign.weights.families.names import in_torch_dist

STACKED = "decoder.layers."


def stacks(config: MegatronConfig) -> bool:
    """Whether megatron-core has all layers in one tensor: it does where all layers are alike."""
    return len(set(config.moe_layer_freq)) < 2


@dataclass(frozen=True, slots=True)
class TorchDistKey:
    """``index``: of the layer and the expert in the tensor ``key``, whose first sizes are ``stacked``."""

    key: str
    index: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()

    @property
    def object(self) -> str:
        """What an object at this place is called."""
        index, sizes = self.index or (0,), self.stacked or (1,)
        return f"{self.key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"


@dataclass(frozen=True, slots=True)
class Naming:
    """``stacked``: layers are (else each has its own keys, as Megatron writes them if `moe_layer_freq` is a list)."""

    flavour: Flavour
    stacked: bool

    def place(self, parameter: Parameter, config: MegatronConfig) -> TorchDistKey:
        name = in_torch_dist(config, parameter, self.flavour)
        if parameter.layer is None:
            return TorchDistKey(name)
        return self._place(name.removeprefix(LAYER), parameter, config)

    def objects(self, parameter: Parameter, config: MegatronConfig) -> list[TorchDistKey]:
        """The `_extra_state` of the module that a weight is of: empty, but Megatron asks for them. More of them than
        it asks for do no harm."""
        if not parameter.template.endswith(".weight") or parameter.kind == "vocabulary":
            return []
        linear = parameter.kind in ("column", "row", "gated")
        if not linear and self.flavour == "local":
            return []
        module = parameter.template.removesuffix(".weight")
        if parameter.layer is None:
            return [TorchDistKey(f"{module}._extra_state")]
        relative = module.removeprefix(LAYER)
        found = [relative]
        if relative == "self_attention.linear_proj" and self.flavour == "te":
            found.append("self_attention.core_attention")
        return [self._place(f"{each}._extra_state", parameter, config) for each in found]

    def _place(self, relative: str, parameter: Parameter, config: MegatronConfig) -> TorchDistKey:
        assert parameter.layer is not None
        prefix, index, sizes = f"decoder.layers.{parameter.layer}.", (), ()
        if self.stacked:
            prefix, index, sizes = STACKED, (parameter.layer,), (config.num_layers,)
        if parameter.expert is not None:
            assert config.num_moe_experts is not None
            relative = relative.replace(EXPERT, "mlp.experts.experts.")
            index, sizes = (*index, parameter.expert), (*sizes, config.num_moe_experts)
        return TorchDistKey(prefix + relative, index, sizes)
