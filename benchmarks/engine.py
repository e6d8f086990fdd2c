"""Generation speed of the native engine against ``transformers`` generate: same model, prompts and lengths, in turns.

    python benchmarks/engine.py [--prompts 8 --samples 8 --new 128 --threads 2 --rounds 3 --dtype float32]

Prints the median tokens/s of both, their ratio, and the floor: the time in which the measured matmul rate would do the
decoding's multiplications alone (2 x parameters x tokens). Sampling at temperature 1, no end token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import matmul_rate
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from coalign.backends.engines.native.engine import NativeEngine
from coalign.backends.engines.native.model import NativeModel
from coalign.backends.engines.request import Request
from coalign.config.schema import SamplingConfig


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = _model(args, dtype)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(60, 100, args.prompts).long().tolist()
    prompts = [torch.randint(3, args.vocabulary, (n,), generator=generator).tolist() for n in lengths]
    runs = {
        "coalign": _coalign(model, prompts, args),
        "transformers": _transformers(model, prompts, args),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # warm
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(_timed(run))
    tokens = args.prompts * args.samples * args.new
    seconds = {name: statistics.median(values) for name, values in times.items()}
    parameters = sum(p.numel() for p in model.parameters())
    rate = matmul_rate(dtype)
    floor = 2 * parameters * tokens / rate
    shape = f"{args.prompts} x {args.samples} x {args.new}"
    print(f"{parameters / 1e6:.1f}M parameters, {args.dtype}, {args.threads} threads, {shape}")
    for name, value in seconds.items():
        spread = f"{min(times[name]):.2f}..{max(times[name]):.2f}"
        print(
            f"{name:13s} {value:6.2f} s ({spread})  {tokens / value:8.0f} tokens/s  {floor / value:5.0%} of the floor"
        )
    print(f"ratio {seconds['transformers'] / seconds['coalign']:.2f}x; floor {floor:.2f} s at {rate / 1e9:.0f} GFLOP/s")


def _coalign(model: PreTrainedModel, prompts: list[list[int]], args: argparse.Namespace) -> Callable[[], object]:
    engine = NativeEngine(
        NativeModel(model.config, dtype=model.dtype, device="cpu"),
        seed=0,
        max_sequences=args.prompts * args.samples,
        kv_tokens=None,
        prefill_tokens=4096,
        end_tokens=[],
        decoder=lambda stops: str,
    )
    engine.load_weights(model.named_parameters(), version=0, adopt=True)
    sampling = SamplingConfig(max_new_tokens=args.new)
    return lambda: next(engine.generate([Request(p, i, args.samples) for i, p in enumerate(prompts)], sampling))


def _transformers(model: PreTrainedModel, prompts: list[list[int]], args: argparse.Namespace) -> Callable[[], object]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return torch.inference_mode()(
        lambda: model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=args.samples,
            min_new_tokens=args.new,
            max_new_tokens=args.new,
            pad_token_id=0,
        )
    )


def _model(args: argparse.Namespace, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        intermediate_size=args.intermediate,
        vocab_size=args.vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "prompts": 8, "samples": 8, "new": 128, "threads": 2, "rounds": 3, "hidden": 384, "layers": 6, "heads": 6,
        "kv-heads": 2, "intermediate": 1024, "vocabulary": 16384,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
