"""How the configuration cuts a model, and what each rank then has of it. No megatron is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coalign.config.schema import ModelConfig
from coalign.modules.megatron_core.weights import Weights, divisor
from coalign.weights import families
from coalign.weights.convert.huggingface import read_config
from coalign.weights.families.config import MegatronConfig
from coalign.weights.families.layout import MegatronLayout, stages
from coalign.weights.layout import Mesh


@dataclass(frozen=True, slots=True)
class Sizes:
    """In how many parts each thing is cut. ``virtual``: chunks of layers of a pipeline stage."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1

    def mesh(self, ranks: int) -> Mesh:
        """Of the weights: ranks that have parts of a row have the same ones, as data-parallel ranks do.

        Raises ValueError where the sizes do not divide the ranks.
        """
        together = self.tensor * self.pipeline * self.context
        if ranks % together:
            raise ValueError(
                f"{ranks} ranks do not divide by tensor_parallel × pipeline_parallel × context_parallel = {together}"
            )
        data = ranks // (self.tensor * self.pipeline)
        return Mesh(self.tensor, self.pipeline, data, self.expert, self.expert_tensor)


def sizes_of(config: ModelConfig) -> Sizes:
    """In how many parts the model is cut."""
    own = config.megatron
    return Sizes(
        config.tensor_parallel,
        config.pipeline_parallel,
        config.context_parallel,
        config.expert_parallel,
        own.expert_tensor_parallel or config.tensor_parallel,
        own.virtual_pipeline,
    )


def check_recomputed(model: MegatronConfig, modules: Sequence[str]) -> None:
    """Raises ValueError for ``modules`` that backward is to compute again and that layers of Coalign's do not have."""
    key = "megatron.recompute_modules has"
    if model.multi_latent_attention and "mla_up_proj" in modules:
        raise ValueError(f"{key} 'mla_up_proj', which attention over packed rows has not")
    if model.parallel_residual != "none" and (lacking := {"layernorm", "mlp"}.intersection(modules)):
        raise ValueError(
            f"{key} {sorted(lacking)}, which layers whose attention and MLP read the same residual have not"
        )


def weights_of(config: ModelConfig, count: int, *, te: bool = False) -> Weights:
    """Which rank of ``count`` has what of the model in ``config.load``.

    Raises ValueError for an architecture that is not known, for one that is not what the configuration says it is, and
    for sizes that do not divide.
    """
    hf = read_config(Path(str(config.load)))
    # The name of an architecture says which head the file has; which head this model has is the configuration's to say.
    family = families.of(hf if config.head == "lm" else hf | {"architectures": None})
    model, sizes, own = family.config(hf), sizes_of(config), config.megatron
    said = {
        "swiglu": model.gated_linear_unit and model.activation_func == "silu",
        "position_embedding_type": model.position_embedding_type,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "add_bias_linear": model.add_bias_linear,
        "normalization": model.normalization,
    }
    for key, value in said.items():
        if (wanted := getattr(own, key)) not in (None, value):
            raise ValueError(f"megatron.{key} is {wanted}; the model in {config.load} has {value}")
    if config.activation_checkpointing == "selective" and not config.frozen:
        check_recomputed(model, own.recompute_modules)
    if config.head != "lm":
        model = replace(model, share_embeddings_and_output_weights=False)
    split = stages(
        model.num_layers, sizes.pipeline, sizes.virtual, first=own.first_stage_layers, last=own.last_stage_layers
    )
    layout = MegatronLayout(model, sizes.mesh(count), split, "te" if te else "local")
    return Weights(family, layout, divisor(model, sizes.tensor), scalar=config.head != "lm")
