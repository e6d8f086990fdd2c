"""`coalign merge`: fold a LoRA adapter into its base model and write one Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from coalign.backends import lora
from coalign.backends.pretrained import find_auto_class
from coalign.backends.vision_language import copy_processor
from coalign.files import read_model_config, require_free_output, write_atomically
from coalign_serve.weights.adapter import merge_adapter

HEAD = lora.PREFIX + "score.weight"


def merge(base: Path, adapter: Path, output: Path, *, dtype: str | None = None) -> None:
    """Write ``base`` with ``adapter`` merged in, its generation config, and the adapter's tokenizer to ``output``.

    An adapter without a tokenizer, or without a chat template, gets the base's. The sum is computed in float32
    and stored in ``dtype`` (None: the base's). ``output`` appears complete, by a rename at the end. Raises ValueError
    for directories without a model or a LoRA adapter and for an adapter of another model, FileExistsError for an output
    that is not empty.
    """
    require_free_output(output, [base, adapter], is_folder=True)
    read_model_config(base)
    settings, tensors = lora.read_adapter(adapter)
    config = AutoConfig.from_pretrained(base)
    auto = find_auto_class(config, "reward" if settings.task_type == "SEQ_CLS" else "lm")
    labels = {"num_labels": len(tensors[HEAD])} if HEAD in tensors else {}
    loaded: Any = auto.from_pretrained(base, dtype=torch.float32, output_loading_info=True, **labels)
    model, info = loaded  # the stubs of transformers do not know output_loading_info
    if missing := {name for name in info["missing_keys"] if lora.PREFIX + name not in tensors}:
        raise ValueError(f"neither {base} nor {adapter} has {sorted(missing)}")
    stored = getattr(torch, dtype) if dtype else config.dtype or torch.float32
    merged: Any = merge_adapter(model, adapter)  # nor that `to` takes a dtype
    tokenizer = _read_tokenizer(base, adapter, rows=merged.get_input_embeddings().weight.shape[0])
    output.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(output) as aside:
        merged.to(stored).save_pretrained(aside)
        copy_processor(base, aside)
        tokenizer.save_pretrained(aside)


def _read_tokenizer(base: Path, adapter: Path, *, rows: int) -> PreTrainedTokenizerBase:
    """The adapter's tokenizer and chat template, or the base's where it has none. ValueError for more ids than the
    merged embeddings have ``rows``."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    template = tokenizer.chat_template
    if any((adapter / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        tokenizer = AutoTokenizer.from_pretrained(adapter)
        template = tokenizer.chat_template or template
        if (ids := max(tokenizer.get_vocab().values()) + 1) > rows:
            raise ValueError(
                f"the tokenizer of {adapter} has {ids} ids, and neither {base} nor the adapter has embeddings of more "
                f"than {rows}: the adapter was saved without those of its new tokens (peft: save_embedding_layers)"
            )
    elif (file := adapter / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    tokenizer.chat_template = template
    return tokenizer
