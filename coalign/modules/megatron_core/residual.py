"""Layers whose attention and MLP read the same residual (GPT-NeoX, Falcon)."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from coalign.modules.megatron_core.attention import PackedRow


class ParallelLayer(TransformerLayer):
    """x + attention(norm(x)) + MLP(norm(x)). ``one_norm``: the same one for both, else each has its own."""

    def __init__(self, *arguments: Any, one_norm: bool, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.one_norm = one_norm

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[P, 1, H] -> the same; and nothing, where megatron-core has the context of cross-attention."""
        read = self.input_layernorm(hidden_states)
        attended = self.self_attention(
            read, attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        made = self.mlp(read if self.one_norm else self.pre_mlp_layernorm(hidden_states))
        fused = self.config.bias_dropout_fusion
        out = self.self_attn_bda(self.training, fused)(attended, hidden_states, self.hidden_dropout)
        return self.mlp_bda(self.training, fused)(made, out, self.hidden_dropout), None
