"""Finished rollouts outlive the driver: a run that goes on does not generate them again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coalign.backends.engines.request import begin_samples, extend_samples
from coalign.backends.engines.rollout_module import RolloutModule
from coalign.checkpoint.schedule import Save
from coalign.data.batch import Batch
from coalign.engine.hooks.recorder import MetricsRecorder
from coalign.engine.rollouts.finished_rollouts import _decode_samples, _encode_samples
from coalign.types import Response, Status
from tests.data.reading import assert_same
from tests.runs import metrics, run, settings, weights_hash

STEPS = 5


def make_samples(lengths: list[int], vocabulary: int = 70_000) -> tuple[Batch, Batch]:
    """Prompts of 3 tokens, and a response to each with these lengths."""
    draw = torch.Generator().manual_seed(0)
    count = len(lengths)
    tokens = torch.randint(vocabulary, (3 * count,), generator=draw, dtype=torch.int32)
    rows = [{"prompt": f"question {number}"} for number in range(count)]
    prompts = Batch(torch.full((count,), 3)).with_(tokens=tokens, group=torch.arange(count) + 7, rows=rows)
    responses = [
        Response(
            torch.randint(vocabulary, (length,), generator=draw, dtype=torch.int32),
            -torch.rand(length, generator=draw),
            torch.full((length,), 12, dtype=torch.int32),
            Status.TRUNCATED,
        )
        for length in lengths
    ]
    return prompts, extend_samples(begin_samples(prompts, 1), range(count), responses)


def test_samples_come_back_to_the_bit_in_eight_bytes_a_token():
    prompts, samples = make_samples([2000, 0, 3000, 1])
    columns, content = _encode_samples(prompts, samples) or pytest.fail("they begin as their prompts do")
    found = _decode_samples(prompts, columns, content)
    assert_same(found, samples)
    assert len(content) / 5001 < 8
    some = _decode_samples(prompts.select([2, 0]), columns, content)
    assert some["group"].tolist() == [7, 9] and torch.equal(some["tokens"], samples.select([0, 2])["tokens"])


def test_samples_of_other_prompts_are_not_encoded():
    prompts, samples = make_samples([4, 5])
    assert _encode_samples(prompts.with_(tokens=prompts["tokens"] + 1), samples) is None
    assert _encode_samples(prompts.select([0]), samples) is None


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """(config, hash of the weights, run folder as a kill in the training of step 4 would leave it)."""
    directory = tmp_path_factory.mktemp("finished")
    config = settings(directory, "grpo", steps=STEPS, save_every=2, journal=True, eval_at_start=False)
    config["data"].pop("eval")
    output, left, record = Path(config["output"]), directory / "left", MetricsRecorder.before_training

    def before_training(self: Any, engine: Any) -> None:
        """The samples of the step are there, and written."""
        if engine.step == 3:
            next(hook for hook in engine.hooks if isinstance(hook, Save)).disk.finish()
            engine.environment.unfinished.finished._writer.submit(int).result()
            shutil.copytree(output, left, symlinks=True)
        record(self, engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsRecorder, "before_training", before_training)
        assert run(config) == 0
    assert not (output / "finished").exists(), "a run that is complete needs none"
    return config, weights_hash(config, STEPS), left


def go_on(interrupted: Any, monkeypatch: pytest.MonkeyPatch, damage: Any = lambda folder: None) -> int:
    """Go on from what the kill has left; return how many tokens were generated."""
    config, expected, left = interrupted
    shutil.rmtree(config["output"])
    shutil.copytree(left, config["output"], symlinks=True)
    damage(Path(config["output"]))
    generated, generate = [], RolloutModule.generate

    def count(self: Any, *arguments: Any, **options: Any) -> Any:
        out = generate(self, *arguments, **options)
        generated.append(int((out[0] if isinstance(out, tuple) else out)["loss_mask"].sum()))
        return out

    monkeypatch.setattr(RolloutModule, "generate", count)
    assert run(config) == 0
    assert weights_hash(config, STEPS) == expected
    assert [line["step"] for line in metrics(config)] == list(range(1, STEPS + 1))
    return sum(generated)


def tokens_of(interrupted: Any, *steps: int) -> float:
    return sum(line["tokens/generated"] for line in metrics(interrupted[0]) if line["step"] in steps)


def test_steps_since_the_checkpoint_are_not_generated_again(interrupted, monkeypatch):
    # Step 4 was being trained; the newest checkpoint is that of step 2, so steps 3 and 4 are made again.
    assert go_on(interrupted, monkeypatch) == tokens_of(interrupted, 5)
    lines = {line["step"]: line for line in metrics(interrupted[0])}
    assert [lines[step].get("rollout/restored", 0) for step in (3, 4, 5)] == [4, 4, 0]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda file: flip(file, -9), "generated again: the checksum of some is wrong", id="flipped"),
        pytest.param(
            lambda file: file.write_bytes(file.read_bytes()[:-9]), "is damaged after", id="cut", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda file: flip(file, 9),
            "is of another run or of other settings, or damaged",
            id="of another run",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_damaged_roll_outs_are_generated_again(interrupted, monkeypatch, caplog, damage, said):
    generated = go_on(interrupted, monkeypatch, lambda folder: damage(folder / "finished" / "3.rollouts"))
    assert generated == tokens_of(interrupted, 4, 5)
    assert sum(said in line for line in caplog.messages) == 1


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


@pytest.mark.slow
def test_roll_outs_of_weights_that_come_out_different_are_not_used(interrupted, monkeypatch, caplog):
    def change(folder: Path) -> None:
        from coalign.engine.rollouts.journal import decode_line, encode_line

        file = folder / "finished" / "3.rollouts"
        first, _, rest = file.read_bytes().partition(b"\n")
        head = decode_line(first + b"\n")
        assert head is not None and head["made"]
        file.write_bytes(encode_line(head | {"made": "0" * 16}) + rest)

    assert go_on(interrupted, monkeypatch, change) == tokens_of(interrupted, 4, 5)
    assert any("step 3 has other metrics than before" in line for line in caplog.messages)
