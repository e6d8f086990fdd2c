"""`coalign merge`: fold a LoRA adapter into its base model and write one Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from coalign.backends import lora
from coalign.backends.pretrained import find_auto_class
from coalign.backends.vision_language import copy_processor
from coalign.files import read_model_config, require_free_output, write_atomically

HEAD = lora.PREFIX + "score.weight"


def merge(base: Path, adapter: Path, output: Path, *, dtype: str | None = None) -> None:
    """Write ``base`` with ``adapter`` merged in, its tokenizer and generation config to ``output``.

    The sum is computed in float32 and stored in ``dtype`` (None: the base's). ``output`` appears complete, by a rename
    at the end. Raises ValueError for directories without a model or a LoRA adapter and for an adapter of another
    model, FileExistsError for an output that is not empty.
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
    merged: Any = lora.merge_adapter(model, adapter)  # nor that `to` takes a dtype
    output.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(output) as aside:
        merged.to(stored).save_pretrained(aside)
        AutoTokenizer.from_pretrained(base).save_pretrained(aside)
        copy_processor(base, aside)
