"""Whole runs with a filter, with replay: what is trained on, what is counted, how a run goes on."""

import pytest

from tests.runs import metrics, run, run_in_two_parts, run_to_end, samples, settings, weights_hash


def not_a_mask(group):
    return group


def nothing(*batches):
    return batches[-1].slice(0, 0)


def online(tmp_path, **runtime):
    config = settings(tmp_path, "grpo", **({"eval_at_start": False} | runtime))
    config["data"].pop("eval")
    return config | {"reward": {"fn": "tests.functions:odd_groups_differ"}}


def assert_resumes_bit_for_bit(config):
    """The run, and the same run cut after two steps, end with the same weights and say the same on the way."""
    run(config)
    resumed, last = run_in_two_parts(config), config["runtime"]["steps"]
    assert weights_hash(resumed, last) == weights_hash(config, last)
    apart = ("time/", "idle/", "memory/", "throughput/", "goodput/", "sync/seconds")
    ours, theirs = (
        [{k: v for k, v in line.items() if not k.startswith(apart)} for line in metrics(c)] for c in (resumed, config)
    )
    assert ours == theirs


def test_a_step_trains_on_as_many_groups_as_it_would_without_the_filter(tmp_path):
    config = online(tmp_path, steps=3, log_samples=16) | {"filter": {"fn": "varied"}}
    for line in run_to_end(config):
        assert line["samples/count"] == 16
        # Without a filter every second group earns the same; what was dropped has been drawn again.
        assert line["filter/dropped"] >= 3
        assert line["filter/kept"] + line["rollout/expired"] >= 4
    first, second, _ = metrics(config)
    # Four prompts, of which groups 1 and 3 vary; then 2 / 1.0 prompts (1 kept); then 1 (none), 1 (one).
    assert (first["rollout/rounds"], first["filter/kept"], first["filter/dropped"]) == (4, 4, 4)
    # The second step knows that half of the groups stay, and begins twice as many.
    assert (second["rollout/rounds"], second["filter/kept"], second["filter/dropped"]) == (1, 4, 4)
    trained = [s["group"] for s in samples(config)]
    assert len(trained) == 48 and all(group % 2 for group in trained)
    assert all(trained.count(group) == 4 for group in trained)  # whole, and once


def test_what_a_filter_returns_is_named(tmp_path):
    config = online(tmp_path) | {"filter": {"fn": "tests.engine.test_sampling_control:not_a_mask"}}
    with pytest.raises(Exception, match=r"`not_a_mask` returned torch.int64 \[16\]; expected torch.bool \[16\]"):
        run(config)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({}, r"step 1: .*`varied` dropped all 8 groups of 2 rollouts \(filter.max_rounds is 2\)\. Are"),
        ({"round_tokens": 4}, r"groups of 4 rollouts \(filter.max_rounds is 2, each of the 2 that the longest resp"),
    ],
)
def test_a_run_with_nothing_left_to_train_on_says_what_to_look_at(tmp_path, rollout, said):
    config = online(tmp_path) | {"reward": {"fn": "tests.functions:never_differs"}, "rollout": rollout}
    with pytest.raises(RuntimeError, match=said):
        run(config | {"filter": {"fn": "varied", "max_rounds": 2}})


def test_rounds_end_with_what_there_is(tmp_path):
    config = online(tmp_path, steps=1) | {"filter": {"fn": "varied", "max_rounds": 1}}
    assert run_to_end(config)[0]["samples/count"] == 8


def test_a_surplus_is_kept_as_long_as_the_bound_on_staleness_allows(tmp_path):
    config = online(tmp_path, steps=6, max_staleness=2) | {"filter": {"fn": "varied"}}
    lines = run_to_end(config)
    assert all(line["samples/count"] == 16 for line in lines)
    assert max(line["samples/staleness_max"] for line in lines) <= 2
    kept, expired = (sum(line.get(name, 0) for line in lines) for name in ("filter/kept", "rollout/expired"))
    assert kept == 24 + expired + lines[-1]["rollout/waiting"]


def test_replay_adds_samples_of_the_steps_before(tmp_path):
    config = online(tmp_path, steps=4, log_samples=99) | {"replay": {"fn": "mix", "steps": 2, "share": 0.5}}
    lines = run_to_end(config)
    assert [line["samples/count"] for line in lines] == [16, 24, 24, 24]
    assert [line["replay/sequences"] for line in lines] == [0, 8, 8, 8]
    assert [line["tokens/generated"] > 0 for line in lines] == [True] * 4
    by_step = {step: {s["group"] for s in samples(config) if s["step"] == step} for step in (1, 2, 3, 4)}
    assert by_step[2] - set(range(4, 8)) < by_step[1]
    assert by_step[4] - set(range(12, 16)) <= set(range(4, 12))  # the last two steps' own, nothing older
    assert lines[0]["samples/staleness_max"] == 0
    assert 1 <= max(line["samples/staleness_max"] for line in lines[1:]) <= 2


SECTIONS = {"filter": {"fn": "varied"}, "replay": {"fn": "mix", "steps": 2, "share": 1.0}, "curriculum": {"high": 0.9}}


@pytest.mark.parametrize(
    "names", [[*SECTIONS], *(pytest.param([name], marks=pytest.mark.slow) for name in SECTIONS)], ids=str
)
def test_a_run_with_a_state_of_its_samples_goes_on_bit_for_bit(tmp_path, names):
    # Of 24 rows, so that the curriculum passes rows over; the filter drops every second one.
    steps = 3 if "filter" in names else 4
    config = online(tmp_path, steps=steps, prompts_per_step=8) | {name: SECTIONS[name] for name in names}
    assert_resumes_bit_for_bit(config)
    if "curriculum" in names:
        assert sum(line["curriculum/passed_over"] for line in metrics(config)) > 0


def test_a_replay_without_samples_is_refused(tmp_path):
    replay = {"fn": "tests.engine.test_sampling_control:nothing"}
    with pytest.raises(RuntimeError, match=r"step 1: replay.fn returned no samples"):
        run(online(tmp_path, steps=2) | {"replay": replay})


def test_a_run_with_a_curriculum_passes_over_what_is_solved(tmp_path):
    """Prompts of even groups are always solved (reward 1), those of odd ones half the time."""
    config = online(tmp_path, steps=9, log_samples=16) | {"curriculum": {"low": 0.0, "high": 0.9}}
    config["data"]["shuffle"] = False  # 24 rows: the second pass starts in step 7
    lines = run_to_end(config)
    assert [line["curriculum/passed_over"] for line in lines[:6]] == [0] * 6
    assert sum(line["curriculum/passed_over"] for line in lines[6:]) == 12
    assert all(line["samples/count"] == 16 for line in lines)
    asked = {step: {s["row"]["_row"] for s in samples(config) if s["step"] == step} for step in range(1, 10)}
    assert all(row % 2 for step in (7, 8, 9) for row in asked[step])
