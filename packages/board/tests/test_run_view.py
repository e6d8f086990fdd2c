"""What `coalign watch` shows of a run folder: its texts, and its screen."""

import asyncio
import html
import json
import re

import pytest

from coalign.files import write_atomically
from coalign.run_files.lock import lock_folder
from coalign.run_files.state import StateFile
from coalign_board.run_view import MAX_CURVE_POINTS, MetricsHistory, RunView


def append(path, *records):
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def metrics(step, reward):
    shares = dict.fromkeys(("rollout", "sync", "checkpoint", "evaluation", "hooks", "start", "restart", "redone"), 0.0)
    goodput = {f"goodput/{name}": share for name, share in (shares | {"trained": 0.75, "rollout": 0.25}).items()}
    return {"step": step, "reward/mean": reward, "loss/value": -0.5, "time/step": 2.0, "time/run": 100.0, **goodput}


def sample(step, response):
    named = {"phase": "train", "group": step, "index": 0, "prompt": "1 + 1 =", "reward": 0.5, "status": "ok"}
    return {"step": step, **named, "response": response}


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that has yet to take its first step."""
    (tmp_path / "config.yaml").touch()
    (tmp_path / "log.txt").write_text("loading policy\n")
    StateFile(tmp_path).note("running", steps=9)
    return tmp_path


def test_a_run_is_shown_before_its_first_step_while_it_goes_and_after_it(folder):
    with lock_folder(folder):
        view = RunView(folder)
        assert view.update() == {"log"}
        assert view.describe_state().startswith("no step yet · running, since 0:00:0")
        assert view.format_step() == view.format_goodput() == "" and not view.list_metrics() and not view.list_plots()
        append(folder / "metrics.jsonl", metrics(1, 0.25), metrics(2, 0.5))
        append(folder / "samples.jsonl", sample(1, "three"), sample(2, "Two"))
        assert view.update() == {"metrics", "samples"}
        assert view.describe_state().startswith("step 2 of 9 · running, since")
        assert view.format_step().startswith("reward 0.500 ▲ │ loss -0.500 │ 2.0s")
        assert view.format_goodput().startswith("goodput: 75% of 0:01:40 went into tokens")
        row = next(row for row in view.list_metrics() if row.name == "reward/mean")
        assert (row.last, row.previous, row.first) == ("0.500", "0.250", "0.250")
        plot, curves = view.list_plots()[0]
        assert (plot.title, curves) == ("Reward", {"reward/mean": [(1, 0.25), (2, 0.5)]})
    assert view.update() == set()
    assert view.describe_state() == "step 2 of 9 · failed"


def test_a_run_that_is_resumed_is_read_again(folder):
    append(folder / "metrics.jsonl", metrics(1, 0.25), metrics(2, 0.5))
    view = RunView(folder)
    view.update()
    with write_atomically(folder / "metrics.jsonl") as aside:
        append(aside, metrics(1, 0.25))
    append(folder / "metrics.jsonl", metrics(2, 0.125))
    assert view.update() == {"metrics"}
    assert view.metrics.curves["reward/mean"] == [(1, 0.25), (2, 0.125)]
    assert view.format_step().startswith("reward 0.125 ▼")


def test_samples_are_found_by_what_they_say(folder):
    append(folder / "samples.jsonl", sample(1, "three"), sample(2, "Two [bold]"), sample(2, "tWo and three"))
    view = RunView(folder)
    view.update()
    find = lambda text: [found["response"] for found in view.find_samples(text)]  # noqa: E731
    assert find("") == ["tWo and three", "Two [bold]", "three"]
    assert find("TWO") == ["tWo and three", "Two [bold]"] and find("step 1 ") == ["three"] and find("four") == []


def test_a_sample_is_headed_by_its_group_and_shows_the_question():
    watch = pytest.importorskip("coalign_board.watch")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And 2 + 2?"}]
    shown = {"phase": "eval", "group": -3, "prompt": "<|system|>Be brief.", "row": {"messages": asked}}
    record = sample(2, "four") | shown
    text = watch.format_sample(record).plain
    assert text == "\nstep 2 · eval · evaluation prompt 3, sample 0 · reward 0.500 · ok\nAnd 2 + 2?\nfour\n"
    del record["group"]
    assert "· no group, sample 0 ·" in watch.format_sample(record).plain


def test_long_curves_lose_points_and_keep_their_ends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": step, "loss": float(step)} for step in range(2 * MAX_CURVE_POINTS)))
    history = MetricsHistory(path)
    history.update()
    curve = history.curves["loss"]
    assert len(curve) <= MAX_CURVE_POINTS and curve[0] == (0, 0.0) and curve[-1] == (3999, 3999.0)
    assert curve == sorted(curve)


@pytest.mark.parametrize("name", ["missing", "other"])
def test_what_is_no_run_folder_is_refused_in_one_line(tmp_path, name):
    (tmp_path / "other").mkdir()
    with pytest.raises((FileNotFoundError, ValueError), match=f"{name}( is no run folder|$)"):
        RunView(tmp_path / name)


def read_screen(app):
    """The lines that the terminal shows."""
    pieces = re.findall(r'<text [^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', app.export_screenshot())
    lines = {}
    for x, y, text in sorted((float(x), float(y), html.unescape(text)) for x, y, text in pieces):
        lines[y] = lines.get(y, "").ljust(round(x / 12.2)) + text.replace("\xa0", " ")
    return "\n".join(lines[y] for y in sorted(lines))


@pytest.mark.slow
def test_the_screen_follows_a_run_and_obeys_its_keys(folder):
    watch = pytest.importorskip("coalign_board.watch")

    async def use():
        view = RunView(folder)
        view.update()
        app = watch.WatchScreen(view)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            shown = read_screen(app)
            assert "no step yet · failed" in shown and "Curves" in shown and "Search samples" in shown
            append(folder / "metrics.jsonl", metrics(1, 0.25), metrics(2, 0.5))
            append(folder / "samples.jsonl", sample(1, "three"), sample(2, "[two]\x1b[31m\a"))
            app.follow()
            await pilot.pause()
            shown = read_screen(app)
            assert "step 2 of 9" in shown and "reward 0.500 ▲" in shown and "goodput: 75%" in shown
            assert "Reward" in shown and "Loss" in shown and re.search("[\u2801-\u28ff]", shown)
            await pilot.press("m")
            assert re.search(r"reward/mean +0\.500 +0\.250 +0\.250", read_screen(app))
            await pilot.press("ctrl+end", "up", "up")
            await pilot.pause()
            assert "Mean reward of the samples that are trained on. [reward]" in read_screen(app)
            await pilot.press("s")
            assert "2 samples, the newest first" in read_screen(app) and "[two]\ufffd[31m\ufffd" in read_screen(app)
            await pilot.press("slash", *"thr")
            await pilot.pause()
            shown = read_screen(app)
            assert "1 sample," in shown and "three" in shown and "[two]" not in shown and "End search" in shown
            await pilot.press("escape", "l")
            await pilot.pause()
            shown = read_screen(app)
            assert "loading policy" in shown and "End search" not in shown
            await pilot.press("n")
            assert app.query_one("#pages").active == "curves"
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(use())
