"""A task whose answers can be checked: two-digit addition. A character tokenizer, a small model, and the data.

    python examples/arithmetic.py        makes them in runs/sums, and runs/sums/sft/model by SFT: about a minute

The other examples on sums (examples/arithmetic_*.yaml) begin with that model.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

CHARACTERS = "0123456789+= "


def make_model(directory: Path, *, hidden: int = 128, layers: int = 4, seed: int = 0) -> None:
    """A random Qwen2-style model whose tokens are single characters, as a Hugging Face directory."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: i for i, token in enumerate(["<end>", "<unk>", *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    # Without a pad token AutoTokenizer would add Qwen2's own, for which the model has no row.
    special = {"eos_token": "<end>", "unk_token": "<unk>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, **special)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=4 * hidden,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_data(directory: Path, *, held_out: int = 500, seed: int = 0) -> None:
    """All sums of two numbers below 100, shuffled: `eval.jsonl` (never trained on) and `train.jsonl`."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(rows)
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("eval", rows[:held_out]), ("train", rows[held_out:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def main() -> None:
    import coalign

    folder = Path(os.environ.setdefault("SUMS", "runs/sums"))
    make_model(folder / "model")
    make_data(folder / "data")
    coalign.train(Path(__file__).with_name("arithmetic_sft.yaml"))


if __name__ == "__main__":
    main()
