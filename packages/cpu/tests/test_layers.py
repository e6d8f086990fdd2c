"""RMSNorm and gated MLPs by kernels: what transformers' layers compute, forward and backward, and no other layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from coalign_cpu import layers, operations
from coalign_cpu.layers import KernelMLP, KernelRMSNorm, use_kernels
from coalign_cpu.library import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler")

CONFIG = LlamaConfig(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
DTYPES = [torch.float32, torch.bfloat16]


def run(layer: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and of the parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(upstream.to(out.dtype))
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one.double() - other.double()).abs().max() <= tolerance * other.double().abs().max()


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer = LlamaRMSNorm(24, eps=1e-5) if kind == "norm" else LlamaMLP(CONFIG)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("rows", [1, 63, 64, 130])
@pytest.mark.parametrize("kind", ["norm", "mlp"])
def test_results_and_gradients_are_those_of_float64(kind, rows):
    x, upstream = torch.randn(2, rows, 24), torch.randn(2, rows, 24)
    expected = run(make(kind).double(), x.double(), upstream.double())
    if kind == "norm":  # transformers computes it in float32
        weight, x64 = make(kind).double().weight, x.double().requires_grad_()
        out = weight * x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-5)
        out.backward(upstream.double())
        expected = [out.detach(), x64.grad, weight.grad]
    layer = make(kind)
    use_kernels(layer)
    assert isinstance(layer, KernelRMSNorm if kind == "norm" else KernelMLP)
    close(run(layer, x, upstream), [each.float() for each in expected], 2e-6)


@pytest.mark.parametrize("kind", ["norm", "mlp"])
def test_in_bfloat16_results_have_the_bits_of_transformers(kind):
    x, upstream = torch.randn(50, 24).bfloat16(), torch.randn(50, 24).bfloat16()
    expected = run(make(kind).bfloat16(), x, upstream)
    layer = make(kind).bfloat16()
    use_kernels(layer)
    found = run(layer, x, upstream)
    assert (found[0] == expected[0]).float().mean() > 0.99
    close(found, expected, 1e-2)


def test_under_autocast_a_norm_gives_what_the_linear_layer_behind_it_would_make_of_it():
    x, linear, plain, layer = torch.randn(50, 24), nn.Linear(24, 8), make("norm"), make("norm")
    use_kernels(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert (linear(layer(x)) == linear(plain(x))).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_and_the_gradient_of_a_weight_do_not_depend_on_threads(dtype):
    layer, x, upstream = make("norm").to(dtype), torch.randn(300, 24).to(dtype), torch.randn(300, 24).to(dtype)
    use_kernels(layer)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            layer.zero_grad()
            results.append(run(layer, x, upstream))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(layer(x[7:8])[0], layer(x)[7])


class OtherNorm(LlamaRMSNorm):
    """Has the shape of an RMSNorm and computes something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class GatedNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states) * gate


class PerhapsGatedNorm(LlamaRMSNorm):
    """As Mamba's: without a gate it is an RMSNorm."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


class OtherMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def test_layers_that_compute_something_else_stay():
    gelu = copy.copy(CONFIG)
    gelu.hidden_act = "gelu"
    others = [OtherNorm(24), GatedNorm(24), PerhapsGatedNorm(24), GemmaRMSNorm(24), nn.LayerNorm(24)]
    others += [nn.LayerNorm(24, bias=False)]
    others += [OtherMLP(CONFIG), LlamaMLP(gelu), GemmaMLP(gelu), nn.Linear(24, 24), ACT2FN["silu"], nn.PReLU(24)]
    for layer in others:
        before = type(layer)
        use_kernels(layer)
        assert type(layer) is before, layer


def test_other_dtypes_and_devices_stay_with_torch():
    norm, mlp = make("norm").double(), make("mlp").double()
    x = torch.randn(5, 24).double()
    expected = norm(x), mlp(x)
    for layer in (norm, mlp):
        use_kernels(layer)
    assert torch.equal(norm(x), expected[0]) and torch.equal(mlp(x), expected[1])
    meta = make("norm").to("meta")
    use_kernels(meta)
    assert meta(torch.empty(5, 24, device="meta")).shape == (5, 24)


def test_a_model_keeps_its_names_and_a_copy_of_it_its_own_weights():
    model = AutoModelForCausalLM.from_config(CONFIG)
    tokens, names = torch.arange(8)[None], list(model.state_dict())
    expected = model(tokens).logits
    use_kernels(model)
    kernels = [module for module in model.modules() if isinstance(module, (KernelRMSNorm, KernelMLP))]
    assert len(kernels) == 2 * 3 + 1
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-6)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(tokens).logits, expected, rtol=1e-5, atol=1e-6)


def test_without_a_compiler_a_model_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(layers, "load_kernels", lambda: None)
    norm = make("norm")
    use_kernels(norm)
    assert type(norm) is LlamaRMSNorm


def test_a_subclass_of_a_tensor_has_no_kernel():
    class Wrapped(Tensor):
        pass

    assert not operations.has_kernel(torch.zeros(2).as_subclass(Wrapped))
    assert operations.has_kernel(nn.Parameter(torch.zeros(2)))
