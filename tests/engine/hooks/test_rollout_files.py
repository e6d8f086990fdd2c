"""rollouts/step_N.safetensors: what is in it is what samples.jsonl and the batch of the step have."""

import json
import shutil
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from safetensors import safe_open

import coalign
from coalign.data.batch import Batch
from coalign.engine.hooks.rollout_files import RolloutFiles, _decode_piece, _list_excess
from coalign.run_files.rollouts import find_rollouts, list_rollout_steps, read_rollouts
from tests.environments.test_training import calculating
from tests.runs import run, samples, settings
from tests.tiny import tiny_tokenizer

NAN = float("nan")


def make_batch(**columns):
    """Two rows: a prompt of two tokens with a response of two, and one of one with a response and a tool's token."""
    batch = Batch(
        torch.tensor([4, 4]),
        {
            "tokens": torch.tensor([10, 11, 12, 13, 10, 20, 21, 22], dtype=torch.int32),
            "loss_mask": torch.tensor([False, False, True, True, False, True, False, True]),
            "versions": torch.tensor([-1, -1, 3, 4, -1, 3, -1, 3], dtype=torch.int32),
            "rollout_logprobs": torch.tensor([0.0, 0.0, -0.5, -1.5, 0.0, -2.0, 0.0, -0.25]),
        },
        {"prompt_length": torch.tensor([2, 1], dtype=torch.int32)},
    )
    return batch.with_(**columns)


def read_columns(path):
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def add(folder, step, *batches, keep=9):
    files = RolloutFiles(folder, keep)
    files.add(step, batches, tiny_tokenizer())
    files.close()


def test_the_file_has_the_columns_of_the_batch(tmp_path):
    advantages = torch.tensor([0.0, 0.0, 1.5, 1.5, 0.0, -1.5, 0.0, -1.5])
    add(tmp_path, 7, make_batch(advantages=advantages, ref_logprobs=torch.full((8,), -0.75)))
    columns, metadata = read_columns(tmp_path / "rollouts" / "step_7.safetensors")
    expected = {
        "tokens": np.array([10, 11, 12, 13, 10, 20, 21, 22], np.int32),
        "row_ends": np.array([4, 8]),
        "prompt_length": np.array([2, 1], np.int32),
        "logprob": np.array([NAN, NAN, -0.5, -1.5, NAN, -2.0, NAN, -0.25], np.float32),
        "reference_logprob": np.array([NAN, NAN, -0.75, -0.75, NAN, -0.75, NAN, -0.75], np.float32),
        "advantage": np.array([NAN, NAN, 1.5, 1.5, NAN, -1.5, NAN, -1.5], np.float32),
        "loss_mask": np.array([0, 0, 1, 1, 0, 1, 0, 1], np.uint8),
        "weight_version": np.array([-1, -1, 3, 4, -1, 3, -1, 3], np.int32),
    }
    assert columns.keys() == expected.keys()
    for name, values in expected.items():
        assert columns[name].dtype == values.dtype, name
        np.testing.assert_array_equal(columns[name], values, err_msg=name)
    assert (metadata["step"], metadata["format"]) == ("7", "1")
    pieces = json.loads(metadata["pieces"])
    assert pieces == {str(token): tiny_tokenizer().decode([token]) for token in {10, 11, 12, 13, 20, 21, 22}}


def test_rows_of_one_step_follow_each_other_and_lack_what_their_batch_lacked(tmp_path):
    evaluated = make_batch()
    add(tmp_path, 1, evaluated, evaluated.slice(0, 1))
    add(tmp_path, 1, make_batch(advantages=torch.ones(8)).slice(1, 2))
    found = read_rollouts(find_rollouts(tmp_path, 1))
    assert found.row_ends.tolist() == [4, 8, 12, 16] and found.prompt_length.tolist() == [2, 1, 2, 1]
    np.testing.assert_array_equal(found.columns["advantage"], [NAN] * 13 + [1.0, NAN, 1.0])
    assert found.tokens[12:].tolist() == [10, 20, 21, 22] and found.pieces.keys() == {*found.tokens.tolist()}


def test_files_are_bounded_and_those_of_later_steps_go(tmp_path):
    for step in range(1, 6):
        add(tmp_path, step, make_batch(), keep=3)
    assert list_rollout_steps(tmp_path) == [3, 4, 5]
    sizes = {3: 10, 5: 10, 4: 10}
    assert (
        _list_excess(sizes, 3, 20) == [3] and _list_excess(sizes, 3, 1) == [3, 4] and _list_excess(sizes, 3, 30) == []
    )
    assert _list_excess(sizes, 2) == [3] and _list_excess(sizes, 3) == []
    files = RolloutFiles(tmp_path, 3)
    files.cut(4)
    files.close()
    assert list_rollout_steps(tmp_path) == [3, 4]
    add(tmp_path, 5, make_batch(), keep=0)
    assert list_rollout_steps(tmp_path) == [3, 4]


def test_a_disk_that_is_away_is_survived(tmp_path, caplog):
    (tmp_path / "rollouts").write_text("in the way")
    add(tmp_path, 1, make_batch())
    assert "rollouts cannot be written" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"x" * 99])
