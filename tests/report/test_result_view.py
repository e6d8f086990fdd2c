"""What is shown of a finished run in a prompt and in a notebook."""

from pathlib import Path
from xml.etree import ElementTree

from coalign.api import TrainResult
from coalign.report.result_view import describe_metrics, draw_curve

RUN = [{"step": step, "loss/value": 1.0, "reward/mean": step / 4} for step in range(1, 4)]


def test_a_result_is_one_short_line():
    result = TrainResult(Path("runs/x"), RUN * 500, Path("runs/x/model"))
    assert repr(result) == "TrainResult(runs/x: 3 steps, reward/mean 0.250 → 0.750; model runs/x/model)"
    assert repr(TrainResult(Path("r"), [], None)) == "TrainResult(r: 0 steps; model None)"


def test_the_curve_has_a_point_for_each_step_and_ends_at_the_top():
    picture = ElementTree.fromstring(draw_curve(RUN))
    points = [tuple(map(float, point.split(","))) for point in picture.find("polyline").get("points").split()]
    assert points == [(0.0, 90.0), (180.0, 45.0), (360.0, 0.0)]
    assert picture.find("title").text == "reward/mean: 0.250 to 0.750, steps 1 to 3"


def test_what_is_no_number_is_no_point():
    rows = [*RUN, {"step": 4, "reward/mean": float("nan")}, {"step": 5, "reward/mean": None}]
    assert describe_metrics(rows) == "5 steps, reward/mean 0.250 → 0.750" and draw_curve(rows) == draw_curve(RUN)
    assert draw_curve(RUN[:1]) == "" and draw_curve([]) == ""
    assert "<svg" in TrainResult(Path("<r>"), RUN, None)._repr_html_()
    assert "<r>" not in TrainResult(Path("<r>"), RUN, None)._repr_html_()
