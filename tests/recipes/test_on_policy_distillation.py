"""On-policy distillation from its YAML: the student comes closer to its teacher on what it writes itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coalign import evaluate, load_config
from coalign.data.batch import Batch
from coalign.launch.plan import prepare
from coalign.recipes.distillation import _assign_teachers, _merge_teachers, _select_for_teacher
from tests.runs import other_model, run, run_to_end, settings, trace_calls, weights_hash
from tests.tiny import tiny_tokenizer

GKD = {"fn": "distillation", "divergence": "jsd", "jsd_beta": 0.5}


def configuration(directory, **runtime):
    """Without a reward."""
    config = settings(directory, "on_policy_distillation", **{"steps": 2, "eval_at_start": False} | runtime)
    config.pop("reward")
    return config


def test_the_teacher_is_asked_for_what_the_loss_reads(tmp_path):
    config = configuration(tmp_path)
    assert "teacher.forward_step" in trace_calls(config) and "teacher.top_logprobs" not in trace_calls(config)
    top = trace_calls(config | {"loss": GKD})
    assert "teacher.top_logprobs" in top and "reverse_kl" not in top
    assert "teacher_logprobs" in top["trainer.train_step"].reads["teacher.top_logprobs"]


def test_a_reward_is_for_evaluation(tmp_path):
    config = configuration(tmp_path, steps=1, eval_every=1) | {"reward": "tests.digits:digits"}
    line = run_to_end(config)[-1]
    assert {"eval/mean@1", "eval/teacher_kl"} <= set(line) and "reward/mean" not in line


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    config = configuration(tmp_path)
    other = other_model(tmp_path / "other", seed=5)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    config["models"]["teacher"]["load"] = str(other)
    with pytest.raises(ValueError, match=r"models.teacher.load: its tokenizer is another one .*'<think>' = 259"):
        run(config)


def test_another_temperature_is_refused(tmp_path):
    config = configuration(tmp_path)
    config["models"]["policy"]["sampling"]["temperature"] = 0.7
    with pytest.raises(ValueError, match=r"models.teacher.sampling.temperature is 1.0, that of models.policy 0.7"):
        run(config)
    config["models"]["teacher"]["sampling"] = {"temperature": 0.7}
    assert run(config) == 0


# ---- several teachers


def with_teachers(directory, rows):
    """`teacher` has other weights than `teacher_sums`; ``rows``: the teacher of each row of data, in turn."""
    directory.mkdir(exist_ok=True)
    config = configuration(directory, prompts_per_step=4)
    path = Path(config["data"]["train"])
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    named = [line | ({"teacher": rows[i % len(rows)]} if rows[i % len(rows)] else {}) for i, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in named))
    config["models"]["teacher_sums"] = {
        "like": "teacher",
        "load": str(other_model(directory / "sums", seed=7, initializer_range=0.3)),
    }
    return config


@pytest.mark.parametrize("loss", ["policy_gradient", pytest.param(GKD, id="gkd", marks=pytest.mark.slow)])
def test_each_row_has_its_own_teacher(tmp_path, loss):
    config = with_teachers(tmp_path / "one", ["sums", None]) | {"loss": loss}
    assert {"teacher.forward_step", "teacher_sums.forward_step"} & {*trace_calls(config)} or loss == GKD
    both = run_to_end(config)[-1]
    if loss == "policy_gradient":
        assert both["teacher_kl/sums"] != both["teacher_kl/teacher"]
    # All rows with one teacher: the run with that teacher alone, and nothing of the other one.
    everything = with_teachers(tmp_path / "all", ["sums"]) | {"loss": loss}
    run(everything)
    alone = with_teachers(tmp_path / "alone", [None]) | {"loss": loss}
    alone["models"]["teacher"]["load"] = alone["models"].pop("teacher_sums")["load"]
    run(alone)
    assert weights_hash(everything, 2) == weights_hash(alone, 2) != weights_hash(config, 2)


def test_the_teachers_of_rows_worked_by_hand():
    lengths = torch.tensor([2, 1, 2])
    columns = {"loss_mask": torch.tensor([False, True, True, True, True]), "rollout_logprobs": torch.zeros(5)}
    batch = Batch(lengths, columns, {"rows": [{"teacher": "b"}, {}, {"teacher": "b"}]})
    names = ["teacher", "teacher_a", "teacher_b"]
    assert _assign_teachers(batch, names).tolist() == [2, 0, 2]
    parts = [_select_for_teacher(batch, name=name, names=names) for name in names]
    assert [part.lengths.tolist() for part in parts] == [[1], [2], [2, 2]]  # teacher_a has nothing to do
    said = [Batch(p.lengths, {"ref_logprobs": torch.full((p.tokens_total,), -1.0 - i)}) for i, p in enumerate(parts)]
    merged, stats = _merge_teachers(batch, *said, names=names)
    assert merged["ref_logprobs"].tolist() == [-3.0, -3.0, -1.0, -3.0, -3.0]
    assert {name: (stat.sum, stat.count) for name, stat in stats.items()} == {
        "teacher_kl/teacher": (1.0, 1.0),
        "teacher_kl/a": (0.0, 0.0),
        "teacher_kl/b": (9.0, 3.0),
    }
    message = r"a row has the teacher 'c', and there is no models\.teacher_c; expected 'a', 'b'"
    with pytest.raises(ValueError, match=message):
        _assign_teachers(batch.with_(rows=[{"teacher": "c"}] * 3), names)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("teacher_a", {"frozen": False}, r"models\.teacher_a\.frozen is false, and a teacher does not learn"),
        (
            "teacher_a",
            {"sampling": {"temperature": 0.5}},
            r"teacher_a\.sampling\.temperature is 0\.5, that of models\.pol",
        ),
        ("teacher_a", {"candidates": 3}, r"models\.teacher_a\.candidates is 3, that of models\.teacher 8"),
        ("teachr", {}, r"`on_policy_distillation` has no such model; did you mean 'teacher'"),
    ],
)
def test_bad_teachers_are_named(tmp_path, name, changes, message):
    config = configuration(tmp_path) | ({"loss": GKD} if "candidates" in changes else {})
    config["models"][name] = {"frozen": True} | config["models"]["teacher"] | changes
    with pytest.raises(ValueError, match=message):
        prepare(load_config(config))


def test_they_are_there_in_evaluation(tmp_path):
    found = evaluate(with_teachers(tmp_path, ["sums", None]), quiet=True)
    assert found["eval/teacher_kl"] > 0 and {"eval/teacher_kl/sums", "eval/teacher_kl/teacher"} <= found.keys()
