"""The journal of a run: every group is accounted for exactly once, whatever the run goes through."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from coalign.data.batch import Batch
from coalign.engine.rollouts.journal import (
    Journal,
    decode_line,
    describe_samples,
    encode_line,
    format_groups,
    parse_groups,
    read_lines,
)
from coalign_diagnose.run_history import RunHistory
from tests.runs import metrics, run, run_in_two_parts
from tests.runs import settings as run_settings


def settings(directory, algorithm, **runtime):
    return run_settings(directory, algorithm, **{"journal": True, "eval_at_start": False} | runtime)


def path_of(config):
    return Path(config["output"]) / "journal.jsonl"


def read(config):
    return RunHistory(read_lines(path_of(config)))


def states(history):
    return [life.state for life in history.groups.values()]


def check_accounts(config, prompts=4):
    """Every step trained on ``prompts`` groups, and no group is counted twice; the history."""
    history = read(config)
    assert not history.damaged and sorted(history.steps) == [1, 2, 3, 4]
    trained = [group for step in history.steps.values() for group in step.groups]
    assert len(trained) == len(set(trained)) == 4 * prompts
    assert sorted(trained) == sorted(g for g, life in history.groups.items() if life.state == "trained")
    for step in history.steps.values():
        assert step.trained_at is not None
        assert step.loss == pytest.approx(metrics(config)[step.step - 1]["loss/value"])
    return history


def test_samples_are_described_by_tokens_status_reward_and_versions():
    versions = torch.tensor([-1, 3, 3, 4, -1, 3, -1, -1, 5])
    batch = Batch(
        torch.tensor([4, 2, 2, 1]),
        {"versions": versions, "loss_mask": versions >= 0},
        {
            "group": torch.tensor([7, 7, 9, 9]),
            "status": torch.tensor([0, 1, 0, 0], dtype=torch.uint8),
            "reward": torch.tensor([0.1, float("nan"), 0.0, 1 / 3]),
        },
    )
    found = describe_samples(batch)
    assert found["group"].tolist() == [7, 9]
    assert found.sequence["described"] == [
        [[3, 0, 0.1, [2, 3, 3, 4]], [1, 1, None, 3]],
        [[0, 0, 0.0, []], [1, 0, 0.333333, 5]],
    ]


def test_groups_are_written_as_ranges_in_their_order():
    for groups in ([], [3], [0, 1, 2, 7], [9, 3, 4, 5, 0]):
        assert parse_groups(format_groups(groups)) == groups


def test_a_line_that_was_cut_or_changed_is_found_and_left_out():
    line = encode_line({"event": "taken", "at": 1.5, "step": 2, "groups": "4-7"})
    assert json.loads(line) == {**(decode_line(line) or {}), "crc": line[-11:-3].decode()}
    assert decode_line(line[:-1]) is None
    for position in range(len(line)):
        assert decode_line(line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :]) is None


@pytest.mark.parametrize(
    ("staleness", "filtered"),
    [(2, False), (0, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, False), (2, True)))],
)
def test_every_group_is_accounted_for_exactly_once(tmp_path, staleness, filtered):
    config = settings(tmp_path, "grpo", max_staleness=staleness)
    if filtered:
        config["filter"] = {"fn": "varied"}
    run(config)
    history = check_accounts(config)
    dropped = sum(line.get("filter/dropped", 0) for line in metrics(config))
    expired = sum(line.get("rollout/expired", 0) for line in metrics(config))
    causes = [life.dropped for life in history.groups.values() if life.dropped]
    assert causes.count("filter") == dropped and causes.count("expired") == expired and bool(dropped) == filtered
    waiting = [life for life in history.groups.values() if life.state == "waiting"]
    assert len(history.groups) == 16 + len(causes) + len(waiting)
    assert sorted(history.groups) == list(range(len(history.groups)))  # as the loader numbers them
    ages = [age for life in history.groups.values() for _, age in life.ages]
    assert max(ages) == max(line["samples/staleness_max"] for line in metrics(config)) <= staleness
    tokens = sum(sample[0] for life in history.groups.values() for sample in life.samples)
    assert tokens == sum(line["tokens/generated"] for line in metrics(config))
    assert path_of(config).stat().st_size <= 10 * tokens


def test_unfinished_groups_are_trained_given_up_or_waiting(tmp_path):
    config = settings(tmp_path, "grpo")
    config["rollout"] = {"round_tokens": 3, "oversample": 1.5}
    run(config)
    history = check_accounts(config)
    given_up = sum(line.get("rollout/given_up", 0) for line in metrics(config))
    assert states(history).count("dropped") == given_up
    written = {len(sample[3]) for life in history.groups.values() for sample in life.samples if type(sample[3]) is list}
    assert written and min(written) >= 4  # by several versions


def test_groups_that_oversampling_cuts_are_dropped(tmp_path):
    config = settings(tmp_path, "grpo")
    config["rollout"] = {"oversample": 2.0}
    run(config)
    history = check_accounts(config)
    cut = sum(line.get("rollout/cut", 0) for line in metrics(config))
    assert sum(life.dropped == "cut" for life in history.groups.values()) == cut


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_run_in_two_parts_has_one_journal(tmp_path, staleness):
    config = run_in_two_parts(settings(tmp_path, "grpo", max_staleness=staleness))
    history = check_accounts(config)
    lines = list(read_lines(path_of(config)))
    assert [line["step"] for line in lines if line and line["event"] == "resumed"] == [2]
    assert sum(line["event"] == "run" for line in lines if line) == 1
    assert "dropped" not in states(history)


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_steps_after_the_checkpoint_are_shown_as_discarded(tmp_path, staleness):
    config = settings(tmp_path, "grpo", max_staleness=staleness, save_every=1, keep=9)
    run(config)
    for step in (3, 4):
        shutil.rmtree(Path(config["output"]) / "checkpoints" / f"step_{step}")
    run(config)
    history = check_accounts(config)
    assert [step.step for step in history.former_steps] == [3, 4]
    again = {group for step in history.former_steps for group in step.groups}
    assert again == {life.group for life in history.former_groups if life.trained_by}
    assert all(life.discarded for life in history.former_groups)
    assert "dropped" not in states(history)


def test_a_journal_of_another_run_is_moved_aside(tmp_path, caplog):
    config = settings(tmp_path, "grpo", steps=1)
    run(config)
    foreign = encode_line({"event": "run", "at": 0.0, "run": "another", "started": 1.0})
    path_of(config).write_bytes(foreign)
    config["runtime"]["steps"] = 2
    run(config)
    assert "is of another run" in caplog.text
    [aside] = Path(config["output"]).glob("journal.jsonl.*")
    assert aside.read_bytes() == foreign
    assert sorted(read(config).steps) == [2]  # the step before is in no journal of this run
    run(config, "runtime.resume=never")
    assert sorted(read(config).steps) == [1, 2] and not read(config).restarts


def test_a_line_that_a_kill_has_cut_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(encode_line({"event": "run"})[:10])
    journal = Journal(path, 0.0, None)
    journal.note("ended", step=1)
    journal.close()
    first, second = read_lines(path)
    assert first is None and second and second["event"] == "ended"
