"""Guards against NaN and drift: what they see, what they do, and that a run goes on from there."""

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.config.schema.rollout import GuardsConfig
from coalign.config.schema.runtime import RuntimeConfig
from coalign.engine.hooks.guards import METRICS, UNHEALTHY, _list_exceeded, _list_non_finite, read_dump
from coalign.engine.rollouts.journal import read_lines
from coalign.types import LossInput, LossOutput, Stat, Total
from coalign_diagnose.run_history import RunHistory
from tests.runs import metrics, run, run_to_end, samples, settings, trace_calls, weights_hash

NAN = float("nan")


def poisoned(x: LossInput, *, first: int = -1, last: int = -1) -> LossOutput:
    """NaN for the responses to a range of prompts, as they are counted in the run."""
    out = PolicyGradient()(x)
    group = x.columns["group"][x.segment]
    bad = (group >= first) & (group <= last)
    return LossOutput(out.value * torch.where(bad, NAN, 1.0), out.stats)


def fading(x: LossInput, *, start: float = 2.0) -> LossOutput:
    """Reports an entropy that is half a nat lower with every weight version."""
    entropy = start - 0.5 * x.columns["versions"].float()
    return LossOutput(PolicyGradient()(x).value, {"entropy": Stat.of(entropy)})


def configured(tmp_path: Path, loss: dict, algorithm: str = "grpo", **runtime) -> dict:
    """A run of four steps of four prompts each; step s trains on the prompts 4 (s - 1) … 4 s - 1."""
    tmp_path.mkdir(exist_ok=True)
    config = settings(tmp_path, algorithm, **({"save_every": 1, "keep": 9, "eval_at_start": False} | runtime))
    return config | {"loss": {"fn": f"tests.engine.hooks.test_guards:{loss.pop('fn')}", **loss}}


def checkpoints(config: dict) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (Path(config["output"]) / "checkpoints").glob("step_*"))


def learned(config: dict, step: int, model: str) -> dict:
    """Weights, optimizer and progress of a model in a checkpoint."""
    file = Path(config["output"]) / f"{model}.pt"
    dcp_to_torch_save(Path(config["output"]) / "checkpoints" / f"step_{step}" / "models" / model, file)
    return torch.load(file, weights_only=True)


# ---- what they see


@pytest.mark.parametrize(
    ("stats", "seen"),
    [
        ({"loss/value": Stat(1.0), "loss/grad_norm": Stat(2.0)}, []),
        ({"loss/value": Stat(NAN)}, ["loss/value is nan"]),
        ({"value/loss/grad_norm": Stat(math.inf)}, ["value/loss/grad_norm is inf"]),
        ({"loss/grad_norm": Stat(0.0, 0.0)}, []),  # nothing was updated
        ({"loss/entropy": Stat(NAN), "reward/mean": Stat(NAN)}, []),
    ],
)
def test_what_is_not_finite(stats, seen):
    assert _list_non_finite(stats) == seen
    (skipped,) = _list_non_finite({"loss/not_finite": Total(2.0)})
    assert skipped.startswith("2 updates with a gradient that is not finite")


def test_thresholds_are_exceeded_by_nan_and_by_nothing_that_is_not_there():
    config = GuardsConfig(max_approx_kl=0.1, min_entropy=0.5, max_mismatch=0.02)
    names = ["loss/approx_kl", "loss/entropy", "loss/mismatch"]
    exceeded = _list_exceeded({"loss/value": Stat(0.0)} | dict.fromkeys(names, Stat(NAN)), config)
    assert [text.split(" ")[0] for text in exceeded] == names
    assert _list_exceeded({"time/step": Total(1.0)}, config) == []  # the policy waits for its value model
    assert _list_exceeded({"loss/value": Stat(0.0)}, GuardsConfig()) == []


@pytest.mark.parametrize(
    ("key", "metric", "fine", "bad"),
    [
        ("max_approx_kl", "approx_kl", 0.2, 0.21),
        ("max_kl_ref", "kl_ref", 0.2, 0.21),
        ("max_mismatch", "mismatch", 0.2, 0.21),
        ("max_mismatch_max", "mismatch_max", 0.2, 0.21),
        ("max_mismatch_kl", "mismatch_kl", 0.2, 0.21),
        ("min_entropy", "entropy", 0.2, 0.19),
        ("min_ess", "ess", 0.2, 0.19),
    ],
)
def test_every_threshold_bounds_the_metric_of_its_name(key, metric, fine, bad):
    config = GuardsConfig(**{key: 0.2})
    for value, found in ((fine, []), (bad, [f"loss/{metric} is {bad} (runtime.guards.{key}: 0.2)"])):
        assert _list_exceeded({"loss/value": Stat(0.0), f"loss/{metric}": Stat(value)}, config) == found
        assert _list_exceeded({f"loss/{metric}": Stat(value)}, config) == found  # nothing was learned yet
    assert len(METRICS) == 7 == len([k for k in GuardsConfig.model_fields if k[:3] in ("max", "min")]) - 1


