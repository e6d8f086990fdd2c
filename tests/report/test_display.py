"""What people see, on a terminal, in a pipe and when they asked for quiet."""

import io
import logging
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.text import Text

from coalign.report.display import Display
from coalign.report.step_line import (
    ROLLOUTS,
    ROWS,
    RunTotals,
    _sum_phase_seconds,
    describe_goodput,
    format_fields,
    format_goodput,
    format_idle,
    format_number,
    format_seconds,
)
from coalign.types import Sample, Status

METRICS = {
    "reward/mean": 0.4123,
    "loss/value": -0.0131,
    "loss/kl_ref": 0.0021,
    "tokens/response": 96.0,
    "throughput/generated": 1234.4,
    "throughput/trained": 1300.0,
    "time/step": 5.6,
    "time/policy.generate": 2.1,
    "time/reference.forward_step": 0.3,
    "time/reward.forward_step": 0.1,
    "time/trainer.train_step": 2.9,
    "time/rollout": 2.5,
    "time/train": 3.0,
    "time/sync": 0.01,
    "idle/policy": 0.62,
    "idle/trainer": 0.4821,
    "idle/reward": 0.98,
}


def display(*, terminal=False, quiet=False, width=60):
    consoles = [
        Console(file=io.StringIO(), force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False)
        for _ in range(2)
    ]
    return Display(quiet=quiet, out=consoles[0], err=consoles[1])


def text(console):
    return console.file.getvalue()


@contextmanager
def logging_to(shown):
    """A logger whose records go to a display."""
    logger = logging.getLogger("coalign.test_display")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := shown.handler())
    yield logger
    logger.removeHandler(handler)


def run(shown):
    shown.start(0, 200)
    shown.phase("generate 41/64 samples")
    if shown._bar:
        shown._bar.refresh()
    shown.step(1, METRICS)
    shown.step(2, METRICS | {"reward/mean": 0.5})
    shown.finish(Path("runs/x"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0.4123, "0.412"), (-0.0131, "-0.013"), (0.0021, "0.0021"), (2.1e-6, "2.1e-06"), (0.0, "0.000")),
        *((1.0, "1.000"), (12.0, "12"), (8, "8"), (151_669, "151,669"), (96.25, "96.2"), (123.4, "123")),
        *((-12345.6, "-12,346"), (float("nan"), "nan"), (float("-inf"), "-inf")),
    ],
)
def test_numbers_are_short(value, shown):
    assert format_number(value) == shown


def test_the_line_of_a_step():
    fields = format_fields(METRICS, {"reward/mean": 0.3, "loss/value": 1.0})
    assert fields == ["reward 0.412 ▲", "loss -0.013", "kl 0.0021", "len 96", "1,234 tok/s"]
    assert format_seconds(METRICS) == "5.6s (gen 2.1 score 0.4 train 2.9 sync 0.0)"
    assert format_fields(METRICS, {"reward/mean": 0.5})[0] == "reward 0.412 ▼"
    assert format_fields(METRICS, {"reward/mean": 0.4123})[0] == "reward 0.412"


def test_idle_models_are_those_that_generate_or_learn():
    assert format_idle(METRICS) == "idle policy 62% trainer 48%"
    assert format_idle({"time/eval": 4.2}) == ""


def test_totals_weigh_steps_by_their_time():
    totals = RunTotals()
    totals.add(METRICS)
    totals.add({"time/eval": 3.0, "throughput/generated": 1e6})
    totals.add({"time/step": 1.0, "time/policy.generate": 0.9, "idle/policy": 0.1, "throughput/generated": 34.4})
    assert totals.rows() == {
        "calls, which may overlap": "gen 45% score 6% train 44%",
        "idle": "policy 54% trainer 41%",
        "tokens/s": "generated 1,053 trained 1,103",
    }
    assert RunTotals().rows() == {}


GOODPUT = {
    "goodput/trained": 0.612,
    "goodput/rollout": 0.246,
    "goodput/sync": 0.096,
    "goodput/checkpoint": 0.0,
    "goodput/start": 0.046,
    "time/run": 7985.2,
}


def test_goodput_is_one_figure_of_a_step_and_sentences_at_the_end():
    assert format_goodput(GOODPUT) == "goodput 61%" and format_goodput(METRICS) == ""
    lines = [
        "goodput: 61% of 2:13:05 went into tokens that were trained on",
        "the rest of the time: waiting for rollouts 25%, weight sync 10%, start-up 4%",  # together 100 %
    ]
    assert describe_goodput(GOODPUT) == lines
    dropped = {"tokens_dropped/filter": 0.07, "tokens_dropped/cut": 0.012, "tokens_dropped/expired": 0.0}
    assert describe_goodput(GOODPUT | dropped)[2:] == [
        "of the generated tokens 8.2% were dropped: by the filter 7.0%, cut 1.2%"
    ]
    assert describe_goodput({}) == []
    shown = display()
    shown.finish(Path("runs/x"), GOODPUT)
    assert text(shown.out).splitlines()[:2] == lines


