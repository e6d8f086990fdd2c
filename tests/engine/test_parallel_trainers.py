"""A trainer cut over processes, in a run on Ray: its shares, statistics and weight sync are those of one process."""

import pytest

from tests.runs import metrics, run, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("ray")


@pytest.mark.parametrize("way", ["tensor_parallel", "context_parallel"])
def test_a_cut_trainer_learns_what_a_whole_one_does(tmp_path, way):
    config = settings(tmp_path, "grpo", steps=3, eval_at_start=False)
    config["data"].pop("eval")
    config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05}
    config["models"]["trainer"] |= {"updates_per_batch": 2}
    # An update without advantages has a gradient of rounding alone, which Adam would make whole steps of.
    config["models"]["trainer"]["optimizer"] |= {"eps": 1e-3}
    assert run(config) == 0
    cut = config | {"output": str(tmp_path / "ray")}
    placed = ["models.trainer.num_process=4", f"models.trainer.{way}=2", "models.reference.num_process=1"]
    assert run(cut, "runtime.cluster=ray", *placed, f"models.reference.{way}=1") == 0
    for key in ("loss/value", "loss/grad_norm", "loss/kl_ref", "reward/mean", "tokens/trained"):
        one = [line[key] for line in metrics(config)]
        assert [line[key] for line in metrics(cut)] == pytest.approx(one, rel=1e-4, abs=1e-5), key
