"""A whole step: its phases in turns, one step ahead and asynchronous, and what its figures add up to."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from coalign_plan.constants import Constants, MeasuredMachine, load_machine
from coalign_plan.gpus import find_gpu
from coalign_plan.job import LengthDistribution
from coalign_plan.prediction import predict_step
from packages.plan.tests.shapes import CLUSTER, engine, job, trainer

CONSTANTS = Constants()


def predict(shape, cluster=CLUSTER, constants=CONSTANTS):
    return predict_step(shape, cluster, constants)


def test_in_turns_a_step_is_the_sum_of_its_phases():
    shape = job(engine(), trainer(), replace(trainer(), name="reference", role="scorer"))
    step = predict(shape)
    names = [phase.name for phase in step.phases]
    assert names == ["generate", "score", "train", "overhead", "sync"]
    assert step.seconds == pytest.approx(sum(phase.seconds for phase in step.phases))
    for before, after in pairwise(step.phases):
        assert after.start == pytest.approx(before.end)
    assert step.tokens_per_second == pytest.approx(shape.tokens / step.seconds)
    assert 0 < step.mfu < step.trainer_mfu < 1
    assert step.idle["all"] == pytest.approx(1, abs=1)


def test_one_step_ahead_takes_the_longer_side():
    works = engine(data=16, group="rollout"), trainer(data=16, group="trainer")
    turns = predict(job(*works))
    ahead = predict(job(*works, max_staleness=1, partial_rollout=False))
    assert ahead.seconds < turns.seconds
    longer = max(turns.phase_seconds()["generate"], turns.phase_seconds()["train"])
    assert ahead.seconds == pytest.approx(longer + turns.phase_seconds()["sync"], rel=0.05)
    carried = predict(job(*works, max_staleness=1))  # two batches are generated beside each other
    assert carried.seconds < ahead.seconds
    assert set(ahead.idle) == {"rollout", "trainer"}
    assert min(ahead.idle.values()) < min(turns.idle.values())


def test_staleness_and_longer_responses():
    works = engine(data=16, group="rollout"), trainer(data=16, group="trainer")
    seconds = [predict(job(*works, max_staleness=staleness)).seconds for staleness in (0, 1, 2, 4)]
    assert all(later <= earlier * 1.02 for earlier, later in pairwise(seconds))
    longer = [predict(job(responses=LengthDistribution(mean, 16000))).seconds for mean in (500, 1000, 2000, 4000)]
    assert longer == sorted(longer)


def test_scorers_on_devices_of_their_own_run_beside_each_other():
    reference = replace(trainer(), name="reference", role="scorer")
    judge = replace(trainer(), name="judge", role="scorer")
    together = predict(job(engine(), trainer(), reference, judge))
    apart = predict(job(engine(), trainer(), reference, replace(judge, group="judges")))
    assert apart.seconds < together.seconds
    assert apart.phase_seconds()["score"] == pytest.approx(together.phase_seconds()["score"] / 2)


def test_models_that_take_turns_in_memory_are_loaded_and_taken_away():
    moved = predict(job(engine(is_moved=True), trainer(is_moved=True)))
    names = [phase.name for phase in moved.phases]
    assert names == ["load", "generate", "load", "train", "offload", "overhead", "sync"]
    assert moved.seconds > predict(job()).seconds


def test_data_without_roll_outs():
    step = predict(job(trainer(), samples=1, prompts=64))
    assert [phase.name for phase in step.phases] == ["train", "overhead"]
    assert step.rollouts is None
    assert step.seconds == pytest.approx(sum(phase.seconds for phase in step.phases))


def test_shared_prompts_and_padding():
    usual = job(prompt_tokens=4000.0)
    assert predict(replace(usual, shares_prompts=True)).seconds < predict(usual).seconds
    assert predict(replace(usual, is_padded=True)).seconds > predict(usual).seconds


def test_more_devices_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="need 64 devices"):
        predict(job(engine(data=64), trainer()))


def test_a_prediction_is_quick():
    """Thousands are made in a search; the limit is far above what one takes (no time is asserted elsewhere)."""
    works = engine(data=16, group="rollout"), trainer(data=16, group="trainer")
    begun = time.process_time()
    predict(job(*works, prompts=512, samples=16, max_staleness=4))
    assert time.process_time() - begun < 2


def test_a_measured_machine_is_kept_in_a_file(tmp_path):
    machine = MeasuredMachine(find_gpu("L40S"), replace(CONSTANTS, matmul=0.5), {"copy GB/s": 20.0})
    machine.save(tmp_path / "cache" / "here.json")
    assert load_machine(tmp_path / "cache" / "here.json") == machine
    (tmp_path / "bad.json").write_text('{"gpu": {}}')
    with pytest.raises(ValueError, match=r"bad.json is not a file of measured constants"):
        load_machine(tmp_path / "bad.json")