def test_accuracy_and_skipped_updates_are_shown():
    fields = format_fields({"loss/value": 0.69, "loss/accuracy": 0.75, "loss/skipped_updates": 1.0}, {})
    assert fields == ["loss 0.690", "acc 0.750", "skipped 1"]
    shown = display()
    shown.start(0, 1)
    shown.step(1, {"loss/accuracy": 0.75, "time/step": 1.0})
    shown.finish(Path("runs/x"))
    assert "loss/accuracy" in text(shown.out)


def test_rows_are_never_folded():
    shown = display(width=20)
    shown.show(Text("a prompt that is longer than the screen"))
    assert text(shown.out) == "a prompt that is longer than the screen\n"


def test_fields_that_a_step_lacks_are_left_out():
    assert format_fields({}, {}) == [] and format_seconds({}) == ""
    assert format_fields({"loss/nll": 1.0, "samples/dropped": 0.0}, {}) == []
    assert format_fields({"samples/dropped": 3.0, "eval/mean": float("nan")}, {"eval/mean": 1.0}) == [
        "eval nan",
        "dropped 3",
    ]
    assert format_seconds({"time/eval": 4.2}) == "4.2s"
    assert format_seconds({"time/step": 4.2}) == "4.2s"


def test_phases_sum_the_calls_of_all_models():
    seconds = _sum_phase_seconds(
        METRICS | {"time/value_trainer.train_step": 1.0, "time/eval": 2.0, "memory/policy.generate": 9}
    )
    assert seconds == pytest.approx({"gen": 2.1, "score": 0.4, "train": 3.9, "sync": 0.01, "eval": 2.0})


def test_a_pipe_gets_whole_plain_lines():
    shown = display()
    run(shown)
    lines = text(shown.out).splitlines()
    assert lines[0].startswith("step   1/200 │ reward 0.412 │ loss -0.013 │") and lines[0].endswith("trainer 48%")
    assert lines[1].startswith("step   2/200 │ reward 0.500 ▲")
    assert "\x1b" not in text(shown.out) and "generate 41" not in text(shown.out)
    assert any(line.split() == ["reward/mean", "0.412", "0.500"] for line in lines)
    assert lines[-2].endswith("results in runs/x") and lines[-1] == "next: coalign board runs/x"
    assert text(shown.err) == ""


def test_what_comes_next_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    shown = display()
    shown.finish(tmp_path)
    assert text(shown.out).splitlines()[-1] == f"next: coalign chat {tmp_path} · coalign board {tmp_path}"


@pytest.mark.parametrize("width", [30, 80, 100, 200])
def test_the_line_of_a_step_fits_the_terminal(width):
    shown = display(terminal=True, width=width)
    shown.step(1, METRICS)
    line = re.sub(r"\x1b\[[0-9;]*m", "", text(shown.out)).rstrip("\n")
    assert "\n" not in line and len(line) <= width and line.startswith("step 1/0 │ reward 0.412")
    assert line.endswith("trainer 48%") is (width == 200) and not line.endswith("│")


def test_columns_stand_below_each_other():
    shown = display()
    for step, loss in enumerate((-0.0131, 0.25, 0.0, 12.5), 1):
        shown.step(step, METRICS | {"loss/value": loss, "reward/mean": step / 4, "loss/kl_ref": step / 1000})
    lines = text(shown.out).splitlines()[1:]  # whatever stood in the first one is known then
    assert [line[: line.index("len")] for line in lines] == [
        "step 2/0 │ reward 0.500 ▲ │ loss  0.250 │ kl 0.0020 │ ",
        "step 3/0 │ reward 0.750 ▲ │ loss  0.000 │ kl 0.0030 │ ",
        "step 4/0 │ reward 1.000 ▲ │ loss 12.500 │ kl 0.0040 │ ",
    ]


def test_steps_between_get_no_line(caplog):
    shown = display()
    shown.start(0, 7, every=3)
    with caplog.at_level(logging.INFO, logger="coalign"):
        for step in range(1, 8):
            shown.step(step, METRICS)
        shown.step(7, {"eval/mean": 0.5, "time/eval": 1.0})
    numbers = [int(re.match(r"step (\d)", line)[1]) for line in text(shown.out).splitlines()]
    assert numbers == [3, 6, 7, 7] and len(caplog.records) == 4
    assert shown._totals.rows()["calls, which may overlap"]


