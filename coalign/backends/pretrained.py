"""Hugging Face directories in and out: model, head, tokenizer, all strictly."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from coalign.backends import attention, lora
from coalign.config.schema import ModelConfig

log = logging.getLogger(__name__)

OWN_ATTENTION = (
    "{} does not call transformers' attention interface, so it cannot compute packed sequences; `module: megatron` "
    "computes Bloom and Falcon (docs/backends.md)"
)
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


def load(config: ModelConfig, *, seed: int, name: str = "*", packed: bool = True) -> PreTrainedModel:
    """The model with its weights on the CPU, as ``config.load``, ``init``, ``head``, ``head_init`` and ``lora`` say.

    ``name``: of the model, for messages. ``packed``: it will compute packed sequences. A value or reward model is
    transformers' sequence classifier of one label, so that its head has the name that any such checkpoint gives it.
    Raises ValueError when the checkpoint lacks weights, names included, and for adapters that do not fit;
    NotImplementedError for a family that cannot be ``packed``.
    """
    hf, auto, quantization = read_config(config), _auto(config), _quantization(config)
    options = _options(config, packed=packed)
    if config.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(auto.from_config, hf, hf, **options)
        missing: set[str] = set()
    else:
        # Weights of another shape are refused below, by name.
        loading = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = _build(auto.from_pretrained, hf, config.load, config=hf, **loading, **options, **quantization)
        _refuse_other_shapes(config.load, info["mismatched_keys"])
        missing = set(info["missing_keys"])
        if quantization:
            _keep_quantized(model)
    if config.head != "lm" and config.head_init == "zero":
        nn.init.zeros_(model.score.weight)
        missing.discard("score.weight")
    if missing:
        new = "it was not trained as one" if config.frozen else "head_init: zero starts a new head"
        hint = f"; {new}" if "score.weight" in missing else ""
        raise ValueError(f"{config.load} lacks {sorted(missing)} for a model with head '{config.head}'{hint}")
    if packed:
        _check_interface(model)
    if has_adapters(config):
        lora.attach(model, config, seed=seed, name=name)
        if config.lora.load:
            lora.load(model, config.lora.load, name)
        some, all_ = model.num_parameters(only_trainable=True), model.num_parameters()
        log.info("models.%s trains %s of %s parameters (%.2f %%)", name, f"{some:,}", f"{all_:,}", 100 * some / all_)
    return model


def _refuse_other_shapes(directory: str, found: Iterable[tuple[str, torch.Size, torch.Size]]) -> None:
    """As of a vocabulary that was extended in config.json only, or a classifier of several labels."""
    wrong = [f"{name} is {list(there)} there and {list(here)} in the model" for name, there, here in sorted(found)]
    if wrong:
        raise ValueError(f"{directory}: the weights do not fit: {'; '.join(wrong)}")


def build_skeleton(config: ModelConfig, *, name: str = "*", packed: bool = True) -> PreTrainedModel:
    """The model without storage. ``packed``: as of `load`."""
    hf = read_config(config)
    with torch.device("meta"):
        model = _build(_auto(config).from_config, hf, hf, **_options(config, packed=packed))
        if packed:
            _check_interface(model)
        if has_adapters(config):
            lora.attach(model, config, seed=0, name=name)
    return model


def has_adapters(config: ModelConfig) -> bool:
    """A frozen model has none of its own; it may be given trained ones."""
    return config.lora is not None and (not config.frozen or config.lora.load is not None)


def read_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's own tokenizer."""
    source = config.tokenizer or config.load
    return AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)


def read_context_length(hf: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that the architecture says it can read."""
    return getattr(hf.get_text_config(), "max_position_embeddings", None)


def save(model: PreTrainedModel, weights: dict[str, torch.Tensor], config: ModelConfig, dir: str | Path) -> None:
    """Write weights, config and tokenizer so that ``from_pretrained`` loads them."""
    model.save_pretrained(dir, state_dict=weights)
    read_tokenizer(config).save_pretrained(dir)


def save_config(config: ModelConfig, dir: str | Path) -> None:
    """config.json and tokenizer, for weights that are written by themselves."""
    hf = json.loads((Path(str(config.load)) / "config.json").read_text(encoding="utf-8"))
    hf |= {"dtype": config.dtype}
    if config.head != "lm":
        kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[hf["model_type"]]
        hf |= {"architectures": [kind], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (Path(dir) / "config.json").write_text(json.dumps(hf, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    read_tokenizer(config).save_pretrained(dir)


def _build(make: Callable[..., Any], hf: PretrainedConfig, *arguments: Any, **options: Any) -> Any:
    """What ``make`` makes of ``hf``. NotImplementedError for a class that looks attention up in a table of its own."""
    try:
        return make(*arguments, **options)
    except KeyError as problem:
        if problem.args != (attention.NAME,):
            raise
        raise NotImplementedError(OWN_ATTENTION.format(f"the model type `{hf.model_type}`")) from problem


def _check_interface(model: PreTrainedModel) -> None:
    if not model._supports_attention_backend:
        raise NotImplementedError(OWN_ATTENTION.format(type(model).__name__))


def _options(config: ModelConfig, *, packed: bool) -> dict[str, Any]:
    options = {"dtype": getattr(torch, config.dtype), "trust_remote_code": config.trust_remote_code}
    return options | {"attn_implementation": attention.NAME} if packed else options


def _quantization(config: ModelConfig) -> dict[str, Any]:
    """QLoRA's NF4 with quantised constants (2305.14314), for every linear layer but the head."""
    if config.lora is None or config.lora.base_bits is None:
        return {}
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.compute_dtype or config.dtype),
        llm_int8_skip_modules=["lm_head", "score"],
    )
    return {"quantization_config": nf4, "device_map": {"": "cpu"}}


def _keep_quantized(model: PreTrainedModel) -> None:
    """Hold the 4-bit weights as they are, and forget that the model is stored like that: it is exported in full."""
    model.hf_quantizer.remove_quantization_config(model)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # repacks the weights, with less precise scales, in eval mode
            module.support_avx512bf16_for_cpu = False


def _auto(config: ModelConfig) -> type:
    return AutoModelForCausalLM if config.head == "lm" else AutoModelForSequenceClassification
