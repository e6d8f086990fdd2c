"""Compares an engine's log-probs of what it samples with those of the trainer, or of the model's own forward.

An engine with its own model classes may compute something else than transformers: it may miss a bias, have wrong
positions, or lose weights of a tower. It would sample all the same, and a run would learn from another model's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.backends.engines.request import begin_samples, extend_samples, plan_requests
from coalign.backends.engines.session_driver import generate_responses
from coalign.backends.vision import ImageEmbedder, list_plain_tokens
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.data.images.probe import make_probe
from coalign.data.images.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from coalign.backends.engines.rollout_module import RolloutModule
    from coalign.cluster.batch_ref import Store

SAMPLES, TOKENS = 4, 8  # how many are compared
PLAIN = 8  # tokens of a prompt without pictures
# Mean |Δ log-prob| that rounding explains; another model differs by about 1.
LIMITS = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.1}


def begin_probe(config: PreTrainedConfig, processor: ImageProcessor | None) -> Batch:
    """Return samples without a response, of a prompt of plain tokens, or with two pictures for a model that sees. Each
    is a group of its own, so that the ranks of a trainer can share them."""
    plain = list_plain_tokens(config, config.get_text_config().vocab_size, PLAIN)
    sequence: dict[str, Any] = {"group": torch.arange(SAMPLES)}
    tokens = plain
    if processor is not None:
        tokens, spans = make_probe(processor, plain)
        sequence["images"] = [tuple(spans)] * SAMPLES
    columns = {"tokens": torch.tensor(tokens * SAMPLES, dtype=torch.int32)}
    return begin_samples(Batch(torch.full((SAMPLES,), len(tokens)), columns, sequence), 1)


def sample_probe(module: RolloutModule, store: Store | None, samples: Batch) -> Batch | None:
    """Answer each of ``samples`` without the run's environment; None where that is longer than a model can read."""
    sampling = SamplingConfig(temperature=module.config.sampling.temperature or 1.0, max_new_tokens=TOKENS)
    limits = (module.engine.max_tokens, module.context.sample_tokens)
    if any(limit is not None and int(samples.lengths.max()) + TOKENS > limit for limit in limits):
        return None
    rows, requests = plan_requests(samples, TOKENS, None, None)
    answers = generate_responses(module.engine, requests, sampling)
    return extend_samples(samples, rows, [response for responses in answers for response in responses])


@torch.inference_mode()
def compute_logprobs(
    model: PreTrainedModel,
    processor: ImageProcessor | None,
    samples: Batch,
    temperature: float,
    forbidden: Sequence[int] = (),
) -> Tensor:
    """Compute f32[T], the log-prob of each token by the model's own forward without the ``forbidden`` ids; 0 for the
    first of a sample."""
    model.eval()
    images = None if processor is None else ImageEmbedder(model, processor, keep=0)
    masked = torch.tensor(forbidden, dtype=torch.int64)
    out = []
    for row in samples.rows():
        tokens = row["tokens"].long()
        here = tokens.to(model.device)
        inputs = {"input_ids": here[None]} if images is None else images.list_plain_inputs(here, row["images"])
        logits = model(**inputs).logits[0, :-1].float().cpu()
        logprobs = (logits.index_fill(1, masked, -torch.inf) / temperature).log_softmax(-1)
        out += [torch.zeros(1), logprobs.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(out)


def check_difference(name: str, configs: Sequence[ModelConfig], samples: Batch, expected: Tensor) -> None:
    """Raise ValueError, with the ``name`` of the policy, where rounding does not explain how far its log-probs are from
    those ``expected`` f32[T]. ``configs``: the policy's, and that of the model which computed them."""
    limit = max(LIMITS[config.compute_dtype or config.dtype] for config in configs)
    difference = (samples["rollout_logprobs"] - expected)[samples["loss_mask"]].abs().mean().item()
    if not difference <= limit:
        load = configs[0].load
        why = f"computes {load} otherwise than transformers does: log-probs"
        if "images" in samples.sequence:
            why = f"reads images otherwise than {load} does: behind two pictures, log-probs"
        raise ValueError(
            f"models.{name}.module is `{configs[0].module}`, which {why} differ by {difference:.2g} on average; use "
            "`native` or `transformers`"
        )
