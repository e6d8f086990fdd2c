"""Generation speed of the native engine beside `transformers` generate and vLLM: same model, prompts and lengths.

    python benchmarks/engine.py [--peers transformers vllm] [--threads 2] [--dtype float32] [--rounds 3]
        [--prompts 8 --samples 8 --new 128] [--hidden 576 --layers 30 --heads 9 --kv-heads 3 ...]

Each side has a process of its own, held to ``--threads`` processors; they run in turns while the others sleep. Prints
the medians of tokens/s and of tokens in a second of processor time, the ratios, and the floor: the time in which the
measured matmul rate would do the decoding's multiplications alone (2 x parameters x tokens). Random weights; sampling
at temperature 1, no end token. All sides return the log-probs of what they drew, except transformers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

Prompts = list[list[int]]
SHAPE = {"hidden": 384, "layers": 6, "heads": 6, "kv-heads": 2, "intermediate": 1024, "vocabulary": 16384}


def main() -> None:
    args = _arguments()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        parameters = _save_model(args, folder)
        sides: dict[str, Connection] = {}
        for name in ("coalign", *args.peers):
            sides[name], theirs = context.Pipe()
            context.Process(target=_serve, args=(name, folder, args, theirs), daemon=True).start()
            print(f"{name} is ready after {sides[name].recv():.1f} s", flush=True)
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, side in sides.items():
                side.send("go")
                rounds[name].append(side.recv())
        sides["coalign"].send("rate")
        rate = sides["coalign"].recv()
        for side in sides.values():
            side.send("end")
    tokens = args.prompts * args.samples * args.new
    floor = 2 * parameters * tokens / rate
    shape = f"{args.prompts} x {args.samples} x {args.new}"
    print(f"{parameters / 1e6:.1f}M parameters, {args.dtype}, {args.threads} threads, {shape}")
    ours = [statistics.median(each) for each in zip(*rounds["coalign"], strict=True)]
    for name, values in rounds.items():
        wall, processor = (statistics.median(each) for each in zip(*values, strict=True))
        spread = f"{min(values)[0]:.2f}..{max(values)[0]:.2f}"
        print(
            f"{name:13s} {wall:6.2f} s ({spread})  {tokens / wall:6.0f} tokens/s  {tokens / processor:6.0f} tokens a "
            f"processor second  {floor / wall:4.0%} of the floor  Coalign {wall / ours[0]:.2f} x as fast, by processor "
            f"time {processor / ours[1]:.2f} x"
        )
    print(f"floor {floor:.2f} s at {rate / 1e9:.0f} GFLOP/s")


def _serve(name: str, folder: str, args: argparse.Namespace, pipe: Connection) -> None:
    """One side: builds its engine, then answers `go` with the seconds of a run, on the clock and of the processor."""
    begun = time.perf_counter()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    run = {"coalign": _coalign, "transformers": _transformers, "vllm": _vllm}[name](folder, _prompts(args), args)
    run()
    run()
    pipe.send(time.perf_counter() - begun)
    while (asked := pipe.recv()) != "end":
        if asked == "rate":
            from common import matmul_rate

            pipe.send(matmul_rate(getattr(torch, args.dtype)))
            continue
        clock, processor = time.perf_counter(), time.process_time()
        run()
        pipe.send((time.perf_counter() - clock, time.process_time() - processor))


def _coalign(folder: str, prompts: Prompts, args: argparse.Namespace) -> Callable[[], object]:
    from coalign.backends.engines.native.native_engine import NativeEngine
    from coalign.backends.engines.native.native_model import NativeModel
    from coalign.backends.engines.request import Request
    from coalign.backends.engines.session_driver import generate_responses
    from coalign.config.schema import SamplingConfig

    model = _load(folder)
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
    return lambda: generate_responses(engine, [Request(p, i, args.samples) for i, p in enumerate(prompts)], sampling)


def _transformers(folder: str, prompts: Prompts, args: argparse.Namespace) -> Callable[[], object]:
    import torch

    model = _load(folder)
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


def _vllm(folder: str, prompts: Prompts, args: argparse.Namespace) -> Callable[[], object]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=args.prompts * args.samples,
        enforce_eager=args.eager,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        n=args.samples, temperature=1.0, max_tokens=args.new, ignore_eos=True, logprobs=0, detokenize=False
    )
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return lambda: engine.generate(asked, sampling, use_tqdm=False)


def _save_model(args: argparse.Namespace, folder: str) -> int:
    """Write a model with random weights; returns how many it has."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

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
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _load(folder: str):  # a PreTrainedModel; transformers takes seconds to import
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(Path(folder), dtype="auto").eval()


def _prompts(args: argparse.Namespace) -> Prompts:
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(60, 100, args.prompts).long().tolist()
    return [torch.randint(3, args.vocabulary, (n,), generator=generator).tolist() for n in lengths]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"prompts": 8, "samples": 8, "new": 128, "threads": 2, "rounds": 3, **SHAPE}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peers", nargs="*", choices=["transformers", "vllm"], default=["transformers"])
    parser.add_argument("--eager", action="store_true", help="vLLM compiles nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