def test_a_metric_that_no_loss_reports_is_named():
    stats = {"loss/value": Stat(0.0), "loss/mismatch": Stat(0.0), "time/step": Total(1.0)}
    said = r"guards.min_entropy is 0.1, and the loss reports no `loss/entropy`; .*: max_mismatch \(loss/mismatch\)$"
    with pytest.raises(ValueError, match=said):
        _list_exceeded(stats, GuardsConfig(min_entropy=0.1))
    with pytest.raises(ValueError, match=r"it has none that guards could bound"):
        _list_exceeded({"loss/value": Stat(0.0)}, GuardsConfig(min_ess=0.1))


@pytest.mark.parametrize(
    ("algorithm", "key", "reported"),
    [
        ("grpo", "max_kl_ref", False),
        ("ppo", "max_kl_ref", True),
        ("grpo", "min_ess", True),
        ("online_dpo", "max_mismatch_max", True),
        ("online_dpo", "max_approx_kl", False),
        ("sft", "max_mismatch", False),
    ],
)
def test_a_threshold_on_what_a_run_never_reports_is_refused_before_anything_loads(tmp_path, algorithm, key, reported):
    config = settings(tmp_path, algorithm, guards={key: 0.5})
    if reported:
        trace_calls(config)
        return
    with pytest.raises(ValueError, match=rf"runtime.guards.{key} is 0.5, and the loss reports no"):
        run(config)
    assert not Path(config["output"]).exists()


def test_values_that_a_loss_refuses_end_a_run_before_anything_loads(tmp_path):
    config = settings(tmp_path, "grpo")
    with pytest.raises(ValueError, match=r"loss.is_low is 1.5"):
        run(config, "loss.is_level=token", "loss.is_low=1.5")
    assert not Path(config["output"]).exists()


def test_rolling_back_needs_checkpoints():
    with pytest.raises(ValueError, match=r"set runtime\.save_every"):
        RuntimeConfig(guards={"action": "rollback"})
    RuntimeConfig(guards={"action": "rollback"}, save_every=5)


# ---- stopping


def test_nan_ends_the_run_with_its_batch_and_without_its_weights_and_going_on_is_exact(tmp_path):
    healthy = configured(tmp_path / "healthy", {"fn": "poisoned"})
    assert run(healthy) == 0
    cut = configured(tmp_path / "cut", {"fn": "poisoned", "first": 9, "last": 9})
    folder = Path(cut["output"])
    assert run(cut) == UNHEALTHY
    assert checkpoints(cut) == [1, 2]
    lines = metrics(cut)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss/value"] is None  # JSON has no NaN
    assert lines[-1]["loss/not_finite"] == lines[-1]["loss/skipped_updates"] == 1.0
    assert "loss/not_finite" not in lines[0]
    batch, said = read_dump(folder / "failed" / "step_3.pt")
    assert batch["group"].unique().tolist() == [8, 9, 10, 11]
    assert said["step"] == 3 and math.isnan(said["metrics"]["loss/value"])
    assert any("loss/value is nan" in reason for reason in said["reasons"])
    log = (folder / "log.txt").read_text()
    assert "stopping: step 3 is unhealthy" in log and "the newest checkpoint is of step 2" in log
    assert run(cut | {"loss": healthy["loss"]}, "runtime.allow_changed=settings") == 0
    assert weights_hash(cut, 4) == weights_hash(healthy, 4)
    kept = ("step", "loss/", "reward/", "data/", "guards/")
    told = [[{k: v for k, v in line.items() if k.startswith(kept)} for line in metrics(c)] for c in (cut, healthy)]
    assert told[0] == told[1]


