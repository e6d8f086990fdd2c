"""How many nodes a run needs, and which it is refused."""

import pytest

from coalign.api import load_config
from coalign_jobs.cluster_size import ClusterSize, size_cluster
from packages.jobs.tests.conftest import refused_in_one_line, write


def size(directory, nodes=None, devices=None, algorithm="grpo", **sections):
    return size_cluster(load_config(write(directory, algorithm, **sections), planned=True), nodes, devices)


def model(gpus, **settings):
    return {"load": "own/model", "num_gpu": gpus, **settings}


EIGHT = {"tensor_parallel": 8, "module": "vllm"}
SHARED = {"runtime": {"colocation": [["policy", "trainer", "reference"]]}}
KL = {"loss": {"fn": "policy_gradient", "kl_coef": 0.1}}


@pytest.mark.parametrize(
    ("models", "sections", "asked", "found"),
    [
        ({"policy": model(8)}, SHARED, {}, (1, 8)),  # trainer and reference are like the policy
        ({"policy": model(4)}, SHARED, {}, (1, 4)),
        ({"policy": model(64)}, SHARED, {}, (8, 8)),
        ({"policy": model(64)}, SHARED, {"devices": 4}, (16, 4)),
        ({"policy": model(64)}, SHARED, {"nodes": 4}, (4, 16)),
        ({"policy": model(64)}, SHARED, {"nodes": 9, "devices": 8}, (9, 8)),
        ({"policy": model(8), "trainer": {"num_gpu": 4}}, {}, {}, (2, 8)),  # the reference does not run without a KL
        ({"policy": model(8), "trainer": {"num_gpu": 4}}, KL, {}, (2, 8)),
        ({"policy": model(8), "trainer": {"num_gpu": 8}}, KL, {}, (3, 8)),
        ({"policy": model(0)}, {}, {}, (1, 0)),
        ({"policy": model(0)}, {}, {"nodes": 3}, (3, 0)),
        ({"policy": {"load": "own/model"}}, {}, {"devices": 8}, (1, 8)),  # auto takes what is there
        ({"policy": {"load": "own/model"}}, {}, {"nodes": 2, "devices": 0}, (2, 0)),
    ],
)
def test_the_smallest_cluster_that_holds_the_run(here, models, sections, asked, found):
    assert size(here, **asked, models=models, **sections) == ClusterSize(*found, "GPU")


def test_replicas_that_stay_on_a_node_may_need_more_nodes(here):
    """Three engines of four GPUs on nodes of six: one each, although two nodes have the GPUs."""
    models = {"policy": model(12, tensor_parallel=4, module="vllm"), "trainer": model(0, tensor_parallel=1)}
    assert size(here, devices=6, models=models) == ClusterSize(3, 6, "GPU")


@pytest.mark.parametrize(
    ("models", "asked", "said"),
    [
        ({"policy": model(8)}, {"nodes": 1, "devices": 4}, "1 node(s) of 4 GPU: the models ask for"),
        ({"policy": model(8, **EIGHT), "trainer": model(0, tensor_parallel=1)}, {"devices": 4}, "have to be on one"),
        ({"policy": {"load": "own/model"}}, {}, "models.policy.num_gpu: is auto, so every device counts"),
    ],
)
def test_what_cannot_hold_the_run_is_refused(here, models, asked, said):
    with refused_in_one_line(said):
        size(here, **asked, models=models, **SHARED)


@pytest.mark.parametrize("kl", [0.0, 0.01])
@pytest.mark.parametrize("algorithm", ["dpo", "simpo", "kto", "ppo", "grpo", "rloo", "online_dpo"])
def test_it_counts_the_models_that_the_plan_starts(here, algorithm, kl):
    """A reference with devices of its own counts exactly where the recipe starts one."""
    from coalign.cluster.choice import plan_slots
    from coalign.cluster.placement.slots import list_slots
    from coalign.launch.plan import prepare
    from tests.tiny import tiny_model_dir

    name = "trainer" if algorithm in ("dpo", "simpo", "kto") else "policy"
    models = {name: {"load": str(tiny_model_dir(here / "tiny")), "num_gpu": 2}}
    sections = {} if name == "trainer" else {"reward": {"fn": "math"}, "runtime": {"samples_per_prompt": 2}}
    if algorithm in ("ppo", "rloo"):
        sections |= {"kl": {"fn": "FixedKL", "coef": kl}}
    elif algorithm == "grpo":
        sections |= {"loss": {"fn": "policy_gradient", "kl_coef": kl}}
    config = load_config(write(here, algorithm, models=models, **sections), planned=True)
    slots = list_slots(plan_slots(prepare(config).started, config.runtime.colocation))
    total = sum(slot.devices for slot in slots)
    assert size_cluster(config, devices=1).nodes == total
