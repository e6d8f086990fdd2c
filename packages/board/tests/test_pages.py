"""The pages of one run in a browser: rollouts, timeline, placement, checkpoints, goodput, flow."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import zlib
from pathlib import Path

import pytest

from packages.board.tests.axe import find_barriers
from packages.board.tests.folders import add_log, add_samples, add_steps, make_run
from packages.board.tests.test_page_readers import PLACEMENT, sample, write_lines, write_rollouts, write_trace
from tests.runs import run, settings

pytestmark = pytest.mark.slow

PAGES = ("rollouts", "timeline", "placement", "checkpoints", "goodput", "flow")
EPISODE = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculator", "arguments": {"a": 2}}}]},
    {"role": "tool", "name": "calculator", "content": "4"},
    {"role": "assistant", "content": "It is four."},
]
MANY = 10_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a real run of four steps: rollouts with a reference, traces, checkpoints, the best one kept."""
    directory = tmp_path_factory.mktemp("trained")
    runtime = {"timeline_every": 1, "save_every": 2, "eval_every": 2, "best": "eval/mean", "log_samples": 16}
    config = settings(directory, "grpo", **runtime)
    config["models"]["reference"] = {}
    config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05}
    assert run(config) == 0
    return Path(config["output"])


@pytest.fixture
def made(tmp_path) -> Path:
    """A folder made by hand: an episode with a tool, images, devices, a lost process."""
    folder = make_run(tmp_path / "runs" / "made")
    add_steps(folder, range(1, 4), **{"faults/restarts": lambda step: 1.0 if step == 2 else None})
    add_log(folder, "WARNING coalign.cluster.cluster: policy, replica 1 is lost (killed); it is started again")
    (folder / "seen.png").write_bytes(draw_picture())
    samples = [sample(1, 0, index, 0.5, "four", versions=[[0, 2], [1, 2]]) for index in range(2)]
    samples.append(sample(1, 1, 0, 1.0, "It is four.", messages=EPISODE, versions=[[0, 11]]))
    samples.append(sample(1, 1, 1, 0.0, "five", images=["seen.png", "gone.png"]))
    write_lines(folder / "samples.jsonl", samples)
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, *range(7, 18)], [1, 2, 3, 4, 5]]
    versions = [-1, 0, 0, 1, 1] * 2 + [-1, *[0] * 11] + [-1, 0, 0, 0, 0]
    advantages = [0.0, 1.5, 0.0, -1.5, 0.0] * 2 + [0.0] * 12 + [0.0, -1.0, -1.0, -1.0, -1.0]
    write_rollouts(folder, 1, rows, weight_version=versions, advantage=advantages)
    write_trace(folder, 3)
    (folder / "placement.json").write_text(json.dumps(PLACEMENT))
    return folder


