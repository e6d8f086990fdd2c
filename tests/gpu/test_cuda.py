"""The same promises on a CUDA device. Run there with `pytest -m gpu tests/gpu`; no machine of ours has run them yet."""

import pytest
import torch

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.attention import attend, has_varlen
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.packing import Block, RowPlan
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.roles import Context
from tests.backends.batches import prompts, rollout
from tests.conformance import reference
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = Context(device="cuda:0", loss=Objective(PolicyGradient()), samples_per_prompt=4)


@pytest.fixture
def path(tmp_path):
    return str(tiny_model_dir(tmp_path / "model"))


def build(cls, path, **config):
    module = cls(ModelConfig(load=path, **config), CUDA)
    module.setup()
    return module


@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_logprobs_agree_with_hugging_face_on_the_cpu(path, compute, tolerance):
    batch = rollout((5, 9, 12), 3)
    model = reference.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = reference.logprobs(model, batch).detach()
    got = build(FSDPModule, path, compute_dtype=compute).forward_step(batch)["ref_logprobs"][batch["loss_mask"]]
    assert float((got - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("flex", torch.float32), ("flex", torch.bfloat16), ("varlen", torch.bfloat16)]
)
def test_one_call_for_a_row_is_attention_block_by_block(kernel, dtype, window):
    if kernel == "varlen" and not has_varlen():
        pytest.skip(f"torch {torch.__version__} has no varlen_attn with windows")
    blocks = (Block(0, (100,)), Block(100, (50, 70, 70), ((0, 100),)), Block(290, (300, 20)))
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(610, heads, 64, generator=generator).to("cuda", dtype) for heads in (8, 2, 2)]
    results = []
    for name in ("blocks", kernel):
        own = [x.detach().requires_grad_() for x in given]
        out = attend(*own, plan=RowPlan(blocks, "cuda", name), window=window)
        (out.float() * torch.arange(out.numel(), device="cuda").reshape(out.shape).cos()).sum().backward()
        results.append([out, *(x.grad for x in own)])
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm() / one.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_the_sampler_and_the_trainer_agree(path, compute, tolerance):
    """In 16 bits the engine calls flash attention over the slots of its cache."""
    trainer = build(FSDPModule, path, compute_dtype=compute)
    sampling = SamplingConfig(max_new_tokens=16)
    policy = build(NativeModule, path, module="native", sampling=sampling, compute_dtype=compute)
    policy.load_weights(trainer.export_weights(), version=0, adopt=True)
    out = policy.generate(prompts(3, 5))
    mask = out["loss_mask"]
    again = trainer.forward_step(out)["ref_logprobs"]
    assert float((again - out["rollout_logprobs"])[mask].abs().mean()) < tolerance


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 1.2}])
def test_graphs_choose_the_tokens_of_single_kernels(path, sampling):
    trainer, found = build(FSDPModule, path), []
    for graphs in (True, False):
        given = {"native": {"graphs": graphs}, "sampling": SamplingConfig(max_new_tokens=40, **sampling)}
        policy = build(NativeModule, path, module="native", **given)
        policy.load_weights(trainer.export_weights(), version=0)
        found.append(policy.generate(prompts(3, 5, 9)))
    assert torch.equal(found[0]["tokens"], found[1]["tokens"])
    torch.testing.assert_close(found[0]["rollout_logprobs"], found[1]["rollout_logprobs"], rtol=1e-4, atol=1e-4)


def test_a_training_step_learns(path):
    trainer = build(FSDPModule, path, optimizer={"lr": 1e-2})
    batch = rollout((5, 9, 12), 3)
    batch = batch.with_(advantages=torch.where(batch["loss_mask"], 1.0, 0.0))
    before = trainer.forward_step(batch)["ref_logprobs"].sum()
    trainer.train_step(batch)
    assert trainer.forward_step(batch)["ref_logprobs"].sum() > before
