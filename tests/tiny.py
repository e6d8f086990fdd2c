"""Tiny tokenizers and models for tests: real Hugging Face directories, built in milliseconds, the same every time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def _byte_level(special: tuple[str, ...] = SPECIAL, merges: tuple[tuple[str, str], ...] = ()) -> str:
    """A tokenizer of bytes (ids 0..255 in the GPT-2 alphabet's order), merged pairs and special tokens, as JSON."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer.to_str()


def tiny_tokenizer(
    dir: str | Path | None = None,
    *,
    chat_template: str | None = CHATML,
    merges: tuple[tuple[str, str], ...] = (),
    **special: Any,
):
    """A byte-level tokenizer of 259 ids with a ChatML template; eos is `<|im_end|>` and there is no pad token.

    ``merges`` add an id each. ``special`` goes to PreTrainedTokenizerFast (``eos_token=None``,
    ``bos_token="<|endoftext|>"``, ...). With ``dir`` it is also written there.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level(merges=merges)), **{"eos_token": "<|im_end|>"} | special
    )
    tokenizer.chat_template = chat_template
    if dir is not None:
        tokenizer.save_pretrained(dir)
    return tokenizer


def tiny_model_dir(
    path: str | Path,
    *,
    vocab: int = 320,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = True,
    family: str = "qwen2",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a random causal LM of any decoder ``family`` of transformers (`qwen2`, `llama`, `qwen3`, ...) to ``path``.

    The directory holds config.json, model.safetensors (fp32) and the tiny tokenizer; ``vocab`` must be at least 259.
    Further keywords go to the family's config. The global torch RNG is left as it was.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from coalign.backends.pretrained import _save_model

    path = Path(path)
    tokenizer = tiny_tokenizer(path)
    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings | config), dtype=torch.float32)
    _save_model(model, path)
    return path


def tiny_reward_model_dir(path: str | Path, *, head_seed: int = 0, **model: Any) -> Path:
    """Write a random reward model; ``model`` goes to tiny_model_dir."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from coalign.backends.pretrained import _save_model

    path = tiny_model_dir(path, **model)
    scored = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    torch.nn.init.normal_(scored.score.weight, std=0.5, generator=torch.Generator().manual_seed(head_seed))
    _save_model(scored, path)
    return path
