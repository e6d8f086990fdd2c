"""What ZeRO could get wrong beyond a training step (test_training): its own checkpoints, its shards, two engines."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coalign.data.batch import Batch
from coalign.memory import PARTS
from tests.backends.batches import rollout
from tests.conformance.backends import DEEPSPEED, Backend, build, exported, on_ranks, same, zero
from tests.golden.curves import configuration
from tests.runs import metrics, run
from tests.tiny import tiny_model_dir

pytestmark = [DEEPSPEED, pytest.mark.backends]
STAGES = (1, 2, 3)
WITH_ALL_SHARDS = [*(pytest.param(stage, marks=pytest.mark.backends) for stage in (1, 2)), 3]


def backend(stage: int, ranks: int = 1, **config) -> Backend:
    return Backend(f"deepspeed-{stage}", "deepspeed", ranks, zero(stage) | config)


@pytest.fixture
def path(tmp_path):
    return str(tiny_model_dir(tmp_path / "model"))


@pytest.fixture
def start(path):
    """Modules that are closed at the end, as a run does."""
    modules = []

    def build_one(stage, **config):
        modules.append(build(backend(stage), path, **config))
        return modules[-1]

    yield build_one
    for module in modules:
        module.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_goes_on_bit_for_bit_in_place_and_afresh(start, tmp_path, stage):
    batches = [rollout((5, 9, 7), 3, seed=i) for i in range(2)]
    straight = start(stage)
    straight.train_step(batches[0])
    straight.save(tmp_path / "checkpoint")
    straight.train_step(batches[1])
    ended = exported(straight)
    for resumed in (straight, start(stage, init="random")):
        resumed.load(tmp_path / "checkpoint")
        assert (resumed.version, resumed.updates) == (1, 1)
        resumed.train_step(batches[1])
        assert same(ended, exported(resumed))


def test_a_bucket_is_no_larger_than_the_gradients(start):
    module = start(2)
    assert module.engine.zero_reduce_bucket_size() == sum(p.numel() for p in module.model.parameters())


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_checkpoint_runs_no_code(start, tmp_path):
    module = start(1)
    module.save(tmp_path / "checkpoint")
    for file in (tmp_path / "checkpoint").rglob("*.pt"):
        torch.save(torch.load(file, weights_only=False) | {"x": Runs(str(tmp_path / "was run"))}, file)
    with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL io\.open"):
        module.load(tmp_path / "checkpoint")
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("stage", WITH_ALL_SHARDS)
def test_an_update_that_is_not_finite_touches_nothing(start, stage):
    batch = rollout((5, 9, 7), 3)
    trainer, other = start(stage), start(stage)
    for each in (trainer, other):
        each.train_step(batch)
    stats = trainer.train_step(batch.with_(advantages=batch["advantages"] * float("nan")))
    assert stats["loss/not_finite"].value == 1
    assert same(exported(trainer), exported(other))
    for each in (trainer, other):
        each.train_step(batch)
    assert same(exported(trainer), exported(other))


def test_a_checkpoint_of_another_stage_is_refused_with_both(start, tmp_path):
    start(1).save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"deepspeed\.stage is 1 there and 2 here"):
        start(2).load(tmp_path / "checkpoint")
    with pytest.raises(FileNotFoundError, match=r"no layout\.json"):
        start(2).load(tmp_path / "nowhere")


def test_a_value_model_trains_in_the_same_process(start, path):
    batch = rollout((5, 9, 7), 3)
    loss = {"loss": {"fn": "value"}, "head": "value", "head_init": "zero"}
    trainer, value, alone = start(2), start(3, **loss), build(Backend("alone", "fsdp"), path, **loss)
    for _ in range(3):
        trainer.train_step(batch)
        losses = [each.train_step(batch)["loss/value"].value for each in (value, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(value.forward_step(batch)["values"], alone.forward_step(batch)["values"])


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_train_as_they_do_without_deepspeed(start, path, tmp_path, stage):
    batch, adapters = rollout((5, 9, 7), 3), {"lora": {"rank": 4}}
    trainer, plain = start(stage, **adapters), build(Backend("plain", "fsdp"), path, **adapters)
    base = plain.forward_step(batch)["ref_logprobs"]
    for each in (trainer, plain):
        each.train_step(batch)
        each.train_step(batch)
        each.save_adapter(tmp_path / str(each is plain))
    expected = exported(plain)
    for name, tensor in trainer.export_weights():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trainer.forward_step(batch, base=True)["ref_logprobs"], base)
    trainer.train_step(batch)


def test_activations_computed_again_give_the_same_gradient(start):
    batch = rollout((5, 9, 7), 3)
    for stage in (2, 3):
        plain, again = start(stage), start(stage, activation_checkpointing="full")
        norms = [each.train_step(batch)["loss/grad_norm"].value for each in (plain, again)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize(
    "offload",
    [
        pytest.param({"offload_optimizer": True}, marks=pytest.mark.backends),
        {"offload_optimizer": True, "offload_parameters": True},
    ],
)
def test_offloading_changes_no_number(start, offload):
    batch = rollout((5, 9, 7), 3)
    whole, away = start(3), start(3, deepspeed=zero(3)["deepspeed"] | offload)
    for each in (whole, away):
        each.train_step(batch)
        each.train_step(batch)
    for (name, a), (_, b) in zip(whole.export_weights(), away.export_weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", WITH_ALL_SHARDS)
def test_what_leaves_the_device_between_two_calls_comes_back_as_it_was(start, stage):
    batch = rollout((5, 9, 7), 3)
    stays, moves = start(stage), start(stage)
    for _ in range(3):
        assert stays.train_step(batch).keys() == moves.train_step(batch).keys()
        held = moves.measure_memory()
        moves.move("host", PARTS)
        assert not any(moves.measure_memory().values())
        moves.move("device", PARTS)
        assert moves.measure_memory() == held
        assert held["optimizer"] >= 3 * held["weights"]  # moments, and weights to step on
    assert same(exported(stays), exported(moves))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"name": "muon"}}, "models.model.optimizer.name is `muon`"),
        ({"ema": {"decay": 0.9}}, "models.model.ema"),
        ({"compile": True}, "models.model.compile: not supported under ZeRO"),
        ({"dtype": "bfloat16"}, "use `dtype: float32` with `compute_dtype: bfloat16`"),
        ({"deepspeed": {"zero": {"reduce_bucket": 1}}}, "did you mean 'reduce_bucket_size'"),
        ({"deepspeed": {"zero": {"stage": 1}}}, "is set by Coalign: it is `deepspeed.stage`"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(path, config, message):
    with pytest.raises(ValueError, match=message):
        build(backend(2), path, **config).close()


def test_grpo_learns_the_curve_of_fsdp(tmp_path):
    """The first steps, on the rollouts that the same seed and weights give."""
    curves = []
    for module in ({"module": "fsdp"}, {"module": "deepspeed", "deepspeed": {"stage": 3}}):
        (folder := tmp_path / module["module"]).mkdir()
        config = configuration("grpo", folder)
        config["runtime"]["steps"] = 3
        config["models"]["trainer"] |= module
        run(config)
        curves.append(metrics(config))
    for fsdp, deepspeed in zip(*curves, strict=True):
        for key in ("loss/value", "loss/grad_norm", "reward/mean", "tokens/response"):
            assert deepspeed[key] == pytest.approx(fsdp[key], rel=1e-4, abs=1e-6), key


# ---- on two ranks


def _two(rank: int, port: int, path: str, folder: Path, batches: list[Batch]) -> dict:
    """Every stage, straight and resumed, idle on one rank, and a frozen model whose weights the ranks share."""
    result, open_ = {}, []
    for stage in STAGES:
        trainer = build(backend(stage, 2), path, rank=rank, port=port)
        open_.append(trainer)
        for i, batch in enumerate(batches):
            trainer.train_step(batch.split(2, keep="group")[rank])
            if i == 1:
                trainer.save(folder / f"checkpoint-{stage}")
                trainer.save_hf(folder / f"hf-{stage}")
                middle = exported(trainer)
        ended = exported(trainer)
        trainer.load(folder / f"checkpoint-{stage}")
        for batch in batches[2:]:
            trainer.train_step(batch.split(2, keep="group")[rank])
        resumed = exported(trainer)
        stats = trainer.train_step(batches[0] if rank == 0 else batches[0].select([]))
        result[stage] = {"middle": middle, "ended": ended, "resumed": resumed, "alone": stats["loss/grad_norm"].value}
    frozen = build(backend(3, 2, frozen=True), path, rank=rank, port=port)
    own = batches[0].split(2, keep="group")[rank]
    result["scored"] = frozen.forward_step(own)["ref_logprobs"]
    result["held"] = sum(tensor.nbytes for tensor in frozen.tensors("weights"))
    for module in [*open_, frozen]:
        module.close()
    return result


@pytest.mark.backends
def test_two_ranks(tmp_path, subtests):
    """One start of the processes, so one test."""
    path, batches = str(tiny_model_dir(tmp_path / "model")), [rollout((5, 9, 7), 3, seed=i) for i in range(4)]
    first, second = ranks = on_ranks(2, _two, tmp_path, path, tmp_path, batches)
    alone = build(Backend("alone", "fsdp"), path)
    for batch in batches:
        alone.train_step(batch)
    for stage in STAGES:
        with subtests.test(f"stage {stage} resumes bit for bit and writes what transformers reads"):
            assert same(first[stage]["ended"], first[stage]["resumed"])
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{stage}", dtype=torch.float32)
            assert same(first[stage]["middle"], dict(loaded.named_parameters()))
        with subtests.test(f"stage {stage} learns what one process learns"):
            for name, tensor in alone.export_weights():
                torch.testing.assert_close(tensor.detach(), first[stage]["ended"][name], rtol=1e-3, atol=1e-4)
            assert first[stage]["alone"] == second[stage]["alone"] > 0
    with subtests.test("one process refuses what two wrote"):
        trainer = build(backend(1), path)
        with pytest.raises(ValueError, match="processes is 2 there and 1 here"):
            trainer.load(tmp_path / "checkpoint-1")
        trainer.close()
    with subtests.test("a frozen model is shared at stage 3"):
        frozen = build(Backend("alone", "fsdp"), path, frozen=True)
        scored = torch.cat([rank["scored"] for rank in ranks])
        torch.testing.assert_close(scored, frozen.forward_step(batches[0])["ref_logprobs"])
        whole = sum(p.nbytes for p in frozen.tensors("weights"))
        assert all(rank["held"] < 0.6 * whole for rank in ranks)
        assert json.loads((tmp_path / "checkpoint-3" / "layout.json").read_text())["processes"] == 2
