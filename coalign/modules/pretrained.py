"""Hugging Face directories in and out: model, head, tokenizer, all strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from coalign.config.schema import ModelConfig
from coalign.modules import attention

MIXERS = {"full_attention", "sliding_attention"}


def read_config(config: ModelConfig) -> PretrainedConfig:
    """The architecture in ``config.load``.

    Raises ValueError for a missing directory, and NotImplementedError for layers that mix tokens by other means than
    attention: in a packed row the sequences would see each other.
    """
    if config.load is None:
        raise ValueError("models.*.load is missing: a Hugging Face model directory")
    if not (Path(config.load) / "config.json").is_file():
        raise ValueError(f"models.*.load: '{config.load}' is not a Hugging Face model directory (no config.json there)")
    hf = AutoConfig.from_pretrained(config.load, trust_remote_code=config.trust_remote_code)
    text = hf.get_text_config()
    text.use_cache = False
    if other := set(getattr(text, "layer_types", None) or ()) - MIXERS:
        raise NotImplementedError(f"{config.load}: layers of type {sorted(other)} cannot compute packed sequences")
    if config.head != "lm":
        hf.num_labels = 1
    return hf


def load(config: ModelConfig, *, seed: int) -> PreTrainedModel:
    """The model with its weights on the CPU, as ``config.load``, ``init``, ``head`` and ``head_init`` say.

    A value or reward model is transformers' sequence classifier of one label, so that its head has the name that any
    such checkpoint gives it. Raises ValueError when the checkpoint lacks weights, names included.
    """
    hf, auto, options = read_config(config), _auto(config), _options(config)
    if config.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(hf, **options)
        missing: set[str] = set()
    else:
        model, info = auto.from_pretrained(
            config.load,
            config=hf,
            output_loading_info=True,
            **options,
        )
        missing = set(info["missing_keys"])
    if config.head != "lm" and config.head_init == "zero":
        nn.init.zeros_(model.score.weight)
        missing.discard("score.weight")
    if missing:
        hint = "; head_init: zero starts a new head" if "score.weight" in missing else ""
        raise ValueError(f"{config.load} lacks {sorted(missing)} for a model with head '{config.head}'{hint}")
    if not model._supports_attention_backend:
        raise NotImplementedError(f"{type(model).__name__} does not call transformers' attention interface")
    return model


def skeleton(config: ModelConfig) -> PreTrainedModel:
    """The model without storage."""
    with torch.device("meta"):
        return _auto(config).from_config(read_config(config), **_options(config))


def save(model: PreTrainedModel, weights: dict[str, torch.Tensor], config: ModelConfig, dir: str | Path) -> None:
    """Write weights, config and tokenizer so that ``from_pretrained`` loads them."""
    model.save_pretrained(dir, state_dict=weights)
    source = config.tokenizer or config.load
    AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code).save_pretrained(dir)


def _options(config: ModelConfig) -> dict[str, Any]:
    return {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": attention.NAME,
        "trust_remote_code": config.trust_remote_code,
    }


def _auto(config: ModelConfig) -> type:
    return AutoModelForCausalLM if config.head == "lm" else AutoModelForSequenceClassification
