"""Curves of long files: no spike is lost, increments are what reading at once gives, a part is read step by step."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.files import write_atomically
from coalign_board.curves import MOST_BUCKETS, MetricCurves
from coalign_board.readers.metrics import CurveReader


def write(path, values, first=1, mode="w"):
    with open(path, mode) as file:
        for step, value in enumerate(values, start=first):
            file.write(json.dumps({"step": step, "x": value, "tokens/trained": 2.0, "time/step": 0.5}) + "\n")


def read(path):
    curves = MetricCurves(path)
    assert curves.read()
    return curves


def select(curves, name="x"):
    return curves.series[name].select(0, len(curves.steps), is_exact=curves.width == 1)


def test_few_steps_are_kept_as_they_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [3.0, None, 1.25])
    curves = read(path)
    assert select(curves) == {"mean": [3.0, None, 1.25], "holes": [1]}
    assert list(curves.steps) == [1, 2, 3]
    assert list(curves.tokens) == [2.0, 4.0, 6.0] and list(curves.seconds) == [0.5, 1.0, 1.5]
    assert curves.latest["x"] == 1.25 and curves.newest == 3


@settings(max_examples=8, deadline=None)
@given(
    steps=st.integers(MOST_BUCKETS + 1, 3 * MOST_BUCKETS),
    place=st.floats(0, 1, exclude_max=True),
    parts=st.lists(st.floats(0, 1), max_size=3),
)
def test_no_spike_is_lost_however_the_file_grew(tmp_path_factory, steps, place, parts):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    values = [1.0] * steps
    values[int(place * steps)] = 1e6
    text = "".join(json.dumps({"step": i, "x": value}) + "\n" for i, value in enumerate(values, start=1)).encode()
    curves = MetricCurves(path)
    for end in sorted(int(part * len(text)) for part in parts):  # most of them cut a line
        path.write_bytes(text[:end])
        curves.read()
    path.write_bytes(text)
    curves.read()
    found = select(curves)
    assert len(curves.steps) <= MOST_BUCKETS and curves.steps[-1] == steps
    assert max(found["high"]) == 1e6 and found["high"].count(1e6) == 1
    assert sum(curves.series["x"].count) == steps
    bucket = found["high"].index(1e6)
    assert curves.find_bucket(int(place * steps) + 1) == bucket
    assert min(found["low"]) == 1.0


def test_a_part_of_a_long_curve_is_read_step_by_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [float(i % 7) for i in range(1, 5001)])
    curves = read(path)
    assert curves.width == 8
    part = curves.read_part(["x"], 2000, 2100)
    assert part.width == 1
    place = list(part.steps).index(2001)
    assert select(part)["mean"][place : place + 7] == [float(i % 7) for i in range(2001, 2008)]
    assert part.tokens[place] == 2 * 2001 and part.seconds[place] == 0.5 * 2001
    assert part.steps[0] <= 2000 and part.steps[-1] >= 2100 and len(part.steps) < 120


def test_values_that_are_no_finite_numbers_are_holes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "x": 1.0}', '{"step": 2, "x": "nan"}', '{"step": 3, "x": NaN}', '{"step": 4, "x": 1e999}']
    lines += ['{"step": 5, "x": [1]}', "damaged", '{"step": "six", "x": 6}', '{"step": 7, "x": 7, "y": 1}']
    path.write_text("\n".join(lines) + "\n")
    curves = read(path)
    assert select(curves)["mean"] == [1.0, None, None, None, None, None, 7.0]
    assert select(curves)["holes"] == [1, 2, 3, 4]
    assert select(curves, "y")["mean"] == [None] * 6 + [1.0]
    json.dumps(CurveReader().read(tmp_path, {"names": '["x"]'}), allow_nan=False)


def test_a_resumed_run_replaces_its_curves(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1.0, 2.0, 3.0])
    curves = read(path)
    with write_atomically(path) as aside:
        write(aside, [1.0, 2.0])
    write(path, [9.0], first=3, mode="a")
    assert curves.read() and curves.generation == 1
    assert select(curves)["mean"] == [1.0, 2.0, 9.0]
    path.unlink()
    assert curves.read() and len(curves.steps) == 0


def test_an_answer_has_what_is_new_since_the_last_one(tmp_path):
    path, reader = tmp_path / "metrics.jsonl", CurveReader()
    write(path, [1.0, 2.0])
    first = reader.read(tmp_path, {"names": '["x", "unknown"]'})
    assert first["series"] == {"x": {"mean": [1.0, 2.0], "holes": []}} and first["complete"]
    write(path, [3.0, 4.0], first=3, mode="a")
    since = f"{first['generation']}:{first['width']}:{first['buckets'][-1]}"
    second = reader.read(tmp_path, {"names": '["x"]', "since": since})
    assert second["steps"] == [2, 3, 4] and second["series"]["x"]["mean"] == [2.0, 3.0, 4.0]
    assert second["tokens"] == [4.0, 6.0, 8.0]
    whole = reader.read(tmp_path, {"names": '["x"]', "since": "7:1:1"})  # of a file that was replaced
    assert whole["series"]["x"]["mean"] == [1.0, 2.0, 3.0, 4.0]


def test_steps_that_are_logged_now_and_then_have_no_empty_points(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1000, 2001, 100):
            file.write(json.dumps({"step": step, "x": float(step)}) + "\n")
    answer = CurveReader().read(tmp_path, {"names": '["x"]'})
    assert answer["steps"] == list(range(1000, 2001, 100)) == answer["series"]["x"]["mean"]


def test_an_answer_says_what_the_metrics_mean(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/loss/value": 1.0, "mine/seen": 2.0}\n')
    reader, names = CurveReader(), json.dumps(["eval/loss/value", "mine/seen"])
    answer = reader.read(tmp_path, {"names": names})
    assert answer["meanings"]["eval/loss/value"]["en"].startswith("eval: The number that is minimised")
    assert set(answer["meanings"]["eval/loss/value"]) == {"en", "zh"} and answer["meanings"]["mine/seen"] is None
    since = f"{answer['generation']}:{answer['width']}:0"
    assert reader.read(tmp_path, {"names": names, "since": since})["meanings"] == {}
