"""How near a training step comes to the floor that its matrix products set.

    python benchmarks/trainer.py [--threads 2] [--dtype float32] [--profile]

The model is random, of the size that issue 2 names. The floor is the time that the step's matrix products would take at
the rate measured here, just before, for products of the same shapes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import Qwen2Config

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    shape = Qwen2Config(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=16384,
        tie_word_embeddings=True,
    )
    batch = rollout(options, shape.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        config = ModelConfig(
            load=folder,
            init="random",
            compute_dtype=options.dtype,
            share_prefix=not options.unshared,
            max_tokens_per_micro=options.micro,
            activation_checkpointing="full" if options.checkpointing else None,
        )
        trainer = FSDPModule(config, Context(loss=Objective(PolicyGradient(kl_coef=0.04))))
        trainer.setup()
        step = lambda: trainer.train_step(batch)  # noqa: E731
        step()
        if options.profile:
            profile(step)
            return
        score, train = (
            best(lambda: trainer.forward_step(batch), options.repeat, clock),
            best(step, options.repeat, clock),
        )
    row = int(batch["prompt_length"].sum()) // options.samples + int(batch["loss_mask"].sum())
    forward, total = flops(shape, row if not options.unshared else batch.tokens_total, int(batch["loss_mask"].sum()))
    rate = matmul_rate(shape, options, clock)
    print(f"{batch.tokens_total} tokens in the batch, {row} computed once, {options.dtype}, {options.threads} threads")
    print(f"matrix products: {rate / 1e9:.0f} GFLOP/s measured")
    for name, seconds, work in (("score", score, forward), ("train", train, total)):
        print(
            f"{name}: {seconds:.2f} s, {batch.tokens_total / seconds:.0f} tokens/s, floor {work / rate:.2f} s "
            f"({work / 1e9:.0f} GFLOP), share of the floor {work / rate / seconds:.0%}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=80, help="mean prompt length")
    parser.add_argument("--new", type=int, default=128, help="tokens of each response")
    parser.add_argument("--micro", type=int, default=16384, help="max_tokens_per_micro")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--unshared", action="store_true", help="compute each prompt once per sample")
    parser.add_argument("--ragged", action="store_true", help="responses of 1..new tokens")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="with one thread: time on the CPU, for a busy machine")
    parser.add_argument("--profile", action="store_true", help="print torch.profiler's table instead")
    return parser.parse_args()


def rollout(options: argparse.Namespace, vocab: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, vocab, (n,), generator=generator)  # noqa: E731
    tokens, mask, lengths, prompts = [], [], [], []
    for i in range(options.prompts):
        prompt = draw(options.prompt + 8 * i - 4 * (options.prompts - 1))
        for _ in range(options.samples):
            n = int(torch.randint(1, options.new + 1, (1,), generator=generator)) if options.ragged else options.new
            tokens += [prompt, draw(n)]
            mask += [torch.zeros(len(prompt), dtype=torch.bool), torch.ones(n, dtype=torch.bool)]
            lengths.append(len(prompt) + n)
            prompts.append(len(prompt))
    total = sum(lengths)
    return Batch(
        torch.tensor(lengths),
        {
            "tokens": torch.cat(tokens).int(),
            "loss_mask": torch.cat(mask),
            "advantages": torch.randn(total, generator=generator),
            "rollout_logprobs": torch.full((total,), -9.7),
            "ref_logprobs": torch.full((total,), -9.7),
        },
        {
            "group": torch.arange(options.prompts).repeat_interleave(options.samples),
            "prompt_length": torch.tensor(prompts),
        },
    )


def flops(shape: Qwen2Config, row: int, trained: int) -> tuple[float, float]:
    """(forward, forward and backward) of the linear layers and of the head; attention's own products are left out."""
    h, kv = shape.hidden_size, shape.hidden_size * shape.num_key_value_heads // shape.num_attention_heads
    layer = 2 * h * h + 2 * h * kv + 3 * h * shape.intermediate_size
    forward = 2.0 * (row * shape.num_hidden_layers * layer + trained * h * shape.vocab_size)
    return forward, 3.0 * forward


def matmul_rate(shape: Qwen2Config, options: argparse.Namespace, clock: Callable[[], float]) -> float:
    """FLOP/s of the product that dominates, forward and both backward ones, best of several."""
    dtype = getattr(torch, options.dtype)
    x = torch.randn(1024, shape.hidden_size, dtype=dtype)
    w = torch.randn(shape.intermediate_size, shape.hidden_size, dtype=dtype)
    y = torch.randn(1024, shape.intermediate_size, dtype=dtype)
    seconds = sum(best(product, 50, clock) for product in (lambda: x @ w.t(), lambda: y @ w, lambda: y.t() @ x))
    return 3 * 2.0 * x.shape[0] * w.numel() / seconds


def best(function: Callable[[], object], repeat: int, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(repeat):
        start = clock()
        function()
        times.append(clock() - start)
    return min(times)


def profile(step: Callable[[], object]) -> None:
    with torch.profiler.profile() as profiler:
        step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