def draw_picture() -> bytes:
    """A PNG of one grey pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(b"\0\x80")), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in chunks)


@pytest.mark.parametrize(
    ("width", "colours", "locale"), [(1280, "light", "en-GB"), (1280, "dark", "zh-CN"), (390, "light", "zh-CN")]
)
def test_every_page(start_board, open_page, trained, width, colours, locale):
    watched = open_page(
        start_board(trained), viewport={"width": width, "height": 800}, color_scheme=colours, locale=locale
    )
    page = watched.page
    for name in PAGES:
        watched.show(f"#/run/run/{name}")
        assert page.locator("h1").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the screen"
        expression = rf"/\b(?:{'|'.join(PAGES)})\.[a-z_]+\b/g"
        missing = page.evaluate(f"document.body.innerText.match({expression})")
        assert missing is None or set(missing) <= {"flow.json", "placement.json"}, missing
        assert find_barriers(page) == [], name


def test_from_a_step_to_the_tokens_of_a_sample(start_board, open_page, made):
    board = start_board(made)
    page = open_page(board, "#/run/made/rollouts").page
    steps, groups, samples = (page.get_by_role("listbox", name=name) for name in ("Steps", "Groups", "Samples"))
    assert "1 without variance" in steps.inner_text()
    steps.get_by_role("option").first.click()
    groups.get_by_text("no variance").wait_for()
    assert groups.get_by_role("option").count() == 2
    groups.get_by_role("option").first.click()
    page.get_by_text("2 samples", exact=True).wait_for()
    samples.focus()  # by keys from here
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    tokens = page.locator(".tokens .token")
    tokens.nth(4).wait_for()
    assert tokens.all_inner_texts() == list("abcde")
    colours = [tokens.nth(place).evaluate("each => each.style.backgroundColor") for place in range(5)]
    assert colours[0] == colours[2] == "" and "blue" in colours[1] and "orange" in colours[3]
    assert tokens.nth(1).get_attribute("class") == "token up current" and "down" in tokens.nth(3).get_attribute("class")
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "-1.500" in page.locator(".token-values").inner_text()
    tokens.nth(1).hover()
    assert "advantage: 1.500" in page.locator(".tip").inner_text()
    page.get_by_label("Colour tokens by").select_option("weight_version")
    assert page.locator(".legend .token").all_inner_texts() == ["0", "1"]
    address = page.url
    again = open_page(board, address)
    assert again.page.get_by_role("heading", name="Sample 1 of group 0, step 1").count() == 1
    assert again.page.locator(".legend .token").all_inner_texts() == ["0", "1"]
    again.page.get_by_role("button", name="Previous in the group").click()
    again.page.get_by_role("heading", name="Sample 0 of group 0, step 1").wait_for()


def test_search_and_order(start_board, open_page, made):
    page = open_page(start_board(made), "#/run/made/rollouts").page
    rows = page.get_by_role("listbox", name="Samples").get_by_role("option")
    page.keyboard.press("/")
    page.keyboard.type("FOUR.")
    page.get_by_text("1 sample", exact=True).wait_for()
    assert rows.locator("mark").inner_text() == "four."
    page.get_by_role("searchbox").fill("")
    page.get_by_text("4 samples", exact=True).wait_for()
    page.get_by_label("Sort by").select_option("reward")
    page.get_by_label("Order").select_option("down")
    rows.first.get_by_text("group 1 · 0").wait_for()
    assert "search" not in page.url and "sort=reward" in page.url


def test_lists_say_what_was_asked_and_how_rewards_spread(start_board, open_page, made):
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And 2 + 2?"}]
    lines = [
        sample(1, 0, i, reward, rewards={"right": reward, "short": 0.5}, row={"messages": asked})
        for i, reward in enumerate((1.0, 0.0, 0.5))
    ]
    lines.append(sample(1, -1, 0, 0.75, phase="eval"))
    lines.append(sample(2, 0, 0, None) | {"group": None})
    write_lines(made / "samples.jsonl", lines)
    shutil.rmtree(made / "rollouts")  # tokens of other samples
    watched = open_page(start_board(made), "#/run/made/rollouts")
    page = watched.page
    steps, groups, samples = (page.get_by_role("listbox", name=name) for name in ("Steps", "Groups", "Samples"))
    assert "1 group · 3 samples" in steps.inner_text() and "1 group · 1 sample" in steps.inner_text()
    assert "1 groups" not in steps.inner_text() and "1 samples" not in steps.inner_text()
    assert "evaluation prompt 1" in samples.inner_text() and "no group" in samples.inner_text()
    assert "group -1" not in samples.inner_text() and "And 2 + 2?" in samples.inner_text()
    page.get_by_role("button", name="Lowest reward").click()
    page.get_by_role("heading", name="Sample 1 of group 0, step 1").wait_for()
    page.get_by_role("button", name="Highest reward").click()
    page.get_by_role("heading", name="Sample 0 of group 0, step 1").wait_for()
    steps.get_by_role("option").filter(has_text="3 samples").click()
    groups.get_by_text("right 0.500 ± 0.408 · short 0.500 ± 0").wait_for()
    groups.get_by_role("option").first.click()
    page.locator(".rollouts-list dl").get_by_text("0.500 ± 0.408").wait_for()
    assert find_barriers(page) == []
    watched.show("#/run/made/rollouts?sample=2.train.none.0")
    page.get_by_role("heading", name="Sample 0 of no group, step 2").wait_for()
    watched.show("#/run/made/rollouts?sample=1.eval.-1.0")
    page.get_by_role("heading", name="Sample 0 of evaluation prompt 1, step 1").wait_for()
    watched.show("#/run/made/overview")
    assert "step 1, evaluation, evaluation prompt 1, reward 0.750, complete" in page.locator(".samples").inner_text()


def test_turns_tools_and_images(start_board, open_page, made):
    watched = open_page(start_board(made), "#/run/made/rollouts?sample=1.train.1.0", checked=False)
    page = watched.page
    assert page.locator(".turn h3").all_inner_texts() == ["user", "Turn 1", "tool · calculator", "Turn 2"]
    assert page.locator(".tool-call").inner_text() == '⚙ calculator{"a":2}'
    watched.show("#/run/made/rollouts?sample=1.train.1.1")
    page.get_by_text("gone.png: not on this machine").wait_for()
    assert page.get_by_alt_text("Image seen.png").evaluate("each => each.naturalWidth") == 1
    assert all("404" in problem for problem in watched.problems), watched.problems  # of the image that is gone


def test_samples_that_do_not_exist_are_one_sentence(start_board, open_page, made):
    page = open_page(start_board(made), "#/run/made/rollouts?sample=9.train.1.0", checked=False).page
    page.get_by_text("no sample 0 of group 1 at step 9").wait_for()


def test_ten_thousand_samples_are_a_few_rows(start_board, open_page, made):
    (made / "samples.jsonl").unlink()
    add_samples(made, MANY)
    board = start_board(made)
    page = open_page(board, "#/run/made/rollouts").page
    samples = page.get_by_role("listbox", name="Samples")
    assert page.get_by_text(f"{MANY} samples", exact=True).count() == 1
    assert samples.get_by_role("option").count() < 40
    figures = {}
    for name, height in (("middle", MANY * 34), ("end", MANY * 100)):
        figures[name] = page.evaluate(MEASURE_SCROLL, height)
    assert samples.get_by_text(f"step {MANY} ").count() == 1
    assert samples.get_by_role("option").count() < 40
    page.get_by_role("searchbox").fill("It is 19998.")
    page.get_by_text("1 sample", exact=True).wait_for()
    figures["RSS, MB"] = board.read_status("VmRSS") / 1024
    sys.stderr.write(f"{json.dumps(figures)}\n")
    assert figures["RSS, MB"] <= 60


# Milliseconds from a jump in the list until its rows are there.
MEASURE_SCROLL = """async (height) => {
    const list = document.querySelector(".rollouts-list .long-list");
    const begun = performance.now();
    list.scrollTop = height;
    const frame = () => new Promise(requestAnimationFrame);
    await frame();
    await frame();
    while ([...list.querySelectorAll(".long-list-row")].some((row) => row.textContent === "…")) await frame();
    return performance.now() - begun;
}"""


def test_pages_follow_a_run(start_board, open_page, made):
    page = open_page(start_board(made), "#/run/made/rollouts?sample=1.train.0.0").page
    lines = (made / "samples.jsonl").read_text()
    more = json.dumps(sample(2, 2, 0, 0.25)) + "\n"
    (made / "samples.jsonl").write_text(lines + more)
    add_steps(made, [4])
    page.get_by_role("listbox", name="Steps").get_by_text("step 2 (training)").wait_for()
    assert page.get_by_role("heading", name="Sample 0 of group 0, step 1").count() == 1  # what is looked at stays


def test_lanes_of_processes_and_devices(start_board, open_page, made):
    page = open_page(start_board(made), "#/run/made/timeline").page
    names = page.locator(".lanes .lane-name")
    processes = ["", "what the loop waits for", "policy · replica 0", "policy · replica 1", "trainer · rank 0 on b"]
    assert names.all_inner_texts() == processes
    page.get_by_role("img", name="trainer · rank 0 on b: 2 calls, idle 50 %").focus()
    page.keyboard.press("End")
    assert "train_step, 5 s after the step began, took 5 s, 3 MiB" in page.locator(".bar-about").inner_text()
    page.get_by_label("Lanes").select_option("devices")
    assert names.all_inner_texts() == ["", "a, device 0", "a, device 1"]
    assert page.locator(".lanes .lane-idle").all_inner_texts() == ["idle", "10 %", "80 %"]
    assert page.get_by_role("cell", name="process lost").count() == 1
    assert page.get_by_text("Processes were started again in step 2.").count() == 1


def test_placement_of_devices(start_board, open_page, made):
    page = open_page(start_board(made), "#/run/made/placement").page
    first, second = page.locator(".devices > li").all_inner_texts()
    expected = (["Device", "0", "policy", "0", "trainer"], ["Device", "1", "policy", "1"])
    assert (first.split(), second.split()) == expected


def test_checkpoints_are_verified_on_demand(start_board, open_page, trained):
    page = open_page(start_board(trained), "#/run/run/checkpoints").page
    assert page.get_by_text("The same command goes on from step 4, on the disk.").count() == 1
    assert page.get_by_role("row", name="4 disk").get_by_text("continues here").count() == 1
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").open()]
    best = max((line for line in lines if line["step"] in (2, 4)), key=lambda line: line["eval/mean"])
    assert page.get_by_role("row", name=f"{best['step']} disk").get_by_text("best").count() == 1
    page.get_by_role("button", name="Verify the contents of step 4").click()
    page.get_by_text("all contents are as they were written").wait_for()


def test_goodput_says_the_shares_of_a_step(start_board, open_page, trained):
    page = open_page(start_board(trained), "#/run/run/goodput").page
    areas = page.get_by_role("img", name="Where the time went")
    assert areas.locator("polygon").count() == 9
    assert page.get_by_text("Until step 4").first.is_visible()
    areas.focus()
    page.keyboard.press("Home")
    page.get_by_text("Until step 1").wait_for()
    shown = page.locator(".shares").first.locator("td.number").all_inner_texts()
    shares = [float(text.removeprefix("<").split()[0]) for text in shown]  # some are `< 0.1 %`
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_the_flow_is_that_of_the_recipe(start_board, open_page, trained):
    page = open_page(start_board(trained), "#/run/run/flow").page
    calls = [each.split("\n")[0] for each in page.locator("g.call text:first-of-type").all_text_contents()]
    assert {"prompts", "policy.generate", "reference.forward_step", "combine_rewards", "group"} < set(calls)
    assert "trainer.train_step" in calls
    page.get_by_role("button", name="trainer.train_step makes metrics").focus()
    about = page.locator(".flow-about").inner_text()
    assert "reads from group\nadvantages" in about and "reads from reference.forward_step\nref_logprobs" in about
    assert page.locator("path.edge.chosen").count() == 4
