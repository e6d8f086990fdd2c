"""The module in one process: heads, checkpoints, exports, and what it refuses. Its numbers are those of FSDP's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from coalign.config.schema import ModelConfig
from coalign.data.templates import TRAINING_TEMPLATES
from coalign.roles import Context
from coalign_megatron.backend.module import MegatronModule, _save_config
from tests.backends.batches import rollout
from tests.conformance.backends import Backend, build, exported
from tests.tiny import tiny_model_dir, tiny_reward_model_dir

pytest.importorskip("megatron.core")

STEADY = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}  # rounding does not make whole steps


OPEN = []


def made(path: Path, module: str = "megatron", **config):
    OPEN.append(build(Backend(module, module, config={"max_tokens_per_micro": 40}), str(path), **config))
    return OPEN[-1]


@pytest.fixture(autouse=True)
def closed():
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": tiny_model_dir(folder / "tied"),
        "scores": tiny_reward_model_dir(folder / "scores", tied=False),
        "moe": tiny_model_dir(folder / "moe", family="mixtral", tied=False, num_local_experts=4),
    }


def both(path, batch, **config):
    """What FSDP's module and this one compute before and after a step, and their statistics."""
    for module in ("fsdp", "megatron"):
        each = made(path, module, optimizer=STEADY, **config)
        before = each.forward_step(batch)
        stats = each.train_step(batch)
        yield before, {name: stat.value for name, stat in stats.items()}, exported(each)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_head_of_one_row_scores_and_learns_as_fsdps_does(paths, head):
    batch = rollout((5, 9, 12), 2)
    batch = batch.with_(values=batch["returns"] * 0.5, preference=torch.tensor([1.0, 0.0] * 3))
    loss = {"value": {"fn": "value"}, "reward": {"fn": "bradley_terry"}}[head]
    (before, stats, after), (own, told, left) = both(paths["scores"], batch, head=head, loss=loss)
    for name in before:
        torch.testing.assert_close(own[name], before[name], rtol=1e-5, atol=1e-6)
    assert told == pytest.approx(stats, rel=1e-4, abs=1e-6)
    assert left.keys() == after.keys()
    assert "score.weight" in left
    for name, tensor in after.items():
        torch.testing.assert_close(left[name], tensor, rtol=1e-4, atol=1e-5)


def test_random_weights_are_those_that_any_backend_draws(paths):
    first, second = (exported(made(paths["moe"], module, init="random")) for module in ("fsdp", "megatron"))
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_loaded_checkpoint_goes_on_bit_for_bit(paths, tmp_path, compute):
    batches, config = [rollout((5, 9, 7), 3, seed=i) for i in range(3)], {"compute_dtype": compute}
    one = made(paths["tied"], optimizer=STEADY, **config)
    for batch in batches[:2]:
        one.train_step(batch)
    one.save(tmp_path / "checkpoint")
    other = made(paths["tied"], optimizer=STEADY, init="random", **config)
    other.load(tmp_path / "checkpoint")
    assert other.progress == one.progress
    for module in (one, other):
        module.train_step(batches[2])
        module.train_step(batches[0])
    exact, again = one.optimizer.collect_exact(), other.optimizer.collect_exact()
    assert all(torch.equal(again[name], tensor) for name, tensor in exact.items())


@pytest.mark.parametrize(("name", "head"), [("tied", "lm"), ("moe", "lm"), ("scores", "reward")])
def test_what_it_writes_transformers_reads(paths, tmp_path, name, head):
    module = made(paths[name], head=head, optimizer=STEADY)
    if head == "lm":
        module.train_step(rollout((5, 9), 2))
    module.save_hf(tmp_path / "hf")
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model, info = auto.from_pretrained(tmp_path / "hf", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    there = dict(model.named_parameters())
    assert all(torch.equal(there[key], tensor) for key, tensor in exported(module).items())
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_a_teacher_tells_what_fsdps_teacher_does(paths):
    batch = rollout((5, 9), 2)
    first, second = (
        made(paths["tied"], module, frozen=True, candidates=5).top_logprobs(batch) for module in ("fsdp", "megatron")
    )
    assert torch.equal(first["candidates"], second["candidates"])
    torch.testing.assert_close(first["teacher_logprobs"], second["teacher_logprobs"], rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(paths):
    module, batch = made(paths["tied"], optimizer=STEADY), rollout((5, 9), 2)
    before = exported(module)
    stats = module.train_step(batch.with_(advantages=batch["advantages"] * float("inf")))
    assert stats["loss/not_finite"].value == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in exported(module).items())
    module.train_step(batch)
    assert all(tensor.isfinite().all() for tensor in exported(module).values())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"ema": {"decay": 0.5}}, "models.model.ema"),
        ({"optimizer": {"name": "muon"}}, "optimizer.name is `muon`"),
        ({"megatron": {"swiglu": False}}, r"megatron.swiglu is False; the model in .* has True"),
        ({"megatron": {"position_embedding_type": "alibi"}}, "position_embedding_type is alibi; .* has rope"),
        ({"megatron": {"transformer_engine": True}}, "transformer_engine is true: it computes on GPUs only"),
        ({"fp8": True, "compute_dtype": "bfloat16"}, "fp8 needs a GPU that multiplies 8-bit floats"),
        ({"megatron": {"config": {"moe_input_jiter_eps": 0.1}}}, "did you mean `?'?moe_input_jitter_eps"),
        ({"megatron": {"config": {"tensor_model_parallel_size": 2}}}, "it is `tensor_parallel`"),
        ({"megatron": {"config": {"add_qkv_bias": False}}}, "config.json of the model says it"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_it_cannot_do_is_refused_by_the_key(paths, config, said):
    with pytest.raises(ValueError, match=said):
        made(paths["tied"], **config)


def test_experts_whose_gradients_would_not_be_summed_are_refused(paths):
    sizes = {"tensor_parallel": 2, "num_process": 2, "megatron": {"expert_tensor_parallel": 1}}
    config = ModelConfig(module="megatron", load=str(paths["moe"]), **sizes)
    with pytest.raises(ValueError, match=r"models\.model\.megatron\.expert_tensor_parallel is 1: without `expert_par"):
        MegatronModule.check_architecture(config, "model")
    MegatronModule.check_architecture(config.model_copy(update={"expert_parallel": 2}), "model")


def test_a_head_that_is_not_there_is_refused(paths):
    with pytest.raises(ValueError, match=r"lacks \['score.weight'\].*head_init: zero"):
        made(paths["tied"], head="value")
    module = made(paths["tied"], head="value", head_init="zero", loss={"fn": "value"})
    assert not module.forward_step(rollout((5,), 2))["values"].any()


def test_a_tensor_that_is_missing_or_too_many_is_named(paths, tmp_path):
    folder = tiny_model_dir(tmp_path / "model", tied=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ValueError, match=r"models.model: .*missing \['model.layers.2"):
        made(folder)
    assert not torch.distributed.is_initialized()  # a model that was not built leaves nothing behind


def test_there_is_no_checkpoint(paths, tmp_path):
    module = made(paths["tied"])
    with pytest.raises(FileNotFoundError, match="holds no checkpoint of a Megatron model"):
        module.load(tmp_path)


def test_an_export_has_the_template_of_the_run(tmp_path):
    base = tiny_model_dir(tmp_path / "base", layers=1)
    _save_config(ModelConfig(load=str(base)), Context(chat_template="qwen3-training"), tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TRAINING_TEMPLATES["qwen3-training"].read_text()
