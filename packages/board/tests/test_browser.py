"""The board in a browser: every page, keys, languages, small screens, runs that are being written, and its limits."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from coalign.files import write_atomically
from coalign.run_files.control import ControlResult, read_request, write_answer
from coalign.run_files.lock import lock_folder
from packages.board.tests.axe import find_barriers
from packages.board.tests.folders import add_log, add_samples, add_steps, fail, make_long_run, make_run
from tests.runs import command, settings, wait_for

pytestmark = pytest.mark.slow

COMPARED = "#/compare?runs=" + json.dumps(["sums/seed0", "sums/seed1", "other run"]).replace(" ", "%20")
PAGES = ["#/", "#/run/other%20run", *(f"#/run/sums%2Fseed0/{name}" for name in ("overview", "log", "configuration"))]
PAGES += [COMPARED]


@pytest.fixture
def runs(tmp_path) -> Path:
    root = tmp_path / "runs"
    for seed in (0, 1):
        folder = make_run(root / "sums" / f"seed{seed}", seed=seed)
        add_steps(folder, range(1, 21), **{"eval/mean": lambda step: step / 50 if step % 5 == 0 else None})
        add_samples(folder, 8)
    stall = root / "sums" / "seed0" / "stalls" / "20261124-114500"
    stall.mkdir(parents=True)
    (stall / "report.txt").write_text("no process has been busy for 900 s\n")
    (stall / "driver.txt").write_text("File run.py, line 3\n")
    failed = make_run(root / "other run", lr=2e-4)
    add_steps(failed, range(1, 5))
    fail(failed, "Traceback\nValueError: no such thing")
    return root


@pytest.fixture
def board(start_board, runs):
    return start_board(runs)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("locale", ["en-GB", "zh-CN"])
def test_every_page(board, open_page, width, colours, locale):
    watched = open_page(board, viewport={"width": width, "height": 800}, color_scheme=colours, locale=locale)
    page = watched.page
    for address in PAGES:
        watched.show(address)
        assert page.locator("h1").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"{address} is wider than the screen"
        )
        missing = page.evaluate(
            r"document.body.innerText.match(/\b(?:shell|runs|cause|overview|compare|log(?!\.txt))\.[a-z_]+\b/g)"
        )
        assert not missing, missing


@pytest.mark.parametrize(("width", "colours"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_no_page_keeps_people_out(board, open_page, width, colours):
    watched = open_page(board, viewport={"width": width, "height": 800}, color_scheme=colours)
    for address in PAGES:
        watched.show(address)
        assert find_barriers(watched.page) == [], address
    watched.page.keyboard.press("?")
    assert find_barriers(watched.page) == []


def test_runs_can_be_searched_ordered_and_compared_by_keys(board, open_page, runs):
    call = {"label": "prompts", "model": None, "method": "prompts", "reads": {}, "makes": ["tokens"]}
    (runs / "other run" / "flow.json").write_text(json.dumps({"algorithm": "grpo", "calls": [call]}))
    page = open_page(board, "#/").page
    names = page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.dataset.run)")
    assert sorted(names) == ["other run", "sums/seed0", "sums/seed1"]
    page.get_by_role("button", name="Run", exact=True).click()
    for key in ("j", "j", "x", "j", "x"):
        page.keyboard.press(key)
    assert page.get_by_role("link", name="Compare 2 runs").is_visible()
    page.get_by_role("region", name="Settings that differ").get_by_text("seed", exact=True).wait_for()
    page.keyboard.press("c")
    page.get_by_role("heading", name="Comparison").wait_for()
    assert page.locator(".legend").inner_text() == "2 seeds of sums/seed0"
    page.get_by_label("Runs that differ in the seed").select_option("apart")
    assert page.locator(".legend li").count() == 2
    assert page.locator(".differences tbody tr").all_inner_texts() == ["seed\t0\t1"]
    page.keyboard.press("r")
    page.locator(".page-runs").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("failed")
    assert page.locator("tbody tr").count() == 1
    assert "ValueError: no such thing" in page.locator("tbody tr").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("o")
    page.locator(".page-cause").wait_for()
    for expected in ("overview", "timeline", "flow", "log", "configuration", "cause"):
        page.keyboard.press("]")
        page.locator(f".page-{expected}").wait_for()
    page.keyboard.press("?")
    assert page.get_by_role("dialog").get_by_text("next page of the run").is_visible()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")


def test_evaluations_are_named_and_ordered_by_what_they_measure(start_board, open_page, tmp_path):
    for name, metric, value in (
        ("sft", "eval/loss/value", 0.3),
        ("better sft", "eval/loss/value", 0.2),
        ("dpo", "eval/loss/accuracy", 0.75),
        ("grpo", "eval/mean", 0.25),
        ("better grpo", "eval/mean", 0.5),
        ("none", "reward/max", 0.9),
    ):
        add_steps(make_run(tmp_path / "runs" / name), range(1, 21), **{metric: lambda _, value=value: value})
    page = open_page(start_board(tmp_path / "runs"), "#/?order=eval").page
    cells = page.locator("tbody td[data-label=Evaluation]").all_inner_texts()
    assert cells == ["0.500 reward", "0.250 reward", "0.750 accuracy", "0.200 loss", "0.300 loss", "–"]


def test_the_settings_that_were_written_are_one_click_away(board, open_page, runs):
    written = {"runtime.steps": "run.yaml:4", "seed": "override", "reward[0].fn": "run.yaml:6"}
    (runs / "sums" / "seed0" / "written.json").write_text(json.dumps(written))
    watched = open_page(board, "#/run/sums%2Fseed0/overview")
    page = watched.page
    page.get_by_role("link", name="Configuration").click()
    rows = page.locator(".written tbody tr")
    rows.first.wait_for()
    expected = ["runtime.steps\t20\trun.yaml:4", "seed\t0\toverride", "reward[0].fn\tmath\trun.yaml:6"]
    assert rows.all_inner_texts() == expected
    assert "lr: 0.0001" in page.get_by_role("region", name="Text of the configuration").inner_text()
    assert find_barriers(page) == []
    watched.show("#/run/sums%2Fseed1/configuration")  # of a run that does not say
    assert page.locator(".written").count() == 0


def test_a_failed_run_opens_on_its_cause(start_board, open_page, tmp_path):
    folder = make_run(tmp_path / "runs" / "mine")
    trace = 'Traceback (most recent call last):\n  File "/home/me/my_rewards.py", line 12, in score\n    return 1 / 0\n'
    fail(folder, f"{trace}ZeroDivisionError: division by zero")
    watched = open_page(start_board(folder.parent), "#/")
    page = watched.page
    page.get_by_role("link", name="mine").click()
    page.locator(".evidence").get_by_text("/home/me/my_rewards.py:12").wait_for()
    assert "division by zero" in page.locator(".cause").inner_text()
    assert page.locator(".tabs a").all_inner_texts() == ["Cause", "Log and stalls", "Configuration"]
    assert find_barriers(page) == []
    watched.show("#/run/mine")  # without the name of a page
    page.locator(".page-cause .evidence").wait_for()
    for name in ("overview", "rollouts", "placement"):
        watched.show(f"#/run/mine/{name}")
        page.get_by_text("The run ended before its first step.").first.wait_for()
        assert page.get_by_text("log_samples").count() == 0
    page.get_by_role("link", name="Cause").click()
    page.get_by_role("link", name="Errors of the log").click()
    page.get_by_role("log").get_by_text("ZeroDivisionError").wait_for()


def test_language_and_colours_are_kept(board, open_page):
    page = open_page(board, "#/").page
    page.keyboard.press("l")
    page.get_by_role("heading", name="运行").wait_for()
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.get_by_role("heading", name="运行").wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("document.documentElement.lang") == "zh-CN"


def test_a_link_shows_the_same_curves(board, open_page):
    page = open_page(board, "#/run/sums%2Fseed0/overview").page
    chart = page.get_by_role("region", name="reward/mean").first
    chart.locator("canvas").wait_for()
    page.get_by_label("Along").select_option("tokens")
    page.keyboard.press("s")
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50, steps=5)
    page.mouse.up()
    page.get_by_role("button", name="All steps").wait_for()
    link = page.evaluate("location.href")
    assert "x=tokens" in link and "smoothing=0.5" in link and "from=" in link
    other = open_page(board, link)
    assert other.page.get_by_label("Along").input_value() == "tokens"
    assert other.page.get_by_role("button", name="All steps").is_visible()
    other.page.keyboard.press("z")
    other.page.get_by_role("button", name="All steps").wait_for(state="hidden")


@pytest.mark.parametrize(
    ("locale", "words"), [("en-GB", "Mean reward over the evaluation data"), ("zh-CN", "平均奖励")]
)
def test_a_metric_says_what_it_means_by_mouse_and_by_keys(board, open_page, locale, words):
    watched = open_page(board, locale=locale)
    page = watched.page
    watched.show("#/run/sums%2Fseed0/overview")
    name = page.locator('section[aria-label="eval/mean"]').first.get_by_role("button", name="eval/mean")
    name.hover()
    assert words in page.locator("[role=tooltip]:not([hidden])").inner_text()
    page.mouse.move(0, 0)
    page.locator("[role=tooltip]:not([hidden])").wait_for(state="detached")
    name.focus()
    assert words in page.locator("[role=tooltip]:not([hidden])").inner_text()
    assert find_barriers(page) == []
    page.keyboard.press("Escape")
    page.locator("[role=tooltip]:not([hidden])").wait_for(state="detached")


def test_a_run_that_is_written_cut_in_mid_line_and_resumed(board, open_page, runs):
    folder = make_run(runs / "live")
    watched = open_page(board)
    page = watched.page
    newest = page.locator('section[aria-label="loss/value"] output').first
    with lock_folder(folder):
        watched.show("#/run/live/overview")
        page.get_by_text("No step has been recorded yet.").wait_for()
        add_steps(folder, range(1, 4))
        page.get_by_text("step 3 of 20").wait_for()
        newest.get_by_text("0.250").wait_for()
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 4, "loss/va')
        add_log(folder, "INFO here: half a line was written")
        page.locator(".run-status").get_by_text("running").wait_for()
        assert newest.inner_text() == "0.250"
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('lue": 7.5}\n')
        newest.get_by_text("7.500").wait_for()
    page.locator(".run-status").get_by_text("failed").wait_for()
    with lock_folder(folder):  # continued from step 2: the file is another one
        lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        with write_atomically(folder / "metrics.jsonl") as aside:
            aside.write_bytes(b"".join(lines[:2]))
        newest.get_by_text("0.333").wait_for()
        page.get_by_text("step 2 of 20").wait_for()
        add_steps(folder, range(3, 21))
        page.get_by_text("step 20 of 20").wait_for()
    page.locator(".run-status").get_by_text("ended").wait_for()


def test_the_log_grows_and_is_searched(board, open_page, runs):
    folder = runs / "sums" / "seed0"
    page = open_page(board, "#/run/sums%2Fseed0/log").page
    log = page.get_by_role("log")
    assert "step 20/20" in log.inner_text()
    add_log(folder, "WARNING here: something is odd\n  in two lines")
    page.get_by_text("something is odd").wait_for()
    assert page.evaluate("(e => e.scrollTop + e.clientHeight >= e.scrollHeight - 8)(document.querySelector('.log'))")
    page.get_by_label("Level").select_option("warnings")
    assert log.inner_text().strip().endswith("something is odd\n  in two lines")
    assert log.locator(".entry").count() == 1
    page.get_by_role("button", name="driver.txt").click()
    page.get_by_text("File run.py, line 3").wait_for()


def test_a_run_is_asked_by_buttons_only_with_a_token(start_board, open_page, runs, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    folder = runs / "sums" / "seed0"
    board = start_board(runs, "--token-file", str(tmp_path / "token"))
    watched = open_page(board)
    page = watched.page
    with lock_folder(folder):
        response = open_page(board, checked=False).page.goto(board.url)
        assert response is not None and response.status == 401
        watched.show("?token=0123456789abcdef#/run/sums%2Fseed0/overview")
        assert "token" not in page.evaluate("location.href")
        page.get_by_role("button", name="Save now").click()
        page.get_by_text("Asked; the run answers after its step.").wait_for()
        request = read_request(folder)
        assert request is not None and request.requests == [{"do": "save"}]
        write_answer(folder, request.id, [ControlResult("save", True, "saved step 20")])
        page.get_by_text("✓ saved step 20").wait_for()
        page.get_by_label("Processes of models").fill("policy=4, trainer=2")
        page.get_by_role("button", name="Scale").click()
        page.get_by_text("Asked; the run answers after its step.").wait_for()
        request = read_request(folder)
        assert request is not None and request.requests == [{"do": "scale", "models": {"policy": 4, "trainer": 2}}]
        page.get_by_label("Processes of models").wait_for()
    page.get_by_text("The run has ended, and has not answered.").wait_for()
    with lock_folder(runs / "sums" / "seed1"):
        other = open_page(start_board(runs), "#/run/sums%2Fseed1/overview")
        other.page.locator(".run-status").get_by_text("running").wait_for()
        assert other.page.get_by_role("button", name="Save now").count() == 0


def test_a_real_run_is_watched_saved_and_stopped(start_board, open_page, tmp_path):
    config = settings(tmp_path, "grpo", steps=100_000)
    process = command(config)
    folder = Path(config["output"])
    wait_for((folder / "metrics.jsonl").exists, process, seconds=180)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    watched = open_page(start_board(folder, "--token-file", str(tmp_path / "token")))
    page = watched.page
    page.on("dialog", lambda dialog: dialog.accept())
    watched.show("?token=0123456789abcdef#/run/run/overview")
    page.locator(".run-status").get_by_text("running").wait_for()
    page.locator("canvas").first.wait_for()
    assert page.locator(".sample").count() == 4
    page.get_by_role("button", name="Save now").click()
    saved = page.locator(".said", has_text="✓")
    saved.wait_for(timeout=60_000)
    assert Path(saved.inner_text().split(" is in ")[1]).is_dir()
    page.get_by_role("button", name="Stop").click()
    page.locator(".status.ended").wait_for(timeout=60_000)
    process.communicate(timeout=60)


def test_the_board_that_is_gone_is_named(board, open_page):
    page = open_page(board, "#/", checked=False).page
    board.process.terminate()
    page.get_by_text("The board does not answer.").wait_for()


def test_a_long_run_stays_within_the_limits(start_board, open_page, tmp_path):
    """100,000 steps of 44 metrics, 10,000 samples: see docs/board.md. Times are printed, bytes and memory checked."""
    make_long_run(tmp_path / "runs" / "long", 100_000, 10_000)
    add_steps(make_run(tmp_path / "runs" / "short"), range(1, 21))
    board = start_board(tmp_path / "runs")
    watched = open_page(board)
    page = watched.page
    loaded: list[float] = []
    network = watched.context.new_cdp_session(page)
    network.send("Network.enable")
    network.on("Network.loadingFinished", lambda event: loaded.append(event["encodedDataLength"]))
    page.goto(f"{board.url}/#/run/long/overview")
    page.locator("canvas").first.wait_for()
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    first = sum(loaded)
    page.locator("[role=status]", has_text="reading").wait_for(state="hidden", timeout=120_000)
    page.wait_for_load_state("networkidle")
    whole = sum(loaded)
    highest = page.evaluate(
        """async () => {
            const query = new URLSearchParams({names: '["loss/value"]'});
            const answer = await (await fetch(`/api/runs/long/metrics?${query}`)).json();
            return [Math.max(...answer.series["loss/value"].high), answer.steps.length, answer.newest];
        }"""
    )
    assert highest[0] == 50.0 and highest[1] <= 1024 and highest[2] == 100_000
    switches = []
    for address, heading in (
        ("#/run/short/overview", "short"),
        ("#/run/long/overview", "long"),
        ("#/run/long/log", "long"),
    ):
        switches.append(page.evaluate(MEASURE_SWITCH, [address, heading]))
        page.wait_for_load_state("networkidle")
    figures = {
        "first paint, ms": paint,
        "switches, ms": [round(each) for each in switches],
        "KB loaded until the first curves": first / 1000,
        "KB loaded until all was read": whole / 1000,
        "RSS, MB": board.read_status("VmRSS") / 1024,
        "peak RSS, MB": board.read_status("VmHWM") / 1024,
    }
    watched.context.close()
    before = board.read_cpu_seconds()
    time.sleep(10)  # nobody looks: this measures what the board does meanwhile
    figures["% of a core while nobody looks"] = 10 * (board.read_cpu_seconds() - before)
    sys.stderr.write(f"{json.dumps(figures)}\n")
    assert not watched.problems
    assert figures["RSS, MB"] <= 60 and figures["peak RSS, MB"] <= 60, figures
    assert figures["KB loaded until the first curves"] <= 300, figures
    assert figures["% of a core while nobody looks"] <= 1, figures
    maps = Path(f"/proc/{board.process.pid}/maps").read_text()
    assert not [name for name in ("torch", "transformers", "pandas", "numpy") if f"site-packages/{name}/" in maps]


# From the click to two frames after charts or lines of the page are there.
MEASURE_SWITCH = """async ([address, run]) => {
    const begun = performance.now();
    location.hash = address;
    const frame = () => new Promise(requestAnimationFrame);
    const sign = address.endsWith("log") ? ".page-log .entry" : ".page-overview canvas";
    const isThere = () => document.querySelector(".crumb")?.textContent === run && document.querySelector(sign);
    await frame();
    while (!isThere()) await frame();
    await frame();
    return performance.now() - begun;
}"""
