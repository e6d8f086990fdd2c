"""Tiny models of every causal-LM class of transformers, and what Coalign computes of each, beside plain Hugging Face.

    python -m tests.backends.architectures

writes docs/architectures.md. tests/backends/test_architectures.py measures the same, and compares it with the page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from coalign.backends.base import build_objective
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.hf.heads import ROWS
from coalign.config.schema import LossConfig, ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from tests.backends.batches import rollout
from tests.conformance.engines import build, expected_logprobs, prompts
from tests.tiny import tiny_tokenizer

# size -> the keys of configurations that have it, where they are there
SIZES = {
    1: "first_k_dense_replace mamba_n_groups mamba_ngroups n_group n_groups num_dense_layers num_expert_group topk_group",
    2: "decoder_layers depth encoder_layers hc_mult laurel_rank mamba_d_conv moe_k moe_topk n_layer n_layers num_blocks "
    "num_decoder_layers num_encoder_layers num_experts_per_tok num_experts_per_token num_hidden_layers "
    "num_key_value_heads num_layers swa_num_key_value_heads",
    4: "decoder_attention_heads encoder_attention_heads linear_num_heads linear_num_key_heads "
    "linear_num_value_heads moe_num_experts n_head n_heads n_routed_experts num_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_heads num_local_experts rotary_dim "
    "patch_size swa_num_attention_heads zero_expert_num",
    6: "attention_chunk_size attention_window_size chunk_size mamba_chunk_size sliding_window sliding_window_size "
    "window_size",
    8: "adapter_rank d_rel gated_norm_rank hc_lowrank head_dim heads_per_ngram index_topk linear_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state mamba_dt_rank mamba_head_dim mamba_headdim "
    "mamba_n_heads mamba_num_heads n_mamba_heads qk_nope_head_dim qk_rope_head_dim ssm_state_size state_size "
    "swa_head_dim time_step_rank v_head_dim",
    16: "attention_head_dim dim_model_base image_size index_head_dim index_n_heads kv_channels kv_lora_rank o_lora_rank q_lora_rank",
    32: "d_model dense_intermediate_size dim_model emb_dim embed_dim embedding_size hidden_size hidden_size_global hidden_size_per_layer_input "
    "input_embedding_size lru_width moe_latent_size moe_shared_expert_intermediate_size n_embd out_hidden_size "
    "ple_embed_dim projector_hidden_size pronunciation_embed_dim router_hidden_size shape_embed_dim shared_intermediate_size word_embed_proj_dim",
    64: "d_ff d_inner decoder_ffn_dim dff dim_ff encoder_ffn_dim expert_ffn_hidden_size ffn_dim ffn_hidden_size "
    "intermediate_size moe_intermediate_size output_embedding_size shared_expert_intermediate_size",
    256: "n_ctx ngram_vocab_size_base rel_extent",
    320: "pronunciation_vocab_size shape_vocab_size vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings max_seq_len n_positions",
    319: "pad_token_id",  # tokens that no batch here has
    318: "eos_token_id",
    317: "bos_token_id",
}
SMALL = {key: size for size, keys in SIZES.items() for key in keys.split()}
UNSET = {"head_dim", "n_routed_experts", "num_experts_per_tok", "num_key_value_heads", "pad_token_id"}  # if None, too
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
LATENT = {"num_key_value_heads": 4}  # as many as heads
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("glm_moe_dsa", "hy_v4", "kimi_linear", "longcat_flash", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"),
        MROPE,
    ),
    "glm4v_text": {"rope_parameters": MROPE["rope_parameters"] | {"partial_rotary_factor": 1.0}},
    "qwen2_5_vl_vision": {"fullatt_block_indexes": [0], "window_size": 16},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe_vision": {"deepstack_visual_indexes": [0]},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "o_groups": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
    | {"indexer_compress_ratio": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]}
    | {"attention_head_size": 8, "feed_forward_size": 64, "local_attn_chunk_length": 8, "attn_layers": ["local"] * 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2, "num_key_value_heads": 4}
    | {"attention_hidden_size": 64},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "num_hidden_layers": 2}
    | {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def find_shape(family: str) -> dict[str, Any]:
    """Arguments that make the configuration of ``family`` tiny: windows and chunks are shorter than the texts here."""
    return _shrink(AutoConfig.for_model(family)) | OWN.get(family, {})


def _shrink(config: PreTrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    own = config.to_dict()
    for key, value in own.items():
        if key in SMALL and not isinstance(value, dict) and (value is not None or key in UNSET):
            found[key] = SMALL[key]
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            found[key] = 0.0
    if "num_hidden_layers" in found and (own.get("layer_types") or own.get("layers_block_type")):
        found["num_hidden_layers"] = 4  # in hybrids every fourth is attention
    parts = ((key, getattr(config, key, None)) for key in config.sub_configs)
    return found | {key: _shrink(part) | OWN.get(part.model_type, {}) for key, part in parts if part is not None}


def make(path: Path, family: str, auto: Any = AutoModelForCausalLM, **shape: Any) -> Path:
    """Write a random model, far from uniform, and the tiny tokenizer. ``shape``: None takes that of `find_shape`."""
    tiny_tokenizer(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(shape or find_shape(family)))
        model = auto.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(path)
    if auto is AutoModelForCausalLM:
        config.save_pretrained(path)  # of the whole family, where the model is the text part of one
    return path


# ---- what is computed


class Gradients(FSDPModule):
    """Keeps the gradients of the last step."""

    def optimizer_step(self) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self.model.model.named_parameters() if p.grad is not None}
        return super().optimizer_step()


def build_trainer(path: Path, context: Mapping[str, Any] | None = None, /, **config: Any) -> Gradients:
    settings = {"load": str(path), "optimizer": {"lr": 0.0}, "max_tokens_per_micro": 60} | config
    loss = build_objective(LossConfig(fn="tests.backends.test_fsdp:sequence_loss"))
    trainer = Gradients(ModelConfig(**settings), Context(model="trainer", steps=1, loss=loss, **context or {}))
    trainer.setup()
    return trainer


def load_plain(path: Path) -> Any:
    """The model as transformers loads it: without dropout, and RWKV without the division of its weights."""
    kind = getattr(transformers, (AutoConfig.from_pretrained(path).architectures or ["AutoModelForCausalLM"])[0])
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    model.config.rescale_every = 0
    return model


@dataclass(frozen=True)
class PlainStep:
    """What plain Hugging Face computes of ``batch``, each sequence alone: ``logprobs`` f32[T], 0 outside of the loss
    mask, and the gradient of their negative sum, divided by the number of sequences."""

    batch: Batch
    logprobs: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(cls, path: Path, batch: Batch) -> PlainStep:
        model, loss, logprobs = load_plain(path), torch.zeros(()), []
        for row in batch.rows():
            tokens, mask = row["tokens"].long(), row["loss_mask"][1:]
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            own = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0] * mask
            loss = loss - own.sum() / len(batch)
            logprobs += [torch.zeros(1), own.detach()]
        loss.backward()
        return cls(batch, torch.cat(logprobs), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})

    def compare(self, trainer: Gradients) -> None:
        """Check the log-probs and the gradient of a trainer."""
        found = trainer.forward_step(self.batch)["ref_logprobs"]
        torch.testing.assert_close(found, self.logprobs, rtol=0, atol=3e-5)
        trainer.train_step(self.batch)
        zero = torch.zeros(())
        both = [
            (trainer.gradients.get(n, zero), self.gradients.get(n, zero))
            for n in {**trainer.gradients, **self.gradients}
        ]
        error, norm = (
            torch.stack(each).norm() for each in zip(*(((a - b).norm(), b.norm()) for a, b in both), strict=True)
        )
        assert float(error) < 1e-4 * float(norm), f"gradients differ by {float(error / norm):.1e}"


def compare_tokens(path: Path, engine: str) -> str:
    """Check greedy tokens and their log-probs against plain forwards. Returns how the engine batched them."""
    policy, model = build(engine, path), load_plain(path)
    policy.engine.end_tokens = frozenset()
    batch = policy.generate(prompts(), samples=1, temperature=0.0, max_new_tokens=12)
    met = batch["rollout_logprobs"][batch["loss_mask"]]
    torch.testing.assert_close(met, expected_logprobs(model, batch, 0.0), rtol=0, atol=5e-5)
    with torch.no_grad():
        for row in batch.rows():
            likeliest = model(input_ids=row["tokens"].long()[None], use_cache=False).logits[0, :-1].argmax(-1)
            assert torch.equal(likeliest[row["loss_mask"][1:]], row["tokens"][row["loss_mask"]].long())
    return getattr(policy.engine.model, "batching", "yes")


# ---- the page


@dataclass(frozen=True)
class Architecture:
    """A line of the page. ``trains``: the rows that are exact, that of `auto` first. ``native``, ``transformers``: how
    these engines sample. Empty: refused, and ``reason`` says why if nothing trains or samples it."""

    family: str
    trains: str = ""
    native: str = ""
    transformers: str = ""
    reason: str = ""

    def __str__(self) -> str:
        cells = (f"`{self.family}`", f"`{CLASSES[self.family]}`", self.trains, self.native, self.transformers)
        return f"| {' | '.join(cell or '-' for cell in cells)} |"


REFUSALS = (ValueError, NotImplementedError)  # what is refused by name; anything else is a failure


def measure(family: str) -> Architecture:
    """Compute with a tiny model all that the page says. Raises AssertionError for what is computed wrongly, and
    whatever a backend raises beside a refusal."""
    with TemporaryDirectory() as directory:
        path = Path(directory)
        try:
            make(path, family)
        except Exception as problem:  # transformers' own
            return Architecture(family, reason=f"transformers does not build it alone: {_describe(problem)}")
        try:
            step = PlainStep.of(path, rollout((5, 9), 3))
        except Exception as problem:
            step, reasons = None, [f"transformers does not differentiate it: {_describe(problem)}"]
        else:
            reasons = []
        trains: list[str] = []
        sampled: list[str] = []
        for rows in ("auto", *ROWS) if step else ():
            try:
                FSDPModule.check_architecture(ModelConfig(load=str(path), rows=rows), "trainer")
                trainer = build_trainer(path, rows=rows)
                step.compare(trainer)
                trains.append(trainer.model.rows)
            except REFUSALS as problem:
                reasons.append(_describe(problem))
                assert rows != "auto" or not trains
        for engine in ("native", "transformers"):
            try:
                sampled.append(compare_tokens(path, engine))
            except REFUSALS as problem:
                sampled.append("")
                reasons.append(_describe(problem))
    assert len(trains) != 1, f"`rows: auto` and the keys disagree: {trains}, {reasons}"
    reason = reasons[0] if not trains else reasons[-1] if not any(sampled) else ""
    return Architecture(family, ", ".join(dict.fromkeys(trains)), *sampled, reason)


def _describe(problem: Exception) -> str:
    return shorten(str(problem), 160).replace("|", "/").replace("\n", " ")


PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
TEXT = """# Architectures