def test_a_damaged_file_is_refused_by_its_name(tmp_path, content):
    path = tmp_path / "step_1.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"step_1\.safetensors holds no rollouts"):
        read_rollouts(path)


def test_a_piece_keeps_the_space_that_begins_a_word():
    class Pieces:
        def decode(self, tokens, **_):
            return {1: "word", 2: "end"}[tokens[0]]

        def convert_ids_to_tokens(self, token):
            return {1: "\u2581word", 2: "end"}[token]

    assert [_decode_piece(Pieces(), token) for token in (1, 2)] == [" word", "end"]


class Batches(coalign.Hook):
    """Keeps what the first samples of each step were learned from."""

    def __init__(self):
        self.by_step = {}

    def after_step(self, engine, stats, batch):
        self.by_step[engine.step] = engine.progress.learned.fetch(engine.config.runtime.log_samples)


def read_samples(config, step):
    return [line for line in samples(config) if line["step"] == step]


def check_run(config, batches, start=1):
    """Compare the files of a run with its samples.jsonl, and with its batches, where these are known."""
    folder = Path(config["output"])
    for step in range(start, config["runtime"]["steps"] + 1):
        found, told = read_rollouts(find_rollouts(folder, step)), read_samples(config, step)
        assert len(found.row_ends) == len(told) == len(found.prompt_length)
        starts = [0, *found.row_ends.tolist()]
        for sample, begin, end, length in zip(told, starts, found.row_ends, found.prompt_length, strict=False):
            assert "".join(found.pieces[token] for token in found.tokens[begin : begin + length]) == sample["prompt"]
            written = sum(tokens for _, tokens in sample["versions"])
            assert (found.columns["weight_version"][begin:end] >= 0).sum() == written
        batch = batches[step]
        rows = slice(len(found.tokens) - batch.tokens_total, None)  # an evaluation comes before them
        trained = batch["loss_mask"].numpy()
        np.testing.assert_array_equal(found.tokens[rows], batch["tokens"])
        np.testing.assert_array_equal(found.columns["loss_mask"][rows], trained)
        np.testing.assert_array_equal(found.columns["weight_version"][rows], batch["versions"])
        for public, name in (
            ("logprob", "rollout_logprobs"),
            ("advantage", "advantages"),
            ("trainer_logprob", "old_logprobs"),
            ("reference_logprob", "ref_logprobs"),
        ):
            values = found.columns[public][rows]
            np.testing.assert_array_equal(values[trained], batch[name].numpy()[trained], err_msg=public)
            assert np.isnan(values[~trained]).all() and np.isfinite(values[trained]).all(), public


def configure(tmp_path, **runtime):
    config = settings(tmp_path, "grpo", steps=2, eval_at_start=False, eval_every=2, log_samples=16, **runtime)
    config["loss"] = {"kl_coef": 0.01}
    return config


def train(config):
    hook = Batches()
    assert run(config, hooks=[hook]) == 0
    return hook.by_step


def test_a_run_keeps_what_it_learned_from_and_writes_it_again_when_it_goes_on(tmp_path):
    config = configure(tmp_path, save_every=1, keep=9)
    batches = train(config)
    check_run(config, batches)
    folder = Path(config["output"])
    assert list_rollout_steps(folder) == [1, 2]
    first = read_rollouts(find_rollouts(folder, 1))
    told = read_samples(config, 1)
    for sample, end in zip(told, first.row_ends, strict=True):
        rewards = [other["reward"] for other in told if other["group"] == sample["group"]]
        expected = (sample["reward"] - mean(rewards)) / (stdev(rewards) + 1e-6)
        assert first.columns["advantage"][end - 1] == pytest.approx(expected, abs=1e-3)
    assert any(first.columns["advantage"][first.row_ends - 1])
    trained = first.columns["loss_mask"] == 1
    for other in ("trainer_logprob", "reference_logprob"):  # the weights have not moved yet
        np.testing.assert_allclose(first.columns[other][trained], first.columns["logprob"][trained], atol=1e-4)
    before, _ = read_columns(find_rollouts(folder, 2))
    shutil.rmtree(folder / "checkpoints" / "step_2")
    find_rollouts(folder, 2).write_bytes(b"of the run before")
    again = train(config)
    assert again.keys() == {2}
    check_run(config, batches | again)
    for name, values in read_columns(find_rollouts(folder, 2))[0].items():
        np.testing.assert_array_equal(values, before[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "trainer"),
    [
        ({"max_staleness": 2}, {"updates_per_batch": 2}),
        ({"cluster": "ray"}, {"num_process": 2}),
        ({"cluster": "ray", "max_staleness": 1}, {"num_process": 2, "reduction": "exact"}),
    ],
    ids=["stale", "ranks", "exact"],
)
def test_episodes_of_several_turns_are_kept(tmp_path, runtime, trainer):
    if "cluster" in runtime:
        pytest.importorskip("ray")
    config = calculating(tmp_path, steps=3, log_samples=16, **runtime) | {"loss": {"kl_coef": 0.01}}
    config["models"]["trainer"] |= trainer
    batches = train(config)
    check_run(config, batches)
    generated = batches[1]["versions"] >= 0
    assert (~generated & (batches[1]["tokens"] >= 0)).any() and (batches[1]["loss_mask"] == generated).all()
