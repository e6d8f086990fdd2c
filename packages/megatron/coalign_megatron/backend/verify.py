"""Compares transformers and megatron-core on the two sides of a conversion, in float32 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import torch
import transformers
from torch import Tensor

from coalign.backends.hf.heads import LanguageModelHead
from coalign.backends.packing import pack
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.weights.sync.transport import WeightError
from coalign_megatron.backend import build
from coalign_megatron.backend.build import create_transformer_config
from coalign_megatron.backend.cpu import on_cpu
from coalign_megatron.backend.model import PackedGPT
from coalign_megatron.backend.partition import (
    ParallelSizes,
    WeightPartition,
    choose_vocabulary_multiple,
    collect_tensors,
)
from coalign_megatron.convert.huggingface import whole_shard
from coalign_megatron.convert.plan import choose_dtypes
from coalign_megatron.convert.sources import ConversionRequest, OpenedCheckpoint, open_source
from coalign_megatron.layouts.megatron import MegatronLayout, split_layers
from coalign_megatron.layouts.shards import TensorSpec, cut, plan, reshard

TOKENS = 64
TOLERANCE = 1e-4  # largest difference of log-probs and entropies; the order of sums alone gives 1e-6 in small models


def compare_models(request: ConversionRequest, source: OpenedCheckpoint, folder: Path) -> str:
    """Run both models on random tokens; describe the result, or why they were not run.

    ``folder`` was converted from ``source``. Raises WeightError where log-probs or entropies differ by more than
    TOLERANCE.
    """
    if source.format == request.to or "hf" not in (source.format, request.to):
        return "no model was run: only one side is Hugging Face's"
    hf, target = (source.hf, folder) if source.format == "hf" else (folder, None)
    config = json.loads((hf / "config.json").read_text())
    model_class = getattr(transformers, (config.get("architectures") or [""])[0], None)
    if model_class is None:
        return f"no model was run: transformers has no class for {config.get('architectures')}"
    if "quantization_config" in config:
        return "no model was run: transformers computes with the source's 8 bits on GPUs only"
    size = 4 * sum(torch.Size(tensor.shape).numel() for tensor in source.family.sources(source.config).values())
    if size > (free := psutil.virtual_memory().available * 0.8):
        return f"no model was run: in float32 it has {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    megatron = source if target is None else open_source(replace(request, source=target, hf=None, pickles=False))
    generator = torch.Generator().manual_seed(0)
    count = min(TOKENS, source.config.max_position_embeddings)
    tokens = torch.randint(source.config.vocab_size, (count,), generator=generator)
    with torch.no_grad():
        expected = _transformers(model_class, hf, request.dtype, tokens)
        computed = _megatron(megatron, choose_dtypes(request, megatron), tokens)
    difference = float((computed - expected).abs().max())
    if not difference <= TOLERANCE:
        raise WeightError(
            f"transformers and megatron-core differ by {difference:.1e} in log-probs or entropies of {count} tokens; "
            f"{TOLERANCE:.0e} is tolerated"
        )
    return (
        f"transformers and megatron-core compute the same: log-probs and entropies of {count} tokens differ by at "
        f"most {difference:.1e} ({TOLERANCE:.0e} is tolerated)"
    )


def _transformers(model_class: type, folder: Path, dtype: str | None, tokens: Tensor) -> Tensor:
    """Return log-probs of all tokens but the first, and entropies there [2, n], by transformers."""
    model = model_class.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    if dtype is not None:  # buffers are never converted
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    model.float()
    every = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.stack([every.gather(1, tokens[1:, None])[:, 0], -(every.exp() * every).sum(-1)])


def _megatron(opened: OpenedCheckpoint, dtypes: Mapping[str, torch.dtype], tokens: Tensor) -> Tensor:
    config, side = opened.config, opened.weights
    with on_cpu(), ExitStack() as stack:
        build.join_ranks(ParallelSizes(), Context())
        stack.callback(build.leave_ranks)
        multiple = choose_vocabulary_multiple(config, 1)
        layout = MegatronLayout(config, ParallelSizes().mesh(1), split_layers(config.num_layers))
        weights = WeightPartition(opened.family, layout, multiple)
        settings = create_transformer_config(config, ParallelSizes())
        model = PackedGPT(config, settings, vocabulary=weights.padded, read=LanguageModelHead())
        left = collect_tensors([model])
        sources = opened.family.sources(config)
        views = {name: whole_shard(source) for name, source in sources.items()}
        specs = {name: TensorSpec(source.shape, dtypes[name]) for name, source in sources.items()}
        moves = dict(plan(list(views.values()), side.ranks))

        def view(name: str) -> Tensor:
            return next(tensor for _, tensor in reshard(specs, [views[name]], moves, side.fetch))

        # Texts alone are compared: a vision tower is left out.
        for name, tensor in cut(view, [shard for shard in weights.shards(0, in_memory=False) if shard.name in left]):
            left.pop(name).copy_(tensor)
        assert not left, f"nothing was read for {sorted(left)}"
        batch = Batch(torch.tensor([len(tokens)]), {"tokens": tokens.int()}, {})
        outputs = model.eval()(pack(batch), None, ("entropy",))
    return torch.stack([outputs["logprobs"], outputs["entropy"]])
