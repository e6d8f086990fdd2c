"""Which settings results depend on, as the marks of the schema say."""

from pathlib import Path

import pytest

from coalign.config.introspect import _is_result_relevant
from coalign.config.schema import RewardConfig, RunConfig
from coalign.files import hash_file
from coalign_serve import resumable
from coalign_serve.config.stages import GenerateConfig, SelectConfig
from tests import digits

WITHOUT_EFFECT = [
    *("output", "runtime.cluster", "runtime.ray_address", "runtime.timeline_every", "runtime.profile", "data.cache"),
    *("runtime.profile.steps.0", "runtime.stall", "runtime.device_memory", "models.trainer.threads", "sync.transport"),
]
OTHERS = [
    *("seed", "runtime.steps", "runtime.eval_sampling.temperature", "sync.every", "models.trainer.optimizer.betas.1"),
    *("models.trainer.native.max_sequences", "data.train.0.path", "models.trainer.vllm.output", "nothing.of.the.kind"),
    *("reward.0.keep", "loss.threads"),  # arguments of functions, whatever they are called
]


@pytest.mark.parametrize(("key", "relevant"), [(key, key in OTHERS) for key in WITHOUT_EFFECT + OTHERS])
def test_settings_that_leave_results_as_they_are(key, relevant):
    parts = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    assert _is_result_relevant(parts) is relevant


def test_the_mark_of_a_section_holds_for_all_of_it():
    assert not _is_result_relevant(("native", "kv_tokens"), GenerateConfig)


def test_settings_by_their_key(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    config = SelectConfig(keep="best", data=[str(tmp_path / "a.jsonl")])
    found = resumable.fingerprint_settings(config)
    assert found["keep"] == "best" and found["data[0]"] == resumable.fingerprint_path(tmp_path / "a.jsonl")


def test_arguments_of_functions_are_in_the_fingerprint():
    rewards = [RewardConfig(fn="tests.digits:digits", threads=3, weight=0.5)]
    found = resumable.fingerprint_settings(RunConfig(algorithm="grpo", output="a", reward=rewards))
    assert found["reward[0].threads"] == 3 and found["reward[0].weight"] == 0.5
    assert found["reward[0].fn (source)"] == hash_file(Path(digits.__file__))[:32]
    assert "output" not in found and not any(key.startswith("runtime.profile") for key in found)
    other = RunConfig(algorithm="grpo", output="b", reward=rewards, runtime={"ray_address": "x", "stall": None})
    assert resumable.fingerprint_settings(other) == found
