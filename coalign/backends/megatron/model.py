"""megatron-core models over packed rows: causal language models, and models with a scalar head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from coalign.algorithms.logprobs import VocabularyShard
from coalign.backends.hf.heads import LanguageModelHead
from coalign.backends.hf.rows import HeadExchange
from coalign.backends.layout import Layout
from coalign.backends.megatron import layers
from coalign.backends.megatron.attention import PackedRow, compute_rotary_angles
from coalign.backends.megatron.layers import PackedNorm
from coalign.weights.families import MegatronConfig


class PackedGPT(GPTModel):
    """A chunk of a causal LM: some of its layers; the first chunk has the embedding, the last the head.

    vocabulary: rows of embedding and head, padding included. read: computes the head's outputs.
    """

    def __init__(
        self,
        model: MegatronConfig,
        config: TransformerConfig,
        *,
        vocabulary: int,
        read: LanguageModelHead | None,
        first: bool = True,
        last: bool = True,
        chunk: int | None = None,
        te: bool = False,
    ) -> None:
        super().__init__(
            config,
            cast(ModuleSpec, layers.build_block(model, config, te=te, chunk=chunk)),  # it takes block specs, too
            vocabulary,
            model.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
            position_embedding_type="learned_absolute"
            if model.position_embedding_type == "learned_absolute"
            else "none",
            vp_stage=chunk,
        )
        self.described, self.read = model, read
        if first and model.embedding_layernorm:
            self.embedding.layernorm = PackedNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(
        self, layout: Layout, heads: HeadExchange | None = None, needs: Sequence[str] = ()
    ) -> Tensor | dict[str, Tensor]:
        """Return hidden states [P, 1, H] for the next chunk, or the outputs of the last one.

        ``layout``: of this rank's part of the row (coalign.backends.hf.rows.RowShard).
        """
        angles = compute_rotary_angles(self.described, layout.positions, layout.blocks)
        latent = self.described.multi_latent_attention
        hidden = self.decoder(
            hidden_states=self._embed(layout) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=None if latent else angles,
            packed_seq_params=PackedRow(layout.positions, layout.blocks, heads, angles if latent else None),
        )
        return self._outputs(hidden, layout, needs) if self.post_process else hidden

    def _embed(self, layout: Layout) -> Tensor:
        """Return [P, 1, H], or this rank's part of it under sequence parallelism."""
        hidden = self.embedding(layout.tokens[None], layout.positions[None])
        if self.described.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.described.embedding_scale, dtype=hidden.dtype)
        return cast(nn.Module, self.embedding.layernorm)(hidden) if self.described.embedding_layernorm else hidden

    def _outputs(self, hidden: Tensor, layout: Layout, needs: Sequence[str]) -> dict[str, Tensor]:
        config, group = self.config, self.pg_collection.tp
        if config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=group)
        elif group.size() > 1:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = cast(Tensor, self.output_layer.weight if weight is None else weight)
        real = self.described.vocab_size
        first = group.rank() * len(weight)
        weight = weight[: max(0, real - first)]  # no logits for padding
        if self.described.normalised_head:
            weight = F.normalize(weight)
        shard = VocabularyShard(group, first, real) if group.size() > 1 else None
        assert self.read is not None
        return self.read(hidden[:, 0][layout.predictors], weight, layout, needs, share=shard)


class ScalarGPT(PackedGPT):
    """A chunk of a model with a scalar head: one row of weights, whole on every rank, as ``output_layer``."""

    def __init__(self, model: MegatronConfig, config: TransformerConfig, *, output: str, **settings: Any) -> None:
        super().__init__(model, config, read=None, **settings)
        self.output = output
        if self.post_process:
            self.output_layer = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def _outputs(self, hidden: Tensor, layout: Layout, needs: Sequence[str]) -> dict[str, Tensor]:
        if self.config.sequence_parallel:  # every rank reads the whole row, so gradients are not summed
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        where = layout.predictors if self.output == "values" else layout.last
        return {self.output: F.linear(hidden[:, 0][where].float(), self.output_layer.weight.float())[:, 0]}
