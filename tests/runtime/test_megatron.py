"""GRPO on Ray, the trainer cut by megatron-core over two ranks: what FSDP learns in one process, either engine."""

from __future__ import annotations

import pytest

from tests.conformance.backends import MEGATRON
from tests.conformance.engines import SMALL, VLLM, model_dir
from tests.runs import metrics, run, settings

pytestmark = [MEGATRON, pytest.mark.backends, pytest.mark.timeout(900)]
pytest.importorskip("ray")
CUTS = {"tensor_parallel": {"tensor_parallel": 2}, "pipeline_parallel": {"pipeline_parallel": 2}}


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
    assert run(config) == 0
    return config, metrics(config)


def on_ray(config, name: str, policy: dict, cut: dict) -> list[dict]:
    trainer = config["models"]["trainer"] | {"module": "megatron", "num_process": 2, **cut}
    models = {"policy": config["models"]["policy"] | policy, "trainer": trainer}
    models["reference"] = {"module": "megatron"}  # cut as the trainer is
    runtime = config["runtime"] | {"cluster": "ray"}
    own = config | {"output": f"{config['output']}-{name}", "models": models, "runtime": runtime}
    assert run(own) == 0
    return metrics(own)


@pytest.mark.parametrize("cut", CUTS)
def test_the_curve_is_that_of_fsdp_in_one_process(config, cut):
    given, alone = config
    found = on_ray(given, cut, {"module": "native"}, CUTS[cut])
    for key in ("loss/value", "loss/grad_norm", "loss/kl_ref", "reward/mean", "tokens/trained"):
        one, two = ([line[key] for line in lines] for lines in (alone, found))
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5), key


@VLLM
def test_its_weights_reach_a_policy_of_vllm(config):
    found = on_ray(config[0], "vllm", {"module": "vllm", "vllm": SMALL}, CUTS["tensor_parallel"])
    for line, alone in zip(found, config[1], strict=True):
        assert line["loss/mismatch"] < 1e-4
        assert line["reward/mean"] == pytest.approx(alone["reward/mean"], rel=0.1, abs=0.02)
