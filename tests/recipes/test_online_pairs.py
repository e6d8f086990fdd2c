"""Online DPO from its YAML: which responses it compares, what it refuses, that it learns and resumes exactly."""

from __future__ import annotations

import pytest
import torch

from coalign.backends.base import TrainableModule
from coalign.data.batch import Batch
from coalign.engine.hooks.guards import UNHEALTHY
from coalign.recipes.online_dpo import compared
from tests.runs import metrics, run, run_to_end, settings, trace_calls, weights_hash

MEMBERS = {"group": torch.zeros(2, dtype=torch.int64), "index": torch.zeros(2, dtype=torch.int32)}


def configuration(directory, **runtime):
    config = settings(directory, "online_dpo", **{"steps": 2, "eval_at_start": False} | runtime)
    config["data"].pop("eval")
    return config


def test_the_reference_scores_what_is_compared(tmp_path):
    config = configuration(tmp_path)
    calls = trace_calls(config)
    assert set(calls["reference.forward_step"].reads) == {"compared"}
    assert "preference" in calls["trainer.train_step"].reads["compared"]
    for line in run_to_end(config):
        assert line["tokens/generated"] > 2 * line["tokens/trained"] > 0  # two of four, and ties drop out


def test_episodes_of_several_rows_are_no_responses():
    batch = Batch(torch.ones(2), {}, {"branch": torch.tensor([0, 1]), "preference": torch.ones(2)} | MEMBERS)
    with pytest.raises(ValueError, match=r"compares responses, .* several rows .*grpo"):
        compared(batch)
    assert len(compared(batch.with_(branch=torch.zeros(2, dtype=torch.int32)))) == 2


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_how_far_the_sampler_is_from_the_trainer(tmp_path, updates):
    """On the weights that sampled: what later updates of the same batch have changed is no mismatch."""
    config = configuration(tmp_path)
    config["models"]["trainer"] |= {"updates_per_batch": updates, "optimizer": {"lr": 0.03}}
    for line in run_to_end(config):
        assert line["loss/mismatch"] <= line["loss/mismatch_max"] < 1e-4
        assert abs(line["loss/mismatch_kl"]) < 1e-6 and line["loss/ess"] == pytest.approx(1, abs=1e-4)


def test_a_bad_sampler_is_seen(tmp_path, monkeypatch):
    from coalign.backends.engines.native.native_engine import NativeModule

    generate = NativeModule.generate

    def shifted(self, *given, **keywords):
        out = generate(self, *given, **keywords)
        return out.with_(rollout_logprobs=out["rollout_logprobs"] - 0.5 * out["loss_mask"])

    monkeypatch.setattr(NativeModule, "generate", shifted)
    config = configuration(tmp_path, steps=1)
    assert run(config, "runtime.guards={max_mismatch_max: 0.4}") == UNHEALTHY
    (line,) = metrics(config)
    assert line["loss/mismatch"] == pytest.approx(0.5, abs=1e-3)


def test_a_step_of_ties_changes_nothing(tmp_path):
    config = configuration(tmp_path, steps=2) | {"reward": "tests.functions:never_differs"}
    first = run_to_end(config)[0]
    assert first["pairs/tied"] == 4 and first["loss/skipped_updates"] == 1
    assert "loss/value" not in first
    other = configuration(tmp_path, steps=1) | {"reward": "tests.functions:never_differs"}
    other |= {"output": str(tmp_path / "other")}
    run(other)
    assert weights_hash(config, 2) == weights_hash(other, 1)


def test_all_pairs_train_on_every_response_of_a_group(tmp_path):
    config = configuration(tmp_path, steps=1)
    run(config)
    everything = config | {"pairs": "all_pairs", "output": str(tmp_path / "all")}
    run(everything)
    (two,), (all_,) = metrics(config), metrics(everything)
    assert two["loss/value"] == pytest.approx(0.6931, abs=1e-3) and two["loss/margin"] == 0.0  # no update yet: log 2
    assert two["pairs/count"] + two["pairs/tied"] == 4  # one pair of each prompt's samples, or none
    assert all_["pairs/count"] > two["pairs/count"]
    assert all_["pairs/tied"] == two["pairs/tied"]
    assert all_["tokens/trained"] == pytest.approx(2 * two["tokens/trained"], rel=0.1)


@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        ({"fn": "dpo", "length_normalised": True}, True),
        ("simpo", False),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("ipo", "aot")),
    ],
)
def test_the_loss_is_a_setting(tmp_path, loss, reference):
    config = configuration(tmp_path, steps=1) | {"loss": loss}
    (line,) = run_to_end(config)
    assert ("time/reference.forward_step" in line) == reference and line["loss/grad_norm"] > 0


def test_the_trainer_computes_no_anchor(tmp_path, monkeypatch):
    """Of an importance ratio, which no pairwise loss has, also where several updates are made of a batch."""
    forward, asked = TrainableModule.forward_step, []

    def noted(self, batch, **keywords):
        asked.append((self.context.model, keywords.get("into")))
        return forward(self, batch, **keywords)

    monkeypatch.setattr(TrainableModule, "forward_step", noted)
    config = configuration(tmp_path, steps=1)
    config["models"]["trainer"]["updates_per_batch"] = 2
    run(config)
    assert asked == [("reference", None)]
