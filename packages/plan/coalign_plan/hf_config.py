"""Reads a ModelSize from a Hugging Face configuration: the content of config.json, or a PretrainedConfig.

Neither weights nor transformers are needed. Each type of layer has one function here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coalign_plan.model_size import LayerSize, ModelSize, TowerSize

# Families whose MLP has two matrices instead of the three of a gated one, and activations that say so, too.
UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt")
UNGATED_ACTIVATIONS = ("relu2",)
GATED_ATTENTION = ("qwen3_next", "qwen3_5")  # beginnings of families whose attention has a gate as wide as its queries
LEARNED_POSITIONS = ("gpt2", "gpt_neo", "gpt_bigcode", "opt")
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
TOWERS = ("vision_config", "audio_config", "vision_tower_config")


def read_model_size(config: Mapping[str, Any] | object, name: str = "") -> ModelSize:
    """Read the sizes of a model. Raises ValueError if the configuration lacks a size that every model has."""
    return _read(ConfigFields(config), name, is_tied=True)


def read_directory(directory: Path) -> ModelSize:
    """Read the sizes of a model from the config.json in its directory."""
    with open(directory / "config.json", encoding="utf-8") as file:
        return read_model_size(json.load(file), directory.name)


class ConfigFields:
    """A configuration, as a dictionary or an object, whose fields have different names in different families."""

    def __init__(self, config: Mapping[str, Any] | object) -> None:
        self.config = config

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these fields that is there and not None."""
        for name in names:
            value = self.config.get(name) if isinstance(self.config, Mapping) else getattr(self.config, name, None)
            if value is not None:
                return value
        return default

    def need(self, *names: str) -> int:
        """Return the first of these fields. Raises ValueError if the configuration has none of them."""
        value = self.get(*names)
        if value is None:
            raise ValueError(f"the model configuration has no `{names[0]}`, so the model's size cannot be counted")
        return value

    def section(self, *names: str) -> ConfigFields | None:
        value = self.get(*names)
        return None if value is None else ConfigFields(value)


def _read(fields: ConfigFields, name: str, is_tied: bool) -> ModelSize:
    is_tied = fields.get("tie_word_embeddings", default=is_tied)
    if text := fields.section(*TEXT):
        size = _read(text, name, is_tied)
        sections = (fields.section(key) for key in TOWERS)
        towers = tuple(tower for section in sections if section and (tower := _read_tower(section, size.hidden)))
        return replace(size, towers=(*size.towers, *towers))
    if fields.get("is_encoder_decoder", default=False):
        raise ValueError("an encoder-decoder model cannot be trained here, so its size is not counted")
    hidden, vocabulary = fields.need("hidden_size", "n_embd", "d_model"), fields.need("vocab_size")
    embedding = vocabulary * fields.get("word_embed_proj_dim", default=hidden)
    positions = 0
    if fields.get("model_type") in LEARNED_POSITIONS:
        positions = fields.need("n_positions", "max_position_embeddings") * hidden
    counts = Counter(_read_layers(fields, hidden))
    return ModelSize(
        hidden=hidden,
        vocabulary=vocabulary,
        layers=tuple(replace(layer, count=count) for layer, count in counts.items()),
        embedding=embedding + positions,
        head=vocabulary * hidden,
        is_tied=bool(is_tied),
        name=name,
    )


