"""Makes a Hugging Face directory of a GGUF file. transformers reads the file: weights, tokenizer and chat template."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from coalign.files import write_atomically

log = logging.getLogger(__name__)
# save_pretrained imports accelerate, and that DeepSpeed, if it is installed, which warns of a machine without GPU.
logging.getLogger("DeepSpeed").addFilter(lambda record: "accelerator to CPU" not in record.getMessage())


def convert_gguf(file: Path, output: Path, *, weights: bool = True) -> None:
    """Write config.json, tokenizer and, with ``weights``, model.safetensors to ``output``, unless they are there.

    Quantised weights are written as the float32 numbers that they stand for. Several processes may convert the same
    file at once. Raises ValueError for a file that transformers cannot read: its architecture or its type of
    quantisation is not known there, or it is damaged.
    """
    if (output / "model.safetensors").is_file() or (output.is_dir() and not weights):
        return
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{file}: GGUF files need {package}, which is not installed: pip install 'coalign[gguf]'")
    output.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(output.with_name(f"{output.name}.lock")):
        if (output / "model.safetensors").is_file() or (output.is_dir() and not weights):
            return
        log.info("converting %s to %s", file, output)
        try:
            _convert(file, output, weights=weights)
        except Exception as error:  # the reader of a damaged file may raise anything
            raise ValueError(
                f"{file} cannot be converted: {error}. transformers reads the architectures and quantisations that "
                "huggingface.co/docs/transformers/gguf lists; the repository of the model that the file was made from "
                "can be loaded in its place"
            ) from error


def _convert(file: Path, output: Path, *, weights: bool) -> None:
    if not output.is_dir():
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        with write_atomically(output) as aside:
            config.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
    if weights:
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # transformers refuses to save what it has read from quantised weights, so a model of its own takes them.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output), dtype=torch.float32)
        plain.load_state_dict(read.state_dict(), assign=True)
        plain.tie_weights()
        with TemporaryDirectory(dir=output) as aside:
            plain.save_pretrained(aside, max_shard_size="1TB")
            Path(aside, "generation_config.json").replace(output / "generation_config.json")
            Path(aside, "config.json").replace(output / "config.json")
            Path(aside, "model.safetensors").replace(output / "model.safetensors")
