"""The memory that `coalign check` estimates is that of the largest step, and is compared with this machine's."""

import pytest

from coalign import devices, load_config
from coalign.launch.check import RowLengths
from coalign.launch.plan import prepare
from coalign.processes import host
from coalign_plan.checks import memory_table
from coalign_plan.checks.memory_table import estimate_models, list_demands, list_loads
from coalign_prepare.data_check import check_data
from tests.runs import settings, show_check
from tests.tiny import tiny_model_dir

LENGTHS = RowLengths(sequence=30, row=40)
GIB = 2**30


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("memory")


def configured(home, algorithm, trainer=None, **runtime):
    config = settings(home, algorithm, prompts_per_step=8, **runtime)
    for model in config["models"].values():
        model.pop("max_tokens_per_micro", None)
    config["models"]["trainer"] |= trainer or {}
    return load_config(config)


def count_micro(config, monkeypatch):
    """The tokens of a trainer's micro-batch that the estimate is of."""
    counted = {}

    def note(model, role, *_):
        counted[role] = model.max_tokens_per_micro
        return []

    monkeypatch.setattr(memory_table, "estimate_memory", note)
    estimate_models(prepare(config), lengths=LENGTHS)
    return counted["trainer"]


CASES = {
    "rows": ("sft", {}, {}, 8 * 40),
    "tokens": ("sft", {}, {"tokens_per_step": 100}, 100 + 40),
    "a limit": ("sft", {"max_tokens_per_micro": 64}, {}, 64),
    "no limit": ("sft", {"max_tokens_per_micro": None}, {}, 8 * 40),
    "updates": ("sft", {"updates_per_batch": 4}, {}, 8 * 40 // 4 + 30),
    "processes": ("sft", {"num_process": 2}, {"cluster": "ray"}, 8 * 40 // 2 + 30),
    "pairs": ("dpo", {"max_tokens_per_micro": 50}, {}, 50),
    "samples": ("grpo", {"share_prefix": False}, {}, 8 * 4 * (30 + 8)),
    "samples that share prompts": ("grpo", {}, {}, 8 * (30 + 4 * 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_of_a_micro_batch(home, monkeypatch, case):
    algorithm, trainer, runtime, expected = CASES[case]
    assert count_micro(configured(home, algorithm, trainer, **runtime), monkeypatch) == expected


def test_blocks_of_a_cpu_bound_it(home, monkeypatch, tmp_path):
    monkeypatch.setattr("coalign.backends.hf.fsdp.CPU_BLOCK", 4 * 64 * 100)  # 100 tokens of the widest matrix
    assert count_micro(configured(home, "sft"), monkeypatch) == 100
    monkeypatch.setattr("coalign.backends.hf.fsdp.CPU_BLOCK", 4)
    assert count_micro(configured(home, "dpo"), monkeypatch) == 40  # a pair is never cut


def test_the_lengths_are_those_of_the_rows(home):
    plan = prepare(configured(home, "dpo"))
    lengths = check_data(plan, [*plan.models.values()]).lengths
    assert lengths is not None and lengths.sequence < lengths.row <= 2 * lengths.sequence


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_check_says_whether_it_fits_this_machine(home, monkeypatch, algorithm):
    said = show_check(configured(home, algorithm))
    assert "\nhost memory: " in said and said.endswith("\nno problem found\n")
    monkeypatch.setattr(memory_table, "measure_memory", lambda kind: GIB // 4)
    said = show_check(configured(home, algorithm))
    assert "no problem found" not in said
    assert "warning: by this estimate the run does not fit this machine (host memory: " in said.split("\n")[-2]
    assert "243 MiB can be used" in said and "models.*.max_tokens_per_micro" in said


def test_a_run_of_short_rows_is_not_estimated_with_full_micro_batches(tmp_path):
    """16,384 tokens of this model would take gigabytes, and a step has a hundred."""
    tiny_model_dir(tmp_path / "model", hidden=512, layers=8, heads=8)
    config = configured(tmp_path, "sft")
    whole = estimate_models(prepare(config))["trainer"][0]
    [known] = estimate_models(prepare(config), lengths=LENGTHS)["trainer"]
    assert whole.activations > 2 * GIB and known.activations < GIB // 8
    assert known.buffers < whole.buffers and known.weights == whole.weights


def test_each_process_of_ray_has_its_own(home, monkeypatch):
    def count(cluster):
        plan = prepare(configured(home, "grpo", cluster=cluster))
        return memory_table._count_host(plan, estimate_models(plan, lengths=LENGTHS))

    assert count("ray") - count("local") > 600 * 2**20  # of another process, at least


def test_the_memory_of_an_accelerator(home, monkeypatch):
    monkeypatch.setattr(memory_table, "count_devices", lambda kind: 1)
    monkeypatch.setattr(memory_table, "measure_memory", lambda kind: {"cpu": 64 * GIB, "cuda": GIB // 2}[kind])
    plan = prepare(configured(home, "sft", {"num_gpu": "auto"}), devices=1)
    estimates = estimate_models(plan, lengths=LENGTHS)
    device, host = list_demands(plan, estimates, list_loads(plan, estimates))
    assert device.memory == "memory of a device (cuda)" and device.bytes > device.usable and host.bytes < host.usable


def test_the_memory_of_a_container(tmp_path, monkeypatch):
    total = devices.measure_memory("cpu")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert total <= devices.measure_memory("cpu")
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    assert devices.measure_memory("cpu") == GIB
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{GIB // 2}\n")
    assert devices.measure_memory("cpu") == GIB // 2