def test_a_loop_that_reads_waits_for_data():
    shown = display(terminal=True, width=160)
    shown.start(0, 2, waiting=ROWS)
    shown.phase("rollout")
    shown._bar.refresh()
    shown.finish(Path("runs/x"), GOODPUT)
    assert text(shown.out).count(ROWS) >= 2 and ROLLOUTS not in text(shown.out)


def test_log_lines_move_the_bar_down():
    shown = display(terminal=True)
    with logging_to(shown) as logger:
        logger.warning("before")
        shown.start(0, 2)
        logger.warning("while the bar is there")
        shown.close()
        logger.warning("after")
    assert "while" in text(shown.out) and "while" not in text(shown.err)
    assert "before" in text(shown.err) and "after" in text(shown.err)


def test_a_terminal_gets_a_bar_with_pace_phase_and_gets_its_cursor_back():
    shown = display(terminal=True, width=160)
    run(shown)
    out = text(shown.out)
    assert "generate 41/64 samples" in out and "2/200" in out and "s/step, " in out and " left" in out
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l") >= 0
    shown.close()
    assert text(shown.out) == out


def test_quiet_leaves_the_summary_and_warnings():
    shown = display(terminal=True, quiet=True)
    with logging_to(shown) as logger:
        run(shown)
        logger.info("a remark")
        logger.warning("a warning")
    assert "step" not in text(shown.out).replace("time/step", "") and "results in runs/x" in text(shown.out)
    assert "a warning" in text(shown.err) and "a remark" not in text(shown.err)


def test_a_run_that_goes_on_counts_from_where_it_was():
    shown = display(terminal=True, width=160)
    shown.start(150, 200)
    assert "150/200" in text(shown.out)
    shown.close()


def test_step_lines_are_logged_once_and_shown_once(caplog):
    shown = display()
    logger = logging.getLogger("coalign")
    handler = shown.handler()
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO, logger="coalign"):
        shown.start(0, 9)
        shown.step(1, METRICS)
    logger.removeHandler(handler)
    assert [record.getMessage() for record in caplog.records] == [text(shown.out).rstrip("\n")]
    assert text(shown.err) == ""


def test_warnings_show_the_error_that_caused_them():
    shown = display()
    with logging_to(shown) as logger:
        try:
            raise KeyError("answer")
        except KeyError:
            logger.warning("reward [failed] " + "x" * 100, exc_info=True)
    first, *others = text(shown.err).splitlines()
    assert first == "warning: reward [failed] " + "x" * 100 and others[0] == "KeyError: 'answer'"


def test_a_sample_is_shown_as_it_is():
    shown = display(width=80)
    mask = torch.tensor([False, True, True])
    sample = Sample(3, 1, torch.zeros(3), mask, torch.zeros(3), prompt="2+2? [bold]", response=":smile: 4\n#### 4")
    shown.sample(sample)
    assert "no reward · 2 tokens" in text(shown.out)
    sample.reward, sample.rewards, sample.status = 0.0, {"math": 1.0, "form": -1.0}, Status.TRUNCATED
    shown.sample(sample)
    out = text(shown.out)
    assert "group 3, sample 1" in out and "[bold]" in out and ":smile: 4" in out and "#### 4" in out
    assert "reward 0.000 (math 1.000, form -1.000) · 2 tokens · truncated" in out


def test_results_and_remarks_take_different_ways():
    shown = display(width=20)
    shown.show('{"response": "' + "x" * 50 + '"}')
    shown.note("a remark that is longer than the console")
    assert text(shown.out) == '{"response": "' + "x" * 50 + '"}\n'
    assert text(shown.err) == "a remark that is longer than the console\n"


def test_table_and_progress():
    shown = display(terminal=True, width=120)
    shown.table("evaluation", {"eval/mean": 0.41, "eval/response_tokens": 123.0})
    out = text(shown.out)
    assert "evaluation" in out and "0.410" in out and "123" in out
    with shown.progress("generating", 10) as advance:
        advance(4)
        advance(6)
    assert "generating" in text(shown.err) and "10/10" in text(shown.err)
    plain = display()
    with plain.progress("generating", 10) as advance:
        advance(10)
    assert text(plain.err) == "" and text(plain.out) == ""


def test_consoles_default_to_the_standard_streams(capsys):
    shown = Display()
    shown.show("result")
    shown.note("remark")
    assert capsys.readouterr() == ("result\n", "remark\n")
