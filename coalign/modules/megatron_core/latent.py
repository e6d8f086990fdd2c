"""Multi-head latent attention (DeepSeek V2, 2405.04434) of megatron-core over packed rows."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.transformer import multi_latent_attention
from torch import Tensor

from coalign.modules.megatron_core.attention import PackedRow
from coalign.modules.megatron_core.rotary import attention_factor
from coalign.weights.families import RopeScaling

# 0.16.1 asks whether a layer is of a class of Transformer Engine's that is a stand-in where that is not installed.
multi_latent_attention.HAVE_TE = find_spec("transformer_engine") is not None

# Of the norms of compressed states, whatever a config.json says for the others.
EPSILON = 1e-6


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """With angles by position; megatron-core's are by place in the row. And with the right gradient without Transformer
    Engine: under tensor parallelism megatron-core takes that of the part of a key that all heads share from the rank's
    own heads alone.

    ``scaling``: of the angles.
    """

    def __init__(self, *arguments: Any, scaling: RopeScaling | None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.factor = attention_factor(scaling)
        del self.rotary_pos_emb

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """query and key [P, 1, heads, D], value [P, 1, heads, E], and the compressed states that they are made of."""
        config, angles = self.config, packed_seq_params.angles
        position, value_size = config.qk_pos_emb_head_dim, config.v_head_dim
        asked = self._asked(hidden_states)
        latent, shared = self._compressed(hidden_states)
        query = self._heads((self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj)(asked)[0])
        key, value = self._heads(self.linear_kv_up_proj(latent)[0]).split([config.qk_head_dim, value_size], -1)
        query, turned = query.split([config.qk_head_dim, position], -1)
        turned, shared = (
            apply_rotary_pos_emb(x, angles, config, mscale=self.factor, cp_group=self.pg_collection.cp)
            for x in (turned, shared[:, :, None])
        )
        query, key = torch.cat([query, turned], -1), torch.cat([key, shared.expand(*key.shape[:-1], -1)], -1)
        return query, key, value, asked, latent

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _asked(self, hidden: Tensor) -> Tensor:
        """What queries are made of [P or its part, 1, rank], or the hidden states where they are not compressed."""
        if self.config.q_lora_rank is None:
            return hidden
        down = self.linear_q_down_proj(hidden)[0]
        if down.shape[-1] != self.config.q_lora_rank:
            down = self._own_tokens(tensor_parallel.gather_from_tensor_model_parallel_region(down))
        return self.q_layernorm(down)

    def _compressed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What keys and values are made of, and what all heads have of a key [P, 1, D], of all tokens."""
        config = self.config
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        down = self.linear_kv_down_proj(hidden)[0]
        if down.shape[-1] == sum(sizes):
            latent, shared = down.split(sizes, -1)
            if config.sequence_parallel:
                shared = tensor_parallel.gather_from_sequence_parallel_region(shared, group=self.tp_group)
        else:  # megatron-core's own layer is cut over ranks, and has gathered the tokens
            latent, shared = tensor_parallel.gather_from_tensor_model_parallel_region(down).split(sizes, -1)
            latent, shared = self._own_tokens(latent), tensor_parallel.copy_to_tensor_model_parallel_region(shared)
        return self.kv_layernorm(latent), shared

    def _own_tokens(self, x: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return x
        return tensor_parallel.scatter_to_sequence_parallel_region(x, group=self.tp_group)
