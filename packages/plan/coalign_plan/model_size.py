"""The sizes of a language model that its speed depends on: parameters, FLOPs and cache, layer by layer.

``coalign_plan.hf_config`` reads them from a Hugging Face configuration. Matrices count; norms and biases, about a
thousandth of a model, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def count_kept(results: float, hidden: int, recomputation: str | None) -> float:
    """Return the numbers that a layer keeps per token for the backward pass.

    Without recomputation that is the ``results`` of its matrix products, and twelve of the hidden size for norms,
    residuals and activation functions; with `selective` the results alone; with `full` the layer's input.
    """
    return hidden if recomputation == "full" else results + (2 if recomputation == "selective" else 12) * hidden


@dataclass(frozen=True)
class LayerSize:
    """Sizes of ``count`` identical layers, for one of them.

    ``attention`` is the matrices of attention or of what stands in for it. ``score_width`` is the sum over query heads
    of key and value widths: attention to one earlier token takes twice as many FLOPs. ``decode_score_width`` is that of
    generation, where latent attention (2405.04434) works on compressed keys. ``cache`` is the numbers kept per token,
    in ``cache_heads`` parts that tensor parallelism can divide; ``state`` those kept per sequence, whatever its length;
    ``state_flops`` what a token's use of them takes. ``matrix_width`` is the sum of inputs and outputs of the matrices
    that all tokens pass, ``expert_width`` that of one expert's.
    """

    count: int
    attention: int
    mlp: int = 0
    experts: int = 0
    expert: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    router: int = 0
    score_width: int = 0
    decode_score_width: int = 0
    cache: int = 0
    cache_heads: int = 1
    state: int = 0
    state_flops: int = 0
    window: int | None = None
    matrix_width: int = 0
    expert_width: int = 0

    @property
    def parameters(self) -> int:
        return self.attention + self.mlp + self.experts * self.expert + self.shared_experts + self.router

    @property
    def active(self) -> int:
        return self.attention + self.mlp + self.active_experts * self.expert + self.shared_experts + self.router

    @property
    def dense(self) -> int:
        """Parameters that every token passes."""
        return self.attention + self.mlp + self.shared_experts + self.router

    @property
    def matrix_numbers(self) -> int:
        """Numbers that a token's matrix products read and write beside the weights."""
        return self.matrix_width + self.active_experts * self.expert_width

    def count_kept(self, hidden: int, recomputation: str | None) -> float:
        """Return the numbers that a layer keeps per token for the backward pass."""
        results = self.active / hidden + self.active_experts * hidden  # experts have their own copy of the input
        return count_kept(results, hidden, recomputation)

    def attended(self, context: float) -> float:
        """Return how many tokens a query attends that stands at the end of ``context`` tokens."""
        return min(context, self.window) if self.window else context

    def attended_mean(self, length: float) -> float:
        """Return how many tokens a query of a causal sequence of ``length`` tokens attends, on average."""
        if self.window and length > self.window:
            return self.window * (1 - self.window / (2 * length))
        return length / 2


@dataclass(frozen=True)
class TowerSize:
    """An encoder of images or sound in front of a language model.

    ``parameters`` include its projector. ``patch``: numbers of an image's patch. ``merged``: patches that become one
    token, at least.
    """

    parameters: int
    hidden: int
    layers: int
    patch: int = 0
    merged: int = 1

    def count_kept(self, recomputation: str | None) -> float:
        """Return the numbers that a layer keeps per patch for the backward pass."""
        return count_kept(self.parameters / self.layers / self.hidden, self.hidden, recomputation)


@dataclass(frozen=True)
class ModelSize:
    """Sizes of one language model, by layers; towers of vision-language models counted beside it."""

    hidden: int
    vocabulary: int
    layers: tuple[LayerSize, ...]
    embedding: int
    head: int
    is_tied: bool
    towers: tuple[TowerSize, ...] = ()
    name: str = ""

    @property
    def layer_count(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters; a head tied to the embedding counts once."""
        return sum(self.parameters_by_kind().values())

    @property
    def active_parameters(self) -> int:
        """Parameters of the language model that one token passes, with embedding and head."""
        return self._sum(lambda layer: layer.active) + self.embedding + (0 if self.is_tied else self.head)

    def parameters_by_kind(self) -> dict[str, int]:
        """Return the parameters by kind; the sum is all of them."""
        return {
            "embedding": self.embedding,
            "attention": self._sum(lambda layer: layer.attention),
            "mlp": self._sum(lambda layer: layer.mlp),
            "experts": self._sum(lambda layer: layer.experts * layer.expert),
            "shared_experts": self._sum(lambda layer: layer.shared_experts),
            "router": self._sum(lambda layer: layer.router),
            "head": 0 if self.is_tied else self.head,
            "vision_tower": sum(tower.parameters for tower in self.towers),
        }

    @property
    def expert_parameters(self) -> int:
        """Parameters that expert parallelism divides."""
        return self._sum(lambda layer: layer.experts * layer.expert)

    @property
    def is_moe(self) -> bool:
        return any(layer.experts for layer in self.layers)

    def forward_flops(self, length: float, head_share: float = 1.0) -> float:
        """Return the FLOPs per token of the forward pass over causal sequences of ``length`` tokens.

        ``head_share`` is the share of the tokens that need logits.
        """
        return self.matmul_flops(head_share) + self.attention_flops(length)

    def matmul_flops(self, head_share: float = 1.0) -> float:
        """Return the FLOPs per token of products with weights: two per active parameter."""
        return 2.0 * self._sum(lambda layer: layer.active) + 2.0 * self.head * head_share

    def attention_flops(self, length: float) -> float:
        """Return the FLOPs per token of attention scores, their use, and of recurrent states."""
        return self._sum(lambda layer: 2 * layer.score_width * layer.attended_mean(length) + layer.state_flops)

    def cache_numbers(self, context: float) -> float:
        """Return the numbers that a sequence of ``context`` tokens keeps in keys, values and states."""
        return self._sum(lambda layer: layer.cache * layer.attended(context) + layer.state)

    def kv_bytes(self, context: float, width: float = 2.0) -> float:
        """Return the bytes of keys, values and states of a sequence of ``context`` tokens."""
        return self.cache_numbers(context) * width

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of adapters of this rank on all matrices of the layers but the experts."""
        return int(self._sum(lambda layer: layer.matrix_width) * rank)

    def _sum(self, value: Callable[[LayerSize], float]) -> Any:
        return sum(layer.count * value(layer) for layer in self.layers)
