"""The search of layouts: what it proposes fits and is accepted, and what it leaves out has a reason."""

from __future__ import annotations

from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.layouts.adapter import list_run_loads, pack_models
from coalign_plan.layouts.candidates import RejectedLayouts, apply_settings, find_nearest, list_settings
from coalign_plan.layouts.search import LayoutSearch, find_changes, list_divisions, search_layouts
from coalign_plan.memory import USABLE
from packages.plan.tests.models import describe_grpo, write_config

NODE = ClusterSpec.parse("1x8:H100")
CUTS = {"policy": ("tensor_parallel", "pipeline_parallel"), "trainer": ("tensor_parallel",), "reference": ()}


def search(run, cluster=NODE, refuse=lambda name, model: None, **options) -> LayoutSearch:
    options = {"objective": "seconds", "staleness": [0]} | options
    return search_layouts(run, cluster, Constants(), supported=CUTS.__getitem__, refuse=refuse, **options)


def test_what_is_found_fits_and_comes_best_first(tmp_path):
    found = search(describe_grpo(write_config(tmp_path)), staleness=[0, 1]).layouts
    seconds = [layout.prediction.seconds for layout in found]
    assert seconds == sorted(seconds) and len({layout.division for layout in found}) > 5
    for layout in found[:5]:
        loads = list_run_loads(layout.run, pack_models(layout.run), NODE)
        assert loads[0].peak <= USABLE * NODE.memory_bytes and layout.division.total <= 8
        together = any({"policy", "trainer"} <= {*group} for group in layout.division.groups)
        assert not (together and layout.staleness)  # they take turns, so neither can be ahead


def test_layouts_that_a_backend_refuses_are_left_out_with_its_words(tmp_path):
    def refuse(name, model):
        return "models.trainer.tensor_parallel: no" if name == "trainer" and model.tensor_parallel > 1 else None

    run = describe_grpo(write_config(tmp_path, num_hidden_layers=64))
    found = search(run, refuse=refuse)
    assert found.layouts and all(layout.run.config.models["trainer"].tensor_parallel == 1 for layout in found.layouts)


def test_models_that_no_device_holds_say_what_they_lack(tmp_path):
    run = describe_grpo(write_config(tmp_path, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126))
    found = search(run)
    needed, free, settings = found.rejected.smallest["policy"]
    assert not found.layouts and needed > free and settings["num_gpu"] <= 8
    assert found.rejected.counts["policy", "memory"] > 0


def test_the_fewest_gpu_hours_may_be_those_of_fewer_devices(tmp_path):
    run = describe_grpo(write_config(tmp_path))
    fast, cheap = (search(run, objective=objective).layouts[0] for objective in ("seconds", "gpu-hours"))
    assert cheap.gpu_hours <= fast.gpu_hours and cheap.prediction.seconds >= fast.prediction.seconds
    assert {division.total for division in list_divisions(run, NODE, "gpu-hours")} == {8, 4, 2, 1}


def test_no_cut_crosses_a_node(tmp_path):
    run, cluster = describe_grpo(write_config(tmp_path)), ClusterSpec.parse("4x4:H100")
    for name, supported in CUTS.items():
        for settings in list_settings(run, run.models[name], 16, cluster, supported):
            assert settings["tensor_parallel"] <= 4
            assert name != "policy" or settings["tensor_parallel"] * settings["pipeline_parallel"] <= 4


def test_layers_that_do_not_divide_leave_the_last_stage_fewer(tmp_path):
    run = describe_grpo(write_config(tmp_path, num_hidden_layers=30))
    trainer = run.config.models["trainer"].model_copy(update={"module": "megatron"})
    run = run.with_config(run.config.model_copy(update={"models": run.config.models | {"trainer": trainer}}))
    cuts = {
        settings["pipeline_parallel"]: settings["megatron.last_stage_layers"]
        for settings in list_settings(run, run.models["trainer"], 8, NODE, ("pipeline_parallel",))
    }
    assert cuts == {1: None, 2: None, 4: 6, 8: 2}
    assert apply_settings(trainer, {"megatron.last_stage_layers": 6}).megatron.last_stage_layers == 6


def test_the_nearest_layout_that_fits_changes_as_little_as_possible(tmp_path):
    run = describe_grpo(write_config(tmp_path))
    plain = run.config.models["trainer"].model_copy(update={"activation_checkpointing": None})
    run = run.with_config(run.config.model_copy(update={"models": run.config.models | {"trainer": plain}}))
    assert list_run_loads(run, pack_models(run), NODE)[0].turn == "trainer"
    changes = find_nearest(run, run.models["trainer"], NODE, 70 * 2**30, ("tensor_parallel",), lambda name, model: None)
    assert changes is not None and len(changes) == 1


def test_only_what_differs_is_to_be_set_and_what_like_would_take_along(tmp_path):
    run = describe_grpo(write_config(tmp_path))
    models = run.config.models | {"reference": run.config.models["reference"].model_copy(update={"like": "trainer"})}
    config = run.config.model_copy(update={"models": models})
    settings = {
        "runtime.colocation": [["reference", "policy", "trainer"]],
        "models.policy.vllm.gpu_memory_utilization": 0.8,
        "models.trainer.tensor_parallel": 2,
        "models.trainer.num_gpu": 8,
        "models.reference.tensor_parallel": 1,
    }
    assert [*find_changes(config, settings)] == [
        "models.policy.vllm.gpu_memory_utilization",
        "models.trainer.tensor_parallel",
        "models.reference.tensor_parallel",
    ]


def test_reasons_are_counted_and_the_nearest_kept():
    rejected = RejectedLayouts()
    rejected.add_too_large("trainer", 90.0, 70.0, {"tensor_parallel": 1})
    rejected.add_too_large("trainer", 75.0, 70.0, {"tensor_parallel": 2})
    assert rejected.counts["trainer", "memory"] == 2 and rejected.smallest["trainer"][2] == {"tensor_parallel": 2}
