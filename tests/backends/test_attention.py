"""Packed rows against the plain Hugging Face forward of each sequence alone."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from coalign.backends import attention
from coalign.backends.attention import _packed_attention, attend, check_kernel, choose_kernel, has_varlen
from coalign.backends.packing import Block, RowPlan, pack
from coalign.data.batch import Batch
from tests.backends.batches import branched, rollout
from tests.backends.flash import flash_as_documented
from tests.conformance.backends import relative
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


@pytest.mark.parametrize(
    ("batch", "share"), [(rollout((9, 12, 1), 3), True), (rollout((9, 12, 1), 3), False), (branched(), True)]
)
def test_hidden_states_and_gradients_are_those_of_each_sequence_alone(model_dir, batch, share):
    plain = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(
        model_dir, attn_implementation=attention.register_attention(), dtype=torch.float32
    )

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
        _packed_attention(torch.nn.Identity(), x, x, x, None, layout=layout, s_aux=torch.zeros(2))
    with pytest.raises(NotImplementedError, match="attention_mask"):
        _packed_attention(torch.nn.Identity(), x, x, x, torch.ones(1, 1, 3, 3), layout=layout)


# ---- kernels of devices: one call for the row

BLOCKS = (
    *(
        Block(0, (4,)),
        Block(4, (2, 3, 3), ((0, 4),)),
        Block(12, (5, 1)),
        Block(18, (6,)),
        Block(24, (2, 2), ((18, 24),)),
    ),
    # A fork inside a fork: 28..31 goes on in 31..33 and in 39, and 31..33 in two spans of its own.
    *(
        Block(28, (3,)),
        Block(31, (2,), ((28, 31),)),
        Block(33, (4, 2), ((28, 31), (31, 33))),
        Block(39, (1,), ((28, 31),)),
    ),
)
STOPS = (4, 6, 9, 12, 17, 18, 24, 26, 28, 31, 33, 37, 39, 40)
SPANS = list(pairwise((0, *STOPS)))
TOKENS = 40


def inputs(dtype=torch.float32, size=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, heads, size) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def test_the_plan_of_a_row():
    plan = RowPlan(BLOCKS, "cpu")
    ends = {0: 12, 18: 28, 28: 40, 31: 39}  # of the spans that others continue
    assert plan.reach.tolist() == [ends.get(start, stop) for start, stop in SPANS for _ in range(start, stop)]
    assert plan.positions[:9].tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6] and plan.positions[24:].tolist() == [
        6,
        7,
        6,
        7,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        5,
        6,
        3,
    ]
    assert plan.spans.queries.tolist() == [0, *(stop for _, stop in SPANS)]
    assert plan.spans.keys.diff().tolist() == [4, 6, 7, 7, 5, 1, 6, 8, 8, 3, 5, 9, 7, 4]
    assert plan.spans.longest == (6, 9)
    source = plan.spans.source.tolist()
    assert source[:10] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5] and source[-4:] == [28, 29, 30, 39]
    assert plan.spans is plan.spans and plan.mask(1, None) is plan.mask(1, None)
    assert RowPlan((Block(0, (3, 2)),), "cpu").spans.source is None  # nothing is shared, so nothing is copied


@pytest.mark.parametrize(("window", "scaling"), [(None, None), (3, 0.3), (5, None), (100, 0.3)])
def test_flash_attention_over_spans_is_that_of_blocks(monkeypatch, window, scaling):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash_as_documented)
    results = []
    for kernel in ("blocks", "varlen"):
        given = inputs()
        out = attend(*given, plan=RowPlan(BLOCKS, "cpu", kernel), window=window, scaling=scaling)
        (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum().backward()
        results.append([out, *(x.grad for x in given)])
    for blocks, spans in zip(*results, strict=True):
        torch.testing.assert_close(blocks, spans, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 2.0), (5, None), (100, 2.0)])
def test_flex_attention_is_that_of_blocks(window, softcap):
    """Forward only: on CPUs torch has no backward of it."""
    with torch.no_grad():
        given = [x.detach() for x in inputs()]
        blocks, flex = (
            attend(*given, plan=RowPlan(BLOCKS, "cpu", kernel), window=window, softcap=softcap)
            for kernel in ("blocks", "flex")
        )
    torch.testing.assert_close(blocks, flex, rtol=1e-5, atol=1e-6)


def test_the_kernel_follows_device_and_dtype(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("coalign.backends.attention.get_compute_capability", lambda device: (9, 0))
    assert choose_kernel(torch.bfloat16, cpu) == "blocks"
    assert choose_kernel(torch.bfloat16, cuda) == ("varlen" if has_varlen() else "flex")
    assert choose_kernel(torch.bfloat16, cuda, plain=False) == choose_kernel(torch.float32, cuda) == "flex"
    monkeypatch.setattr("coalign.backends.attention.get_compute_capability", lambda device: (7, 5))
    assert choose_kernel(torch.float16, cuda) == "flex"


@pytest.mark.parametrize(
    ("kernel", "dtype", "device", "message"),
    [
        ("flex", torch.float32, "cpu", "is flex, which computes on CUDA only; on cpu use `blocks`"),
        ("varlen", torch.bfloat16, "npu", "is varlen, which computes on CUDA only"),
        ("varlen", torch.float32, "cuda", "computes in bfloat16 or float16; this model takes torch.float32"),
    ],
)
def test_a_kernel_that_cannot_compute_is_refused(kernel, dtype, device, message):
    with pytest.raises(ValueError, match=message):
        check_kernel(kernel, dtype, torch.device(device) if device != "npu" else SimpleNamespace(type="npu"))
    check_kernel("blocks", dtype, torch.device("cpu"))


def test_a_layer_copies_nothing_to_the_device():
    """Indices and masks are made for the first layer; the others find them."""
    plan, made = RowPlan(BLOCKS, "cpu", "blocks"), []
    given = inputs()
    attend(*given, plan=plan, window=3)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        attend(*given, plan=plan, window=3)
    assert not [name for name in made if any(word in name for word in ("arange", "_to_copy", "lift", "cumsum"))], made