Every causal language model of transformers {version}, built tiny and compared with plain Hugging Face on a CPU. The
command `python -m tests.backends.architectures` writes this page, and `make test-backends` measures it again.

- **Trains and scores** (`fsdp`, `deepspeed`): the kinds of [rows](backends.md#rows-of-a-micro-batch) whose log-probs
  and gradients are those of each sequence alone. `rows: auto` takes the first.
- **`native`**, **`transformers`**: whether that [engine](engines.md) samples it, with greedy tokens and log-probs of
  plain forwards; of the second, its `batching`.
- **vLLM**: whether vLLM {vllm} says that it knows the class. That is not measured here.

`-` is refused by name, before weights are loaded or at the start. Reasons are below the table.

| model type | class | trains and scores | `native` | `transformers` | vLLM |
|---|---|---|---|---|---|
"""


def format_line(found: Architecture, known: bool) -> str:
    return f"{found} {'yes' if known else '-'} |"


def write_page() -> None:
    import vllm
    from vllm import ModelRegistry

    known = set(ModelRegistry.get_supported_archs())
    found = []
    for family in sorted(CLASSES):
        found.append(measure(family))
        print(found[-1], file=sys.stderr)
    text = TEXT.format(version=__version__, vllm=vllm.__version__)
    text += "\n".join(format_line(each, CLASSES[each.family] in known) for each in found)
    reasons = [f"- `{each.family}`: {each.reason}" for each in found if each.reason]
    PAGE.write_text(text + "\n\n## Why not\n\n" + "\n".join(reasons) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_page()
