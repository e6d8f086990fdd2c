"""What the benchmarks share: a model and prompts of known size, the machine's measured matmul rate, peak memory."""

from __future__ import annotations

import json
import resource
import statistics
import time
from pathlib import Path

GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k_train.jsonl"


def prompts(n: int) -> list[dict]:
    """The first n GSM8K questions; synthetic ones of like length where the file is not there."""
    if GSM8K.exists():
        with open(GSM8K) as lines:
            return [json.loads(next(lines)) for _ in range(n)]
    texts = (f"Ann has {i} apples and buys {i * 7 % 50} more each day. " * 5 for i in range(n))
    return [{"question": text, "answer": "#### 1"} for text in texts]


def make_model(directory: Path, *, hidden=384, layers=6, heads=6, kv_heads=2, intermediate=1024, vocab=16384) -> int:
    """A random Qwen2-style model (default: 15.7M parameters) with a BPE tokenizer of GSM8K; its parameter count."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((row["question"] + " " + row["answer"] for row in prompts(7000)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.num_parameters()


def matmul_rate(dtype, *, seconds: float = 1.0, size: int = 2048) -> float:
    """The best FLOP/s this machine reaches on a square matrix product of this dtype, with the threads now set."""
    import torch

    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def peak_mib() -> float:
    """The most memory this process ever held (MiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def median(values: list[float]) -> float:
    return statistics.median(values)
