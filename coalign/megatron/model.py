"""A causal language model, or a model of one number per token or sequence, of megatron-core over packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from coalign.algorithms.vocabulary import Share
from coalign.megatron import layers
from coalign.megatron.attention import Packed
from coalign.modules.heads import Readings
from coalign.modules.layout import Layout
from coalign.modules.parallel.rows import Heads
from coalign.weights.families import MegatronConfig


class PackedGPT(GPTModel):
    """A chunk of the model: the layers that this rank has of it, the embedding in the first, the head in the last.

    ``vocabulary``: how many rows embedding and head have, padding included. ``read``: what the head's outputs are.
    """

    def __init__(
        self,
        model: MegatronConfig,
        config: TransformerConfig,
        *,
        vocabulary: int,
        read: Readings,
        first: bool = True,
        last: bool = True,
        chunk: int | None = None,
        te: bool = False,
    ) -> None:
        super().__init__(
            config,
            layers.block(model, config, te=te, chunk=chunk),
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
        if model.position_embedding_type == "rope" and not model.multi_latent_attention:
            size = int(model.kv_channels * model.rotary_percent)
            speed = 1.0 / model.rotary_base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
            self.register_buffer("speed", speed, persistent=False)

    def forward(
        self, layout: Layout, heads: Heads | None = None, needs: Sequence[str] = ()
    ) -> Tensor | dict[str, Tensor]:
        """Hidden states [P, 1, H] for the next chunk, or the outputs of the last one. ``layout``: of this rank's part of
        the row (coalign.modules.parallel.rows.Part)."""
        packed = Packed(layout.positions, layout.blocks, heads)
        hidden = self.embedding(layout.tokens[None], layout.positions[None]) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self._rotary(layout.positions),
            packed_seq_params=packed,
        )
        return self._outputs(hidden, layout, needs) if self.post_process else hidden

    def _rotary(self, positions: Tensor) -> Tensor | None:
        """Angles [P, 1, 1, D], where the model has rotary embeddings."""
        if self.described.position_embedding_type != "rope" or self.described.multi_latent_attention:
            return None
        angles = torch.outer(positions.float(), self.speed)
        angles = angles.repeat_interleave(2, 1) if self.described.rotary_interleaved else torch.cat([angles, angles], 1)
        return angles[:, None, None]

    def _outputs(self, hidden: Tensor, layout: Layout, needs: Sequence[str]) -> dict[str, Tensor]:
        config, group = self.config, self.pg_collection.tp
        if config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=group)
        elif group.size() > 1:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = self.output_layer.weight if weight is None else weight
        real = self.described.vocab_size
        first = group.rank() * len(weight)
        weight = weight[: max(0, real - first)]  # no logits for padding
        if self.described.normalised_head:
            weight = F.normalize(weight)
        share = Share(group, first, real) if group.size() > 1 else None
        return self.read(hidden[:, 0][layout.predictors], weight, layout, needs, share=share)


class ScalarGPT(PackedGPT):
    """With one row of weights for a head, whole on every rank, as ``output_layer``."""

    def __init__(self, model: MegatronConfig, config: TransformerConfig, *, output: str, **settings: object) -> None:
        super().__init__(model, config, read=None, **settings)
        self.output = output
        if self.post_process:
            self.output_layer = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def _outputs(self, hidden: Tensor, layout: Layout, needs: Sequence[str]) -> dict[str, Tensor]:
        if self.config.sequence_parallel:  # every rank reads all of it: gradients are not summed
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        where = layout.predictors if self.output == "values" else layout.last
        return {self.output: F.linear(hidden[:, 0][where].float(), self.output_layer.weight.float())[:, 0]}
