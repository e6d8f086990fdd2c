"""Model directories for tests: random weights of any family, written by what the family says, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coalign_megatron import families
from coalign_megatron.layouts.megatron import MegatronLayout, Mesh, split_layers
from coalign_megatron.layouts.shards import cut

SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, **SIZES}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, **SIZES}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **SIZES}
MIXTRAL |= {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 300}  # transposed matrices
GPT2 |= {"n_positions": 64, "n_embd": 16, "n_layer": 4, "n_head": 4}
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", **SIZES}  # rows in front that nobody reads
OPT |= {"ffn_dim": 32, "word_embed_proj_dim": 16, "do_layer_norm_before": True}


def tensors(hf: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of all names that a model of this config.json has."""
    family = families.find_family(hf)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: source.write(source.read(torch.randn(source.stored, generator=generator).to(dtype))).contiguous()
        for name, source in family.sources(family.config(hf)).items()
    }


def model(path: Path, hf: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Path:
    """A Hugging Face directory."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(hf))
    (path / "tokenizer.json").write_text("{}")
    save_file(tensors(hf) if weights is None else weights, path / "model.safetensors", {"format": "pt"})
    return path


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face directory."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def legacy(path: Path, hf: dict[str, Any], *, mesh: Mesh, virtual: int = 1, spec: Any = "local", nested=False) -> Path:
    """A checkpoint of one pickle a rank, as Megatron's `torch` format has them; with ``nested``, as before core."""
    family = families.find_family(hf)
    config = family.config(hf)
    parameters = family.parameters(config, vocab_divisor=128 * mesh.tensor)
    layout = MegatronLayout(config, mesh, split_layers(config.num_layers, mesh.pipeline, virtual), spec)
    sources, weights = family.sources(config), tensors(hf)
    for rank in range(mesh.size):
        at = mesh.at(rank)
        numbers = [f"{at.tensor[0]:02d}"]
        numbers += [f"{at.pipeline[0]:03d}"] if mesh.pipeline > 1 else []
        numbers += [f"{at.expert[0]:03d}"] if mesh.expert > 1 else []
        state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 5, "args": Path("never run")}
        for chunk in range(virtual):
            shards = layout.shards(parameters, at, chunk)
            own = dict(cut(lambda name: sources[name].read(weights[name]), shards))
            state[f"model{chunk if virtual > 1 else ''}"] = nest(own) if nested else own
        file = path / "iter_0000005" / f"mp_rank_{'_'.join(numbers)}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, file)
    (path / "latest_checkpointed_iteration.txt").write_text("5")
    return path


def nest(own: dict[str, Tensor]) -> dict[str, Any]:
    """As Megatron-LM before core nests it: modules of the language model are dictionaries, the encoder is flat."""
    state: dict[str, Any] = {}
    for name, tensor in own.items():
        *outer, rest = name.split(".", 2)
        inner = state
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[rest] = tensor
    return state
