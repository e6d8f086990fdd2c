"""GRPO on Ray with a trainer of two ranks of any backend: what FSDP learns in one process, with either engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conformance.backends import DEEPSPEED, MEGATRON
from tests.conformance.engines import SMALL, VLLM, model_dir
from tests.runs import run_to_end, settings

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]
pytest.importorskip("ray")
ZERO = {"module": "deepspeed", "deepspeed": {"stage": 3}}
TENSOR = {"module": "megatron", "tensor_parallel": 2}
STAGES = {"module": "megatron", "pipeline_parallel": 2}
REACHING_VLLM = [pytest.param(ZERO, id="deepspeed", marks=DEEPSPEED), pytest.param(TENSOR, id="tensor", marks=MEGATRON)]
TRAINERS = [*REACHING_VLLM, pytest.param(STAGES, id="pipeline", marks=MEGATRON)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Of a run, and the metrics of it in one process."""
    directory = tmp_path_factory.mktemp("runs")
    model_dir(directory / "model")
    config = settings(directory, "grpo", steps=3, eval_at_start=False)
    config["data"].pop("eval")
    config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05}
    # An update without advantages has a gradient of rounding alone, which Adam would make whole steps of.
    config["models"]["trainer"]["optimizer"] |= {"eps": 1e-3}
    return config, run_to_end(config)


def on_ray(config, name: str, policy: dict, trainer: dict) -> list[dict]:
    models = {
        "policy": config["models"]["policy"] | policy,
        "trainer": config["models"]["trainer"] | {"num_process": 2, **trainer},
        "reference": {"module": trainer["module"]},  # its weights are shared over the ranks as the trainer's are
    }
    runtime = config["runtime"] | {"cluster": "ray"}
    own = config | {"output": f"{config['output']}-{name}", "models": models, "runtime": runtime}
    return run_to_end(own)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_curve_is_that_of_fsdp_in_one_process(config, trainer, request):
    given, alone = config
    found = on_ray(given, request.node.name, {"module": "native"}, trainer)
    compare(found, alone)


def compare(found: list[dict], alone: list[dict]) -> None:
    for key in ("loss/value", "loss/grad_norm", "loss/kl_ref", "reward/mean", "tokens/trained"):
        one, two = ([line[key] for line in lines] for lines in (alone, found))
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5), key


@MEGATRON
def test_adapters_learn_what_they_do_in_one_process(config, request):
    """The base beneath them is the reference."""
    lora = {"lora": {"rank": 4}}
    alone = config[0] | {"output": f"{config[0]['output']}-lora", "models": dict(config[0]["models"])}
    alone["models"]["trainer"] = alone["models"]["trainer"] | lora
    compare(on_ray(config[0], request.node.name, {"module": "native"}, TENSOR | lora), run_to_end(alone))
    folders = (f"{config[0]['output']}-{name}" for name in (request.node.name, "lora"))
    found, wanted = (load_file(next(Path(folder).rglob("adapter_model.safetensors"))) for folder in folders)
    assert found.keys() == wanted.keys()
    assert max(float(tensor.abs().max()) for name, tensor in wanted.items() if "lora_B" in name) > 1e-3
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


@VLLM
@pytest.mark.parametrize("trainer", REACHING_VLLM)
def test_its_weights_reach_a_policy_of_vllm(config, trainer, request):
    found = on_ray(config[0], request.node.name, {"module": "vllm", "vllm": SMALL}, trainer)
    for line, alone in zip(found, config[1], strict=True):
        assert line["loss/mismatch"] < 1e-4
        assert line["reward/mean"] == pytest.approx(alone["reward/mean"], rel=0.1, abs=0.02)


@VLLM
@MEGATRON
def test_adapters_reach_a_policy_of_vllm_by_themselves(config, request):
    given = config[0] | {"sync": {"adapters": "apart"}}
    trainer = TENSOR | {"lora": {"rank": 4, "target": ["*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj"]}}
    found = on_ray(given, request.node.name, {"module": "vllm", "vllm": SMALL}, trainer)
    assert all(line["loss/mismatch"] < 1e-4 for line in found)
    assert found[-1]["loss/kl_ref"] > 1e-3  # those of zeros would be the reference
