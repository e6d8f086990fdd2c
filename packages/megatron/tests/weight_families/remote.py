"""Families that only their own remote code loads, written down from their published architecture: the tensors of their
files, and what the model computes from them. Nothing here knows of Megatron."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]


# ---- the tensors of the files


def qwen_shapes(hf) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocab = hf["hidden_size"], hf["intermediate_size"] // 2, hf["vocab_size"]
    found = {"transformer.wte.weight": (vocab, hidden), "transformer.ln_f.weight": (hidden,)}
    for i in range(hf["num_hidden_layers"]):
        found |= {
            f"transformer.h.{i}.ln_1.weight": (hidden,),
            f"transformer.h.{i}.attn.c_attn.weight": (3 * hidden, hidden),
            f"transformer.h.{i}.attn.c_attn.bias": (3 * hidden,),
            f"transformer.h.{i}.attn.c_proj.weight": (hidden, hidden),
            f"transformer.h.{i}.ln_2.weight": (hidden,),
            f"transformer.h.{i}.mlp.w1.weight": (ffn, hidden),
            f"transformer.h.{i}.mlp.w2.weight": (ffn, hidden),
            f"transformer.h.{i}.mlp.c_proj.weight": (hidden, ffn),
        }
    return found | {"lm_head.weight": (vocab, hidden)}


def baichuan_shapes(hf) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocab = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    found = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(hf["num_hidden_layers"]):
        found |= {
            f"model.layers.{i}.input_layernorm.weight": (hidden,),
            f"model.layers.{i}.self_attn.W_pack.weight": (3 * hidden, hidden),
            f"model.layers.{i}.self_attn.o_proj.weight": (hidden, hidden),
            f"model.layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"model.layers.{i}.mlp.gate_proj.weight": (ffn, hidden),
            f"model.layers.{i}.mlp.up_proj.weight": (ffn, hidden),
            f"model.layers.{i}.mlp.down_proj.weight": (hidden, ffn),
        }
    return found | {"lm_head.weight": (vocab, hidden)}


def chatglm_shapes(hf) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocab = hf["hidden_size"], hf["ffn_hidden_size"], hf["padded_vocab_size"]
    heads, groups, head = hf["num_attention_heads"], hf["multi_query_group_num"], hf["kv_channels"]
    found: dict[str, tuple[int, ...]] = {"transformer.embedding.word_embeddings.weight": (vocab, hidden)}
    for i in range(hf["num_layers"]):
        found |= {
            f"transformer.encoder.layers.{i}.input_layernorm.weight": (hidden,),
            f"transformer.encoder.layers.{i}.self_attention.query_key_value.weight": (
                (heads + 2 * groups) * head,
                hidden,
            ),
            f"transformer.encoder.layers.{i}.self_attention.query_key_value.bias": ((heads + 2 * groups) * head,),
            f"transformer.encoder.layers.{i}.self_attention.dense.weight": (hidden, heads * head),
            f"transformer.encoder.layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"transformer.encoder.layers.{i}.mlp.dense_h_to_4h.weight": (2 * ffn, hidden),
            f"transformer.encoder.layers.{i}.mlp.dense_4h_to_h.weight": (hidden, ffn),
        }
    return found | {
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (vocab, hidden),
    }


# ---- what they compute: logits [n, vocabulary] of one sequence of tokens [n]


def qwen(hf, t: Tensors, tokens: Tensor) -> Tensor:
    heads, eps = hf["num_attention_heads"], hf["layer_norm_epsilon"]
    x = t["transformer.wte.weight"][tokens]
    for i in range(hf["num_hidden_layers"]):
        at = f"transformer.h.{i}."
        h = rms(x, t[at + "ln_1.weight"], eps)
        q, k, v = F.linear(h, t[at + "attn.c_attn.weight"], t[at + "attn.c_attn.bias"]).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (heads, -1)) for each in (q, k, v))
        q, k = (rotate(each, hf["rotary_emb_base"]) for each in (q, k))
        x = x + attend(q, k, v) @ t[at + "attn.c_proj.weight"].T
        h = rms(x, t[at + "ln_2.weight"], eps)
        gated = (h @ t[at + "mlp.w1.weight"].T) * F.silu(h @ t[at + "mlp.w2.weight"].T)
        x = x + gated @ t[at + "mlp.c_proj.weight"].T
    return rms(x, t["transformer.ln_f.weight"], eps) @ t["lm_head.weight"].T


def baichuan(hf, t: Tensors, tokens: Tensor, *, alibi: bool, normalised: bool) -> Tensor:
    heads, eps = hf["num_attention_heads"], hf["rms_norm_eps"]
    x = t["model.embed_tokens.weight"][tokens]
    for i in range(hf["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = rms(x, t[at + "input_layernorm.weight"], eps)
        q, k, v = (each.unflatten(-1, (heads, -1)) for each in (h @ t[at + "self_attn.W_pack.weight"].T).chunk(3, -1))
        turned = (q, k) if alibi else (rotate(q, 10000.0), rotate(k, 10000.0))
        joined = attend(*turned, v, slopes(heads) if alibi else None)
        x = x + joined @ t[at + "self_attn.o_proj.weight"].T
        h = rms(x, t[at + "post_attention_layernorm.weight"], eps)
        gated = F.silu(h @ t[at + "mlp.gate_proj.weight"].T) * (h @ t[at + "mlp.up_proj.weight"].T)
        x = x + gated @ t[at + "mlp.down_proj.weight"].T
    head = t["lm_head.weight"]
    return rms(x, t["model.norm.weight"], eps) @ (F.normalize(head) if normalised else head).T


def chatglm(hf, t: Tensors, tokens: Tensor) -> Tensor:
    heads, groups, head = hf["num_attention_heads"], hf["multi_query_group_num"], hf["kv_channels"]
    eps = hf["layernorm_epsilon"]
    x = t["transformer.embedding.word_embeddings.weight"][tokens]
    for i in range(hf["num_layers"]):
        at = f"transformer.encoder.layers.{i}."
        h = rms(x, t[at + "input_layernorm.weight"], eps)
        mixed = F.linear(
            h, t[at + "self_attention.query_key_value.weight"], t[at + "self_attention.query_key_value.bias"]
        )
        q, k, v = (
            each.unflatten(-1, (-1, head)) for each in mixed.split((heads * head, groups * head, groups * head), -1)
        )
        q, k = (torch.cat([in_pairs(each[..., : head // 2]), each[..., head // 2 :]], -1) for each in (q, k))
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        x = x + attend(q, k, v) @ t[at + "self_attention.dense.weight"].T
        h = rms(x, t[at + "post_attention_layernorm.weight"], eps)
        gate, up = (h @ t[at + "mlp.dense_h_to_4h.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ t[at + "mlp.dense_4h_to_h.weight"].T
    return rms(x, t["transformer.encoder.final_layernorm.weight"], eps) @ t["transformer.output_layer.weight"].T


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attend(q: Tensor, k: Tensor, v: Tensor, slope: Tensor | None = None) -> Tensor:
    """Of [n, heads, head] each; ALiBi with slopes [heads]. → [n, heads · head]"""
    n, _, head = q.shape
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(head)
    if slope is not None:
        scores = scores + slope[:, None, None] * torch.arange(n)
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(later, -math.inf).softmax(-1), v).flatten(1)


def slopes(heads: int) -> Tensor:
    """Press et al. (arXiv 2108.12409): of a power of two, 2^(-8/heads · i); of other numbers, filled up from twice as
    many."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 / power * i) for i in range(1, power + 1)]
    return torch.tensor(first + [2 ** (-4 / power * i) for i in range(1, 2 * (heads - power), 2)])


def _angles(n: int, size: int, base: float) -> Tensor:
    return torch.arange(n)[:, None] / base ** (torch.arange(0, size, 2) / size)


def rotate(x: Tensor, base: float) -> Tensor:
    """The first half of a head against the second."""
    angle = _angles(x.shape[0], x.shape[-1], base)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def in_pairs(x: Tensor) -> Tensor:
    """Each number against its neighbour."""
    angle = _angles(x.shape[0], x.shape[-1], 10000.0)[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)
