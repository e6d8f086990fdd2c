"""Packed rows against the plain Hugging Face forward of each sequence alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from coalign.backends import attention
from coalign.backends.attention import attend, packed_attention
from coalign.backends.layout import Block, pack
from coalign.data.batch import Batch
from tests.backends.batches import rollout
from tests.tiny import tiny_model_dir

WINDOW = 6  # shorter than the prompts, so that windows cut into the shared part
FAMILIES = {
    "qwen2": {},
    "qwen2-windowed": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "llama": {"attention_bias": True},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {"sliding_window": WINDOW},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "cohere": {"logit_scale": 0.2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request, tmp_path_factory):
    family = request.param.split("-")[0]
    return tiny_model_dir(tmp_path_factory.mktemp(request.param), family=family, **FAMILIES[request.param])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.mark.parametrize("share", [True, False])
def test_hidden_states_and_gradients_are_those_of_each_sequence_alone(model_dir, share):
    batch = rollout((9, 12, 1), 3)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=attention.NAME, dtype=torch.float32)

    rows = list(batch.rows())
    alone = [plain.model(input_ids=row["tokens"].long()[None]).last_hidden_state[0] for row in rows]
    expected = torch.cat([h[:-1][row["loss_mask"][1:]] for h, row in zip(alone, rows, strict=True)])
    layout = pack(batch, share_prefix=share)
    hidden = packed.model(
        input_ids=layout.tokens[None], position_ids=layout.positions[None], use_cache=False, layout=layout
    ).last_hidden_state[0]
    assert relative(hidden[layout.predictors], expected) < 1e-6
    assert relative(hidden[layout.last], torch.stack([h[-1] for h in alone])) < 1e-6

    upstream = torch.randn(expected.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    (expected * upstream).sum().backward()
    (hidden[layout.predictors] * upstream).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), packed.parameters(), strict=True):
        if a.grad is not None:
            assert relative(b.grad, a.grad) < 3e-6, name


def test_a_setting_it_does_not_know_is_refused():
    x, layout = torch.zeros(1, 2, 3, 4), pack(Batch(torch.tensor([3]), {"tokens": torch.arange(3)}))
    with pytest.raises(NotImplementedError, match="s_aux"):
        packed_attention(torch.nn.Identity(), x, x, x, None, layout=layout, s_aux=torch.zeros(2))
    with pytest.raises(NotImplementedError, match="attention_mask"):
        packed_attention(torch.nn.Identity(), x, x, x, torch.ones(1, 1, 3, 3), layout=layout)


def test_nothing_of_a_sequence_reaches_another():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, 2, 4, generator=generator) for _ in range(3))
    blocks = (Block(0, (2,)), Block(2, (2, 3), (0, 2)))
    before = attend(q, k, v, blocks=blocks)
    k[2:4] += 1.0
    after = attend(q, k, v, blocks=blocks)
    changed = (before != after).flatten(1).any(-1).nonzero().flatten().tolist()
    assert changed == [2, 3]


def test_an_empty_batch_has_no_blocks():
    batch = Batch(torch.zeros(0, dtype=torch.int64), {"tokens": torch.zeros(0, dtype=torch.int32)})
    assert pack(batch).blocks == ()