def test_drift_is_borne_for_a_while_but_not_saved(tmp_path):
    """Entropies 2, 1.5, 1, 0.5: the third step is below 1.2, and the fourth is the second in a row."""
    config = configured(tmp_path, {"fn": "fading"}, guards={"min_entropy": 1.2, "patience": 2}, steps=6)
    assert run(config) == UNHEALTHY
    assert [line["guards/unhealthy"] for line in metrics(config)] == [0, 0, 1, 2]
    assert checkpoints(config) == [1, 2]
    assert read_dump(Path(config["output"]) / "failed" / "step_4.pt")[1]["reasons"] == [
        "loss/entropy is 0.5 (runtime.guards.min_entropy: 1.2)"
    ]


def test_drift_within_patience_at_the_end_is_saved(tmp_path):
    config = configured(tmp_path, {"fn": "fading"}, guards={"min_entropy": 1.2, "patience": 3})
    assert run(config) == 0
    assert checkpoints(config) == [1, 2, 4]


# ---- rolling back


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_rolling_back_goes_on_with_later_data(tmp_path, max_staleness):
    """What was trained and what waits is dropped in the journal, and the time of it was for nothing."""
    poison = {"fn": "poisoned", "first": 5, "last": 5}
    runtime = {"guards": {"action": "rollback"}, "log_samples": 16, "journal": True, "max_staleness": max_staleness}
    config = configured(tmp_path, poison, **runtime)
    assert run(config) == 0
    folder, lines = Path(config["output"]), metrics(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["guards/rollbacks"] for line in lines] == [0, 1, 1, 1]
    learned_from = [s for s in samples(config) if s["phase"] == "train"]
    trained = [{s["group"] for s in learned_from if s["step"] == step} for step in (1, 2, 3, 4)]
    later = 8 if max_staleness == 0 else 12  # what was under way is forgotten, too
    assert trained == [{0, 1, 2, 3}, *({later + 4 * i + j for j in range(4)} for i in range(3))]
    assert (folder / "failed" / "step_2.pt").exists()
    assert math.isfinite(lines[-1]["loss/value"])
    history = RunHistory(read_lines(folder / "journal.jsonl"))
    dropped = {group for group, life in history.groups.items() if life.dropped == "rolled back"}
    assert dropped == set(range(4, later)) and sorted(history.steps) == [1, 2, 3, 4]
    assert [life.state for life in history.groups.values()].count("trained") == 16
    redone = [line["goodput/redone"] * line["time/run"] for line in lines]
    assert redone[0] == 0.0 < redone[1] and redone[2] == pytest.approx(redone[1])


@pytest.mark.parametrize("cluster", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_rolling_back_takes_weights_and_optimizers_back(tmp_path, cluster):
    """A threshold that step 2 breaks: its update was applied, and must be undone, the value model's, too.

    The checkpoint is written again after a rollback, from what the processes hold.
    """
    healthy = configured(tmp_path / "healthy", {"fn": "fading"}, "ppo", steps=1)
    assert run(healthy) == 0
    guards = {"min_entropy": 1.7, "action": "rollback", "max_rollbacks": 2}
    config = configured(tmp_path / "guarded", {"fn": "fading"}, "ppo", guards=guards, cluster=cluster)
    assert run(config) == UNHEALTHY  # later data does not help: the entropy falls with the weights' version
    assert checkpoints(config) == [0, 1]
    assert weights_hash(config, 1) == weights_hash(healthy, 1)
    dumps = sorted(p.name for p in (Path(config["output"]) / "failed").iterdir())
    assert dumps == ["step_2.pt", "step_2_after_1_rollbacks.pt", "step_2_after_2_rollbacks.pt"]
    groups = [read_dump(Path(config["output"]) / "failed" / name)[0]["group"].unique().tolist() for name in dumps]
    assert groups == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert metrics(config)[-1]["guards/rollbacks"] == 2
    for model in ("trainer", "value"):
        here, there = learned(config, 1, model), learned(healthy, 1, model)
        assert here.keys() == there.keys() and here["progress"] == there["progress"]
        moments = [name for name in here if name.startswith("optimizer.") and isinstance(here[name], torch.Tensor)]
        assert moments and all(torch.equal(here[name], there[name]) for name in moments)
        assert all(torch.equal(here[name], there[name]) for name in here if name.startswith("model."))


def test_the_first_step_can_be_rolled_back(tmp_path):
    poison = {"fn": "poisoned", "first": 0, "last": 0}
    config = configured(tmp_path, poison, guards={"action": "rollback"}, save_every=4, steps=2)
    assert run_to_end(config)[-1]["guards/rollbacks"] == 1
