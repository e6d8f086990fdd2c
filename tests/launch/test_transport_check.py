"""A transport of weights that cannot serve the placement is refused before anything starts."""

import pytest

from coalign import load_config
from coalign.launch.plan import prepare
from tests.runs import settings

TOGETHER = "runtime.colocation=[[policy, trainer]]"
ONE_EACH = ["models.trainer.num_gpu=1", "models.policy.num_gpu=1"]


def configured(directory, *overrides):
    return load_config(settings(directory, "grpo"), overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sync=broadcast"], r"sync\.transport: `broadcast` is for models in processes of their own"),
        (
            ["sync=broadcast", "runtime.cluster=ray", TOGETHER],
            r"`broadcast` needs models\.trainer and models\.policy at once, and in one group of runtime\.colocation",
        ),
        (
            ["sync=cuda_ipc", "runtime.cluster=ray"],
            r"`cuda_ipc` needs models\.trainer and models\.policy on one GPU; they have 0 and 0, in no common group",
        ),
        (["sync=cuda_ipc", "runtime.cluster=ray", *ONE_EACH], "they have 1 and 1, in no common group"),
        (
            ["sync=cuda_ipc", "runtime.cluster=ray", *ONE_EACH, "models.trainer.num_gpu=2", TOGETHER],
            "they have 2 and 1, in one group",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        prepare(configured(tmp_path, *overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["sync=broadcast", "runtime.cluster=ray"],
        ["sync=disk", TOGETHER],
        ["sync=shared_memory"],
        ["sync=cuda_ipc", "runtime.cluster=ray", *ONE_EACH, TOGETHER],
    ],
)
def test_what_can_work_is_not(tmp_path, overrides):
    prepare(configured(tmp_path, *overrides))