def _read_layers(fields: ConfigFields, hidden: int) -> list[LayerSize]:
    """Return the layers in order; each has a mixer of tokens and a feed-forward part, or one of them."""
    if fields.get("model_type") == "nemotron_h":  # each layer has one part only
        pattern = fields.get("layers_block_type", default=()) or fields.get("hybrid_override_pattern", default="")
        return [_read_single_part(fields, hidden, layer_type) for layer_type in pattern if layer_type != "|"]
    count = fields.need("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = []
    for index, mixer in enumerate(_list_mixers(fields, count)):
        layer = _mixer(fields, hidden, mixer)
        if fields.get("model_type") in ("mamba", "falcon_mamba", "mamba2"):
            layers.append(layer)
        elif _has_experts(fields, index):
            layers.append(_add_experts(layer, fields, hidden))
        else:
            layers.append(_add_mlp(layer, fields, hidden, _mlp_width(fields, hidden)))
    return layers


def _read_single_part(fields: ConfigFields, hidden: int, layer_type: str) -> LayerSize:
    """Return a layer of Nemotron-H, named by a word or by a letter of its pattern."""
    match layer_type:
        case "M" | "mamba" | "linear_attention":
            return _mamba2(fields, hidden)
        case "*" | "attention" | "full_attention":
            return _attention(fields, hidden, None)
        case "E" | "moe":
            return _add_experts(LayerSize(1, 0), fields, hidden)
    return _add_mlp(LayerSize(1, 0), fields, hidden, fields.need("intermediate_size"))


# ---- the mixer of each layer -----------------------------------------------------------------------------------------


def _list_mixers(fields: ConfigFields, count: int) -> list[str]:
    """Return the mixer of each layer: full, window, or the name of a recurrent one."""
    family = fields.get("model_type", default="")
    if family in ("mamba", "falcon_mamba", "mamba2"):
        return ["mamba2" if family == "mamba2" else "mamba"] * count
    if listed := fields.get("layer_types", "layers_block_type"):
        return [_rename(layer_type, fields) for layer_type in listed][:count]
    if linear := fields.section("linear_attn_config"):  # Kimi Linear; numbers begin at 1
        full = set(linear.get("full_attn_layers", default=()))
        return ["full" if index + 1 in full else "delta" for index in range(count)]
    if every := fields.get("full_attention_interval"):  # Qwen3-Next, Qwen3.5
        return ["full" if (index + 1) % every == 0 else "delta" for index in range(count)]
    if every := fields.get("attn_layer_period"):  # Jamba
        offset = fields.get("attn_layer_offset", default=0)
        return ["full" if index % every == offset else "mamba" for index in range(count)]
    if family == "bamba":
        indices = fields.get("attn_layer_indices", default=())
        return ["full" if index in indices else "mamba2" for index in range(count)]
    if listed := fields.get("attn_type_list"):  # MiniMax-Text-01: 1 is softmax attention
        return ["full" if attention_type == 1 else "lightning" for attention_type in listed]
    window = fields.get("sliding_window")
    if window is None or fields.get("use_sliding_window") is False:
        return ["full"] * count
    if every := fields.get("sliding_window_pattern", "_sliding_window_pattern"):  # Gemma 3, Cohere 2
        return ["full" if (index + 1) % every == 0 else "window" for index in range(count)]
    if family in ("gemma2", "gpt_oss"):
        return ["window" if index % 2 == 0 else "full" for index in range(count)]
    first = fields.get("max_window_layers", default=0) if "qwen" in family else 0
    return ["full" if index < first else "window" for index in range(count)]


def _rename(layer_type: str, fields: ConfigFields) -> str:
    """Return this module's word for an entry of `layer_types`."""
    words = {"full_attention": "full", "attention": "full", "sliding_attention": "window", "conv": "conv",
             "chunked_attention": "window", "sliding_window": "window", "hybrid": "full"}  # fmt: skip
    if layer_type in words:
        return words[layer_type]
    is_linear = layer_type == "linear_attention"
    if is_linear and fields.get("linear_num_value_heads", "linear_num_heads", "linear_attn_config"):
        return "delta"
    if layer_type in ("mamba", "linear_attention") and fields.get("mamba_n_heads", "mamba_num_heads"):
        return "mamba2"
    if layer_type in ("mamba", "linear_attention") and fields.get("mamba_d_state", "mamba_expand"):
        return "mamba"
    if is_linear:
        return "lightning"
    raise ValueError(f"the model configuration's `layer_types` names '{layer_type}', whose size is not known")


def _has_experts(fields: ConfigFields, index: int) -> bool:
    experts = fields.get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not experts or experts == 1:
        return False
    if mlp_types := fields.get("mlp_layer_types"):
        return mlp_types[index] == "sparse"
    if index < fields.get("first_k_dense_replace", "moe_layer_start_index", default=0):
        return False
    if index in fields.get("mlp_only_layers", default=()):
        return False
    if listed := fields.get("moe_layers"):  # Llama 4 names them
        return index in listed
    frequency = fields.get("moe_layer_freq", default=1)
    if isinstance(frequency, list):
        return bool(frequency[index])
    if step := fields.get("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"):
        return (index + 1) % step == 0
    if period := fields.get("expert_layer_period"):  # Jamba
        return index % period == fields.get("expert_layer_offset", default=0)
    return index % frequency == 0


# ---- mixers of tokens ------------------------------------------------------------------------------------------------


def _mixer(fields: ConfigFields, hidden: int, mixer: str) -> LayerSize:
    recurrent = {"delta": _gated_delta, "mamba": _mamba, "mamba2": _mamba2, "lightning": _lightning, "conv": _convolve}
    if mixer in recurrent:
        return recurrent[mixer](fields, hidden)
    window = fields.get("sliding_window", "attention_chunk_size") if mixer == "window" else None
    return _attention(fields, hidden, window)


def _attention(fields: ConfigFields, hidden: int, window: int | None) -> LayerSize:
    if fields.get("kv_lora_rank"):
        return _latent_attention(fields, hidden)
    family = fields.get("model_type", default="")
    heads = fields.need("num_attention_heads", "n_head", "n_heads", "num_heads")
    cached = fields.get("num_key_value_heads", "num_kv_heads", default=heads)
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):  # Falcon, StarCoder
        cached = 1
    width = fields.get("head_dim", "attention_head_dim", default=hidden // heads)
    values = fields.get("v_head_dim", default=width)
    gate = heads * width if fields.get("attn_output_gate") or family.startswith(GATED_ATTENTION) else 0
    queries, keys, outputs = heads * width, cached * width, heads * values
    return LayerSize(
        1,
        hidden * (queries + gate + keys + cached * values + outputs),
        score_width=heads * (width + values),
        decode_score_width=heads * (width + values),
        cache=cached * (width + values),
        cache_heads=cached,
        window=window,
        matrix_width=4 * hidden + queries + gate + keys + cached * values + outputs,
    )


def _latent_attention(fields: ConfigFields, hidden: int) -> LayerSize:
    """Multi-head latent attention (2405.04434): the cache holds one compressed vector a token, whatever the heads."""
    heads, rank = fields.need("num_attention_heads"), fields.need("kv_lora_rank")
    plain, rotary = fields.need("qk_nope_head_dim"), fields.need("qk_rope_head_dim")
    values, query_rank = fields.need("v_head_dim"), fields.get("q_lora_rank")
    queries = heads * (plain + rotary)
    down = hidden * (rank + rotary)
    up = rank * heads * (plain + values)
    query = query_rank * (hidden + queries) if query_rank else hidden * queries
    matrix_width = 2 * hidden + rank + rotary + rank + heads * (plain + values) + heads * values
    matrix_width += 2 * query_rank + hidden + queries if query_rank else hidden + queries
    return LayerSize(
        1,
        query + down + up + heads * values * hidden,
        score_width=heads * (plain + rotary + values),
        decode_score_width=heads * (2 * rank + rotary),
        cache=rank + rotary,
        matrix_width=matrix_width,
    )


def _gated_delta(fields: ConfigFields, hidden: int) -> LayerSize:
    """Gated DeltaNet (2412.06464), and Kimi's variant: a state of key by value width for each head."""
    linear = fields.section("linear_attn_config") or fields
    if heads := linear.get("num_heads", "linear_num_heads"):
        width = linear.need("head_dim" if linear is not fields else "linear_head_dim")
        inner = heads * width
        matrices = hidden * (4 * inner + heads) + 2 * (hidden * width + width * inner)  # gates of low rank
        state, channels = heads * width * width, 3 * inner
    else:
        key_heads, value_heads = fields.need("linear_num_key_heads"), fields.need("linear_num_value_heads")
        key_width, value_width = fields.need("linear_key_head_dim"), fields.need("linear_value_head_dim")
        keys, values = key_heads * key_width, value_heads * value_width
        matrices = hidden * (2 * keys + 3 * values + 2 * value_heads)  # queries, keys, values, gates, output
        state, channels = value_heads * key_width * value_width, 2 * keys + values
    kernel = linear.get("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    return LayerSize(
        1,
        matrices + kernel * channels,
        state=state + kernel * channels,
        state_flops=6 * state,  # decay, correction and reading of the state
        matrix_width=3 * hidden + channels,
    )


def _mamba(fields: ConfigFields, hidden: int) -> LayerSize:
    """Mamba (2312.00752)."""
    inner = fields.get("intermediate_size") if "mamba" in fields.get("model_type", default="") else None
    inner = inner or fields.get("mamba_expand", "expand", default=2) * hidden
    state = fields.get("mamba_d_state", "state_size", default=16)
    kernel = fields.get("mamba_d_conv", "conv_kernel", default=4)
    rank = fields.get("mamba_dt_rank", "time_step_rank", default="auto")
    rank = -(-hidden // 16) if rank == "auto" else rank
    matrices = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner + inner * (kernel + state)
    return LayerSize(
        1, matrices, state=inner * (state + kernel), state_flops=6 * inner * state, matrix_width=2 * hidden + 3 * inner
    )


def _mamba2(fields: ConfigFields, hidden: int) -> LayerSize:
    """Mamba 2 (2405.21060): one decay a head."""
    heads = fields.need("mamba_n_heads", "mamba_num_heads", "num_heads")
    width = fields.get("mamba_d_head", "mamba_head_dim", "head_dim")
    expand = fields.get("mamba_expand", "expand", default=2)
    inner = heads * width if isinstance(width, int) else expand * hidden
    groups = fields.get("mamba_n_groups", "n_groups", default=1)
    state = fields.get("mamba_d_state", "ssm_state_size", "state_size", default=128)
    kernel = fields.get("mamba_d_conv", "conv_kernel", default=4)
    channels = inner + 2 * groups * state
    matrices = hidden * (inner + channels + heads) + inner * hidden + kernel * channels
    return LayerSize(
        1,
        matrices,
        state=inner * state + kernel * channels,
        state_flops=6 * inner * state,
        matrix_width=2 * hidden + 2 * inner + channels,
    )


def _lightning(fields: ConfigFields, hidden: int) -> LayerSize:
    """Lightning attention (2401.04658), as in MiniMax-Text-01: linear attention with a gate on its output."""
    heads = fields.need("num_attention_heads")
    width = fields.get("head_dim", default=hidden // heads)
    inner, state = heads * width, heads * width * width
    return LayerSize(1, 5 * hidden * inner, state=state, state_flops=4 * state, matrix_width=3 * hidden + 5 * inner)


def _convolve(fields: ConfigFields, hidden: int) -> LayerSize:
    """A gated short convolution (LFM2)."""
    kernel = fields.get("conv_L_cache", default=3)
    return LayerSize(1, 4 * hidden * hidden, state=kernel * hidden, matrix_width=6 * hidden)


# ---- feed-forward parts ----------------------------------------------------------------------------------------------


def _matrices(fields: ConfigFields) -> int:
    activation = fields.get("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
    return 2 if fields.get("model_type") in UNGATED or activation in UNGATED_ACTIVATIONS else 3


def _mlp_width(fields: ConfigFields, hidden: int) -> int:
    if fields.get("model_type") in ("gpt2", "gptj", "gpt_neo", "gpt_bigcode", "falcon", "bloom"):
        return fields.get("n_inner", "ffn_hidden_size", "intermediate_size", default=4 * hidden)
    if fields.get("block_auto_adjust_ff_dim"):  # LFM2
        scale = fields.get("block_ffn_dim_multiplier", default=1)
        width = int(2 * fields.need("block_ff_dim", "intermediate_size") / 3 * scale)
        step = fields.get("block_multiple_of", default=256)
        return -(-width // step) * step
    return fields.get(
        "intermediate_size_mlp", "ffn_dim", "block_ff_dim", "shared_intermediate_size", "intermediate_size",
        default=4 * hidden,
    )  # fmt: skip


def _add_mlp(layer: LayerSize, fields: ConfigFields, hidden: int, width: int) -> LayerSize:
    matrices = _matrices(fields)
    return replace(
        layer,
        mlp=matrices * hidden * width,
        matrix_width=layer.matrix_width + matrices * (hidden + width),
    )


def _add_experts(layer: LayerSize, fields: ConfigFields, hidden: int) -> LayerSize:
    matrices = _matrices(fields)
    experts = fields.need("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    width = fields.need("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
    active = fields.get("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k", default=2)
    shared = fields.get("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size",
                        "shared_intermediate_size", default=0)  # fmt: skip
    if not shared:
        shared = width * fields.get("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
    if fields.get("model_type") in ("llama4_text", "llama4"):
        shared = width
    gate = hidden if fields.get("model_type", default="").startswith(("qwen2_moe", "qwen3_next", "qwen3_5_moe")) else 0
    return replace(
        layer,
        experts=experts,
        expert=matrices * hidden * width,
        active_experts=min(active, experts),
        shared_experts=matrices * hidden * shared,
        router=hidden * experts + gate,
        matrix_width=layer.matrix_width + (matrices * (hidden + shared) if shared else 0),
        expert_width=matrices * (hidden + width),
    )


# ---- towers ----------------------------------------------------------------------------------------------------------


def _read_tower(fields: ConfigFields, language_hidden: int) -> TowerSize | None:
    """Return the size of an encoder with its projector to the language model; None if it names no sizes."""
    hidden = fields.get("embed_dim", "d_model", "width") if fields.get("depth") else None
    hidden = hidden or fields.get("hidden_size", "embed_dim", "d_model", "width")
    layers = fields.get("depth", "num_hidden_layers", "encoder_layers", "layers")
    if hidden is None or layers is None:
        return None
    inner = fields.get("intermediate_size", "encoder_ffn_dim", default=int(hidden * fields.get("mlp_ratio", default=4)))
    matrices = 3 if fields.get("hidden_act") == "silu" else 2
    patch = fields.get("patch_size", default=0)
    pixels = fields.get("in_channels", "in_chans", "num_channels", default=3) * patch**2
    pixels *= fields.get("temporal_patch_size", default=1)
    positions = fields.get("num_position_embeddings", default=0)
    image = fields.get("image_size", default=0)
    if isinstance(image, int) and image and patch:
        positions = (image // patch) ** 2
    merged = hidden * fields.get("spatial_merge_size", default=1) ** 2
    if merged > hidden:  # Qwen-VL: patches are joined, then projected; deep layers have projectors of their own
        output = fields.get("out_hidden_size", default=None) or language_hidden
        projectors = (1 + len(fields.get("deepstack_visual_indexes", default=()))) * merged * (merged + output)
    else:
        projectors = hidden * language_hidden
    parameters = layers * (4 * hidden**2 + matrices * hidden * inner) + hidden * (pixels + positions) + projectors
    return TowerSize(parameters, hidden, layers, pixels, merged // hidden)
