"""From a configuration to the job that is predicted."""

import pytest

from coalign.cluster.worker import find_module_class
from coalign.config.errors import ConfigError
from coalign.config.functions import list_classes
from coalign.config.schema import ModelConfig, RunConfig
from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.layouts.adapter import build_job, is_one_group, pack_models, read_run
from coalign_plan.prediction import predict_step
from packages.plan.tests.models import describe_grpo, write_config

NODE = ClusterSpec.parse("1x8:H100")


def test_the_job_of_grpo_has_what_the_configuration_says(tmp_path):
    run = describe_grpo(write_config(tmp_path), max_staleness=0)
    job = build_job(run, pack_models(run), NODE)
    assert (job.prompts, job.samples, job.max_staleness, job.shares_prompts) == (64, 8, 0, True)
    works = {work.name: work for work in job.models}
    assert [work.role for work in works.values()] == ["rollout", "trainer", "scorer"]
    assert {work.group for work in works.values()} == {"policy+trainer+reference"}
    assert works["policy"].layout.data == 8 and works["trainer"].layout.sharding == "weights"
    assert works["reference"].layout.sharding == "none"  # frozen and uncut: each process has the whole model
    assert all(work.is_moved for work in works.values()) and works["trainer"].recompute == "full"
    assert predict_step(job, NODE, Constants()).seconds > 0


def test_more_updates_and_older_samples_need_the_old_log_probs(tmp_path):
    run = describe_grpo(write_config(tmp_path))
    several = run.config.models["trainer"].model_copy(update={"updates_per_batch": 4})
    changed = run.with_config(run.config.model_copy(update={"models": run.config.models | {"trainer": several}}))
    names = [[w.name for w in build_job(each, pack_models(each), NODE).models] for each in (run, changed)]
    assert set(names[1]) - set(names[0]) == {"trainer, old log-probs"}
    assert build_job(changed, pack_models(changed), NODE).mini_batches == 4
    stale = build_job(run, pack_models(run), NODE, staleness=2)
    assert stale.max_staleness == 2 and "trainer, old log-probs" in [work.name for work in stale.models]


def test_data_sets_have_no_sampler_and_comparisons_two_sequences_a_row(tmp_path):
    trainer = ModelConfig(load=write_config(tmp_path), num_gpu=8)
    config = RunConfig(algorithm="dpo", models={"trainer": trainer})
    for kind, samples in (("conversations", 1), ("preferences", 2)):
        run = read_run(config, {"trainer": "trainer"}, kind, {})
        job = build_job(run, pack_models(run), NODE)
        assert job.samples == samples and not run.generates and "rows of 1,024 tokens" in run.assumes[0]
        assert predict_step(job, NODE, Constants()).rollouts is None


def test_a_reference_over_the_trainers_weights_computes_on_its_devices(tmp_path):
    load = write_config(tmp_path)
    models = {
        "trainer": ModelConfig(load=load, num_gpu=8, lora={}),  # pyright: ignore[reportArgumentType]
        "reference": ModelConfig(load=load, num_gpu=8, frozen=True),
    }
    roles = {"trainer": "trainer", "reference": "scorer"}
    run = read_run(RunConfig(algorithm="dpo", models=models), roles, "preferences", {"reference": "trainer"})  # pyright: ignore[reportArgumentType]
    assert [*run.started] == ["trainer"]
    trainer, reference = build_job(run, pack_models(run), NODE).models
    assert reference.group == trainer.group and reference.layout == trainer.layout and trainer.lora_rank == 16


def test_a_model_without_a_readable_configuration_is_named(tmp_path):
    load = write_config(tmp_path, num_hidden_layers=None)
    config = RunConfig(algorithm="sft", models={"trainer": ModelConfig(load=load)})
    with pytest.raises(ConfigError, match=r"models\.trainer\.load: .*num_hidden_layers"):
        read_run(config, {"trainer": "trainer"}, "conversations", {})


@pytest.mark.parametrize("module", ["fsdp", "deepspeed", "megatron", "native", "vllm", "transformers"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("changes", [{}, {"tensor_parallel": 2}, {"expert_parallel": 2}, {"dp_replicate": 2}])
def test_groups_are_those_of_the_backends(module, frozen, changes):
    model = ModelConfig(module=module, frozen=frozen, num_gpu=4, **changes)
    backend = find_module_class(model)
    if not {*changes} <= {*backend.parallel}:
        return  # refused before anybody asks
    role = "trainer" if backend.spmd and not frozen else "scorer" if backend.spmd else "rollout"
    assert module in list_classes("coalign.backends") and is_one_group(model, role) == backend.one_group(model)
