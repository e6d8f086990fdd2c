"""Whatever a backend's setup refuses before it reads weights, `coalign check` refuses in the same words."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest

from coalign import cli, load_config
from coalign.cluster.choice import start_cluster
from coalign.cluster.ray import space
from coalign.config.functions import resolve_class
from coalign.config.schema import TrackerConfig
from coalign.launch.check import check
from coalign.report import trackers
from coalign.report.display import Display
from coalign.roles import Context
from packages.megatron.tests.weight_families.checkpoints import native
from tests.runs import settings
from tests.tiny import tiny_model_dir, tiny_tokenizer

NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="coalign[vllm] is not installed")
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="coalign[deepspeed] is not installed")
NEEDS_MEGATRON = pytest.mark.skipif(find_spec("megatron") is None, reason="coalign[megatron] is not installed")
EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def configured(directory, model, changes):
    config = settings(directory, "grpo" if model == "policy" else "sft")
    config["models"][model] |= changes
    return load_config(config)


def refusals(config, model):
    """What setup says, and what `coalign check` does."""
    own = config.models[model]
    module = resolve_class(own.module, "coalign.backends")(own, Context(model=model))
    said = []
    for refuse in (module.setup, lambda: check(config, Display())):
        with pytest.raises((ValueError, NotImplementedError)) as refused:
            refuse()
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "trainer",
            {"module": "megatron", "lora": {"dora": True}},
            "models.trainer.lora.dora is True: the norms of whole",
        ),
        ("trainer", {"module": "megatron", "ema": {}}, "models.trainer.ema: no average is kept beside its optimizer"),
        (
            "trainer",
            {"module": "megatron", "megatron": {"transformer_engine": True}},
            "models.trainer.megatron.transformer_engine is true: it computes on GPUs only",
        ),
        (
            "trainer",
            {"module": "megatron", "megatron": {"config": {"fp8": "hybrid"}}},
            "models.trainer.megatron.config.fp8: it is `fp8`",
        ),
        ("trainer", {"module": "megatron", "megatron": {"swiglu": False}}, "models.trainer: megatron.swiglu is False"),
        pytest.param(
            "trainer",
            {"module": "megatron", "megatron": {"config": {"moe_aux_los_coeff": 0.1}}},
            "models.trainer: megatron.config.moe_aux_los_coeff is no field of megatron-core's",
            marks=NEEDS_MEGATRON,
        ),
        ("trainer", {"module": "deepspeed", "optimizer": {"name": "muon"}}, "models.trainer.optimizer.name is `muon`"),
        ("trainer", {"module": "deepspeed", "compile": True}, "models.trainer.compile: not supported under ZeRO"),
        (
            "trainer",
            {"module": "deepspeed", "deepspeed": {"zero": {"stage": 1}}},
            "models.trainer.deepspeed.zero.stage is set by Coalign: it is `deepspeed.stage`",
        ),
        pytest.param(
            "trainer",
            {"module": "deepspeed", "deepspeed": {"zero": {"reduce_bucket": 1}}},
            "models.trainer.deepspeed.zero.reduce_bucket is no key of DeepSpeed's",
            marks=NEEDS_DEEPSPEED,
        ),
        *(
            ("trainer", {"reduction": "exact", **changes}, f"models.trainer.{message}")
            for changes, message in [
                ({"module": "megatron"}, "reduction is exact: module `megatron` adds gradients in an order that"),
                ({"module": "deepspeed"}, "reduction is exact: module `deepspeed` adds gradients in an order that"),
                ({"tensor_parallel": 2}, "tensor_parallel is 2: with `reduction: exact` it must be 1, since"),
                ({"context_parallel": 2}, "context_parallel is 2: with `reduction: exact` it must be 1, since"),
                ({"expert_parallel": 2}, "expert_parallel is 2: with `reduction: exact` it must be 1, since"),
                ({"dp_replicate": 2}, "dp_replicate is 2: with `reduction: exact` it must be 1, since"),
                ({"rows": "single"}, "rows is single: with `reduction: exact` it must be auto or packed or padded"),
                ({"optimizer": {"name": "muon"}}, "optimizer.name is muon: with `reduction: exact` it must be adamw"),
            ]
        ),
        ("trainer", {"fp8": True, "compute_dtype": "bfloat16"}, "models.trainer.fp8 needs a GPU that multiplies 8-bit"),
        (
            "policy",
            {"module": "vllm", "vllm": {"speculative_config": {"num_speculative_tokens": 2}}},
            "models.policy.vllm.speculative_config is set by Coalign: Coalign draws the tokens",
        ),
        ("policy", {"module": "vllm", "pipeline_parallel": 2}, "models.policy.pipeline_parallel is 2: on CPU vLLM's"),
        pytest.param(
            "policy",
            {"module": "vllm", "vllm": {"max_num_seq": 2}},
            "models.policy.vllm.max_num_seq is no engine argument of vLLM",
            marks=[NEEDS_VLLM, pytest.mark.backends],
        ),
        pytest.param(
            "policy",
            {"module": "vllm"},
            "models.policy.load: vLLM",  # heads of 8 numbers
            marks=[NEEDS_VLLM, pytest.mark.backends],
        ),
    ],
)
def test_check_refuses_settings_as_setup_does(tmp_path, model, changes, message):
    said = refusals(configured(tmp_path, model, changes), model)
    assert said[0] == said[1] and said[0].startswith(message)


@pytest.mark.parametrize(
    ("model", "module", "family", "message"),
    [
        (
            "trainer",
            "fsdp",
            EXPERTS | {"output_router_logits": True},
            "`output_router_logits: true`.*router_aux_loss_coef",
        ),
        (
            "policy",
            "native",
            {"family": "falcon"},
            "cannot run the model type `falcon`: .*; use `module: transformers`",
        ),
        ("policy", "native", {"family": "gptj"}, "cannot run the model type `gptj`: .*; use `module: transformers`"),
        ("policy", "native", {"family": "nemotron"}, "cannot run NemotronAttention: .*; use `module: transformers`"),
        ("trainer", "megatron", {"family": "nemotron"}, "no family of Megatron models is known"),
    ],
)
def test_check_refuses_architectures_as_setup_does(tmp_path, model, module, family, message):
    if module == "megatron":
        pytest.importorskip("megatron.core")
    directory = tmp_path / "refused"
    if family["family"] == "falcon":
        tiny_tokenizer(directory)
        native("falcon_7b").save_pretrained(directory)
    else:
        tiny_model_dir(directory, **family)
    config = configured(tmp_path, model, {"module": module, "load": str(directory)})
    for said in refusals(config, model):
        assert re.search(message, said), said


@pytest.mark.parametrize("family", [{"family": "gpt2"}, {"family": "opt", "word_embed_proj_dim": 32}, EXPERTS])
def test_check_finds_no_problem_where_there_is_none(tmp_path, capsys, family):
    directory = tiny_model_dir(tmp_path / "family", **family)
    check(configured(tmp_path, "trainer", {"load": str(directory)}), Display())
    check(configured(tmp_path, "policy", {"load": str(directory)}), Display())
    assert capsys.readouterr().out.count("no problem found") == 2


def test_a_tracker_that_is_missing_is_named(tmp_path, monkeypatch):
    config = configured(tmp_path, "trainer", {})
    config = config.model_copy(
        update={"runtime": config.runtime.model_copy(update={"trackers": [TrackerConfig(name="mlflow")]})}
    )
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"runtime\.trackers has 'mlflow', .*pip install 'coalign\[mlflow\]'"):
        check(config, Display())


def test_ray_that_is_missing_is_named(tmp_path, monkeypatch):
    def find_none(name):
        raise PackageNotFoundError(name)

    config = configured(tmp_path, "trainer", {})
    runtime = config.runtime.model_copy(update={"cluster": "ray"})
    monkeypatch.setattr(space, "version", find_none)
    for start in (lambda one: check(one, Display()), start_cluster):
        with pytest.raises(ImportError, match=r"runtime\.cluster: .*pip install 'coalign\[ray\]'$") as error:
            start(config.model_copy(update={"runtime": runtime}))
        assert not isinstance(error.value, ModuleNotFoundError)  # which the command line shows with a traceback


@pytest.mark.parametrize("error", [ImportError, NotImplementedError, ValueError])
def test_the_command_line_shows_one_message(monkeypatch, capsys, error):
    def app(**_):
        raise error("models.trainer.lora: no")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2 and capsys.readouterr().err == "error: models.trainer.lora: no\n"


def test_the_command_line_shows_one_message_of_a_worker_that_refuses(tmp_path, monkeypatch, capsys):
    from coalign.launch.run import train

    config = configured(tmp_path, "trainer", {"fp8": True, "compute_dtype": "bfloat16"})
    monkeypatch.setattr(cli, "app", lambda **_: train(config, Display()))
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1].startswith("error: models.trainer.fp8 needs a GPU") and "Traceback" not in shown
