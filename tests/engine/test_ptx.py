"""Language modelling on other data, beside what a run trains on."""

from pathlib import Path

import pytest

from coalign.recipes.sft import SFT
from coalign.types import Total
from tests.data.reading import write
from tests.runs import metrics, run, run_in_two_parts, run_to_end, settings, weights_hash


def with_ptx(directory: Path, algorithm: str, *, kind: str = "documents", **runtime) -> dict:
    config = settings(directory, algorithm, eval_at_start=False, **runtime)
    config["data"].pop("eval")
    texts = write(
        directory / "ptx.jsonl", [{"text": f"{i} is a number.", "prompt": "", "answer": "x"} for i in range(9)]
    )
    return config | {"ptx": {"data": texts, "coef": 0.5, "rows_per_step": 2, "kind": kind}}


@pytest.mark.parametrize("algorithm", ["ppo", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sft", "grpo"))])
def test_every_step_reports_it_and_learns_from_it(tmp_path, algorithm):
    config = with_ptx(tmp_path, algorithm, steps=2)
    assert all(4.0 < line["loss/ptx"] < 8.0 for line in run_to_end(config))  # about log 320
    plain = {k: v for k, v in config.items() if k != "ptx"} | {"output": str(tmp_path / "plain")}
    assert run_to_end(plain)[0]["loss/value"] == metrics(config)[0]["loss/value"]
    assert metrics(plain)[0]["tokens/trained"] == metrics(config)[0]["tokens/trained"]
    assert weights_hash(plain, 2) != weights_hash(config, 2)


def test_a_stopped_run_goes_on_with_the_same_rows(tmp_path):
    whole = with_ptx(tmp_path, "sft")
    run(whole)
    halves = run_in_two_parts(whole)
    assert weights_hash(halves, 4) == weights_hash(whole, 4)
    assert [line["loss/ptx"] for line in metrics(halves)] == [line["loss/ptx"] for line in metrics(whole)]
    without = {k: v for k, v in halves.items() if k != "ptx"}
    with pytest.raises(ValueError, match="is of a run with `ptx`; this one is without it"):
        run(without, "runtime.steps=6")


class Unaware(SFT):
    """A flow of one's own that hands on its batch alone."""

    def train_flow(self, batch):
        return self.trainer.train_step(batch)


class Idle(SFT):
    """A flow that trains nothing."""

    def train_flow(self, batch):
        return self.apply(count, batch)


def count(loss_mask):
    return {"count": Total(float(loss_mask.sum()))}


def test_a_flow_need_not_ask_for_it(tmp_path):
    config = with_ptx(tmp_path, "sft") | {"algorithm": "tests.engine.test_ptx:Unaware", "loss": {"fn": "sft"}}
    assert all(line["loss/ptx"] > 0 for line in run_to_end(config))
    with pytest.raises(ValueError, match=r"ptx: train_flow never calls `self\.trainer\.train_step`"):
        run(config | {"algorithm": "tests.engine.test_ptx:Idle", "output": str(tmp_path / "idle")})
