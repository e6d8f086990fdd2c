"""Pictures of a run: what is drawn, from whatever metrics a run has."""

import json

import pytest

from coalign.report.plots import PLOTS, choose_curves, format_tick, new_figure, plot_run, smooth


def write(folder, rows, tail=""):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + tail)
    return sorted(path.name for path in plot_run(folder))


def test_one_picture_for_each_kind_of_metric_that_there_is(tmp_path):
    from matplotlib import image

    rows = [
        {
            "step": step,
            "reward/mean": step / 40,
            "loss/value": 0.1,
            "loss/kl_ref": 0.01,
            "tokens/response": 90.0,
            "tokens/response_max": 128.0,
            "loss/accuracy": 0.75,
            "loss/nll": 50.0,
            "throughput/trained": 1000.0,
            "throughput/samples": 8.0,
            "time/step": 5.0,
            "time/rollout": 2.0,
            "time/train": 2.5,
        }
        for step in range(1, 41)
    ]
    rows[9]["eval/mean"] = 0.5
    drawn = write(tmp_path, rows)
    names = ("accuracy", "eval", "kl", "length", "loss", "nll", "reward", "samples", "throughput", "time")
    assert drawn == [f"{name}.png" for name in names]  # the nll does not flatten the loss; an axis has one unit
    for name in drawn:
        picture = image.imread(tmp_path / "plots" / name)[..., :3]
        assert picture.shape[0] > 300 and picture.shape[1] > 600
        # A curve is neither black, white nor grey.
        assert (picture.max(-1) - picture.min(-1) > 0.3).sum() > 30, name


@pytest.mark.parametrize("name", ["reward/mean", "eval/pass@4", "time/step", "loss/nll"])
def test_a_single_metric_of_a_single_step_is_enough(tmp_path, name):
    assert len(write(tmp_path, [{"step": 1, name: 1.0}])) == 1


def test_parts_of_the_reward_are_drawn_with_it_unless_they_are_it():
    curve, other = [(1, 0.5), (2, 0.6)], [(1, 0.1), (2, 0.2)]
    (plot,) = [plot for plot in PLOTS if plot.file == "reward"]
    names = {"reward/math/mean": curve, "reward/form/mean": other, "reward/mean": curve, "reward/std": other}
    assert list(choose_curves(plot, names)) == ["reward/mean", "reward/form/mean"]


def test_gaps_and_unknown_names_do_no_harm(tmp_path):
    rows = [{"step": 1, "reward/mean": None, "mine": 1.0}, {"step": 2, "reward/mean": 0.5}, {"step": 3}]
    assert write(tmp_path, rows) == ["reward.png"]
    assert write(tmp_path, [{"step": 1, "reward/mean": None}]) == []


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    assert write(tmp_path, [{"step": 1, "reward/mean": 0.5}], tail='{"step": 2, "rew') == ["reward.png"]


def test_nothing_logged_nothing_drawn(tmp_path):
    assert plot_run(tmp_path) == [] and not (tmp_path / "plots").exists()


def test_phases_that_begin_late_are_drawn(tmp_path):
    rows = [{"step": 1, "time/step": 1.0}, {"step": 2, "time/step": 1.0, "time/rollout": 0.4, "time/eval": 9.0}]
    assert write(tmp_path, rows) == ["time.png"]


def test_shares_of_the_time_fill_their_picture(tmp_path):
    rows = [{"step": step, "goodput/trained": 0.25, "goodput/rollout": 0.75} for step in (1, 2)]
    assert write(tmp_path, rows) == ["goodput.png"]


def test_smoothing_keeps_a_straight_line_inside_and_constants_everywhere():
    assert smooth([2.0] * 7, 3) == [2.0] * 7
    assert smooth([0.0, 1.0, 2.0, 3.0, 4.0], 1) == [0.5, 1.0, 2.0, 3.0, 3.5]
    assert smooth([1.0, 5.0], 0) == [1.0, 5.0]


RANGES = [(1e-6, 5e-6), (-3e-7, 2e-7), (1e9, 4e9), (1_000_000.1, 1_000_000.5), (0.0, 3e-12), (2e5, 9e5), (0.1, 0.3)]


def list_ticks(figure):
    """The exponents beside the axes of a figure, and the texts of all ticks of each axis."""
    figure.canvas.draw()
    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
    return "".join(a.get_offset_text().get_text() for a in axes), [
        [t.get_text() for t in a.get_ticklabels()] for a in axes
    ]


@pytest.mark.parametrize("ends", RANGES)
def test_no_exponent_of_an_axis_stands_where_the_title_is(ends):
    figure, axes = new_figure("Loss", "")
    axes.plot([5_000_000, 9_000_000], ends)
    exponent, ticks = list_ticks(figure)
    assert exponent == "" and all(len(set(texts)) == len(texts) > 1 for texts in ticks)


@pytest.mark.parametrize(("value", "text"), [(3e-06, "3e-6"), (0.1 + 0.2, "0.3"), (2e7, "20000000"), (1e-10, "1e-10")])
def test_a_tick_is_short(value, text):
    assert format_tick(value) == text
