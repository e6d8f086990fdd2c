"""Small models and engines for the tests of the native engine."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config

from coalign.backends.engines.contract import GenerationSession, InferenceEngine
from coalign.backends.engines.native.native_engine import NativeEngine
from coalign.backends.engines.native.native_model import NativeModel
from coalign.backends.engines.request import Request
from coalign.config.schema import SamplingConfig
from coalign.types import Response

VOCABULARY = 160
SAMPLING = SamplingConfig(max_new_tokens=12)


def replace(sampling: SamplingConfig, **changes: Any) -> SamplingConfig:
    return sampling.model_copy(update=changes)


def qwen2(**changes) -> Qwen2Config:
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6}
    shape |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return Qwen2Config(**{**shape, "tie_word_embeddings": True, **changes})


def reference(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A transformers model with weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def engine(model: PreTrainedModel, **changes) -> NativeEngine:
    """An engine that has adopted the parameters of ``model`` as version 0."""
    settings = {"seed": 7, "max_sequences": 64, "kv_tokens": None, "prefill_tokens": 256, "end_tokens": []}
    settings |= {"decoder": lambda stops: str}
    made = NativeEngine(NativeModel(model.config, dtype=model.dtype, device="cpu"), **{**settings, **changes})
    made.load_weights(model.state_dict().items(), version=0, adopt=True)
    return made


def requests(count: int, samples: int = 1, seed: int = 1) -> list[Request]:
    """Prompts of 3 to 40 tokens; group i for the i-th."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 41, (count,), generator=generator).tolist()
    return [
        Request(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist(), group, samples)
        for group, n in enumerate(lengths)
    ]


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], response: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the response under a plain forward of ``model``, one sequence by itself. f32[R]"""
    tokens = torch.cat([torch.tensor(prompt), response.long()])
    logits = model(tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, response.long()[:, None])[:, 0]


def step(engine: InferenceEngine, session: GenerationSession, count: int | None = None) -> None:
    """Compute this many steps; None: to the end."""
    while session.unfinished if count is None else count > 0:
        with engine.stepping():
            session.step()
        count = None if count is None else count - 1


def submit(session: GenerationSession, request: Request, answers: dict[tuple[int, int], Response]) -> Any:
    """Ask for responses, which ``answers`` gets by (group, index)."""

    def note(place: int, response: Response) -> None:
        assert (request.group, request.first + place) not in answers
        answers[request.group, request.first + place] = response

    return session.submit(request, note)


def flat(responses: list[list[Response]]) -> list[Response]:
    return [r for some in responses for r in some]


def check_same(found: list[Response], expected: list[Response]) -> None:
    """Check that responses have the same tokens, and log-probs bit for bit."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.logprobs, other.logprobs)
