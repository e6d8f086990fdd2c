"""What the pages of a run read: from folders made by hand, whose answers are worked out by hand."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.testclient import TestClient

from coalign_board.readers import checkpoints as checkpoints_reader
from coalign_board.readers.checkpoints import read_checkpoints, read_verification
from coalign_board.readers.flow import assign_layers, read_flow
from coalign_board.readers.placement import read_placement
from coalign_board.readers.rollouts import read_row
from coalign_board.readers.sample_lists import SampleReader, read_newest_samples
from coalign_board.readers.timeline import merge_narrow, read_timeline, read_trace
from coalign_board.server import build_board
from packages.board.tests.folders import make_run

PNG = b"\x89PNG\r\n\x1a\n0000"


def sample(step: int, group: int, index: int, reward: float | None, text: str = "4", **more) -> dict:
    place = {"step": step, "phase": "train", "group": group, "index": index, "status": "ok", "row": {}}
    texts = {"prompt": f"What is {group}?", "response": text, "versions": [[step - 1, len(text)]]}
    return place | texts | {"reward": reward, "rewards": {"digits": reward}} | more


SAMPLES = [
    sample(1, 0, 0, 1.0, "four"),
    sample(1, 0, 1, 0.0, "five!", versions=[[0, 2], [1, 3]]),
    sample(1, 1, 0, 0.5, "six"),
    sample(1, 1, 1, 0.5, "seven"),
    sample(1, -1, 0, None, "an evaluation", phase="eval"),
    sample(2, 2, 0, 2.0, "Straße"),
]
NAMES = [(each["group"], each["index"]) for each in SAMPLES]


def write_lines(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "samples.jsonl", SAMPLES)
    return tmp_path


def test_steps_count_groups_whose_rewards_are_all_the_same(folder):
    second, first, evaluation = SampleReader().read_steps(folder, {})["steps"]
    assert (first["step"], first["groups"], first["flat"], first["reward"], first["tokens"]) == (1, 2, 1, 0.5, 4.25)
    assert first["reward_range"] == [0.0, 1.0] and first["versions"] == [0, 1] and not first["tokens_recorded"]
    assert (evaluation["phase"], evaluation["reward"], evaluation["flat"]) == ("eval", None, 0)
    assert (second["step"], second["groups"], second["flat"]) == (2, 1, 0)  # one sample has nothing to differ from
    page = SampleReader().read_steps(folder, {"offset": "1", "limit": "1"})
    assert page["total"] == 3 and [each["phase"] for each in page["steps"]] == ["train"]  # the newest first


def test_a_run_without_samples_has_empty_lists(tmp_path):
    reader = SampleReader()
    assert reader.read_steps(tmp_path, {}) == {"total": 0, "offset": 0, "steps": [], "skipped": 0}
    assert reader.read_page(tmp_path, {"search": "x"}) == {"total": 0, "offset": 0, "samples": []}
    with pytest.raises(FileNotFoundError, match=r"no sample 0 of group 0 at step 1 \(train\)"):
        reader.read_sample(tmp_path, {"step": "1", "group": "0", "index": "0"})


def test_groups_of_a_step(folder):
    groups = SampleReader().read_groups(folder, {"step": "1"})["groups"]
    expected = [(0, 2, False, "What is 0?"), (1, 2, True, "What is 1?")]
    assert [(g["group"], g["samples"], g["flat"], g["question"]) for g in groups] == expected
    with pytest.raises(FileNotFoundError, match=r"no samples of step 7 \(train\)"):
        SampleReader().read_groups(folder, {"step": "7"})


def test_a_group_has_the_question_and_the_spread_of_each_component(folder):
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And 2 + 2?"}]
    rewards = [{"right": 1.0, "short": 0.25}, {"right": 0.0, "short": None}, {"right": math.nan, "short": 0.75}]
    lines = [sample(1, 0, i, 0.5, rewards=parts, row={"messages": asked}) for i, parts in enumerate(rewards)]
    write_lines(folder / "samples.jsonl", lines)
    (group,) = SampleReader().read_groups(folder, {"step": "1"})["groups"]
    assert group["question"] == "And 2 + 2?" and group["reward_std"] == 0
    assert group["rewards"] == {"right": [0.5, 0.5], "short": [0.5, 0.25]}
    assert SampleReader().read_page(folder, {})["samples"][0]["question"] == "And 2 + 2?"
    assert read_newest_samples(folder, {})["samples"][0]["question"] == "And 2 + 2?"


def test_rows_of_an_episode_are_found_and_count_once(folder):
    lines = [sample(1, 0, 0, 1.0), sample(1, 0, 0, 1.0) | {"branch": 1, "response": "a critic"}, sample(1, 0, 1, 0.0)]
    write_lines(folder / "samples.jsonl", lines)
    reader, name = SampleReader(), {"step": "1", "group": "0", "index": "0"}
    (group,) = reader.read_groups(folder, {"step": "1"})["groups"]
    assert group["samples"] == 2 and group["reward"] == 0.5 and not group["flat"]
    first, second = reader.read_sample(folder, name), reader.read_sample(folder, name | {"branch": "1"})
    assert first["members"] == second["members"] == [[0, 0], [0, 1], [1, 0]]
    assert first["response"] != second["response"] == "a critic" and second["branch"] == 1
    assert [row["branch"] for row in reader.read_page(folder, {"group": "0"})["samples"]] == [0, 1, 0]


def test_samples_without_a_group_are_found_as_such(folder):
    lines = [sample(1, 0, 0, 1.0), sample(1, 0, 1, 0.5), sample(1, 0, 2, None) | {"group": None}]
    del lines[1]["group"]
    write_lines(folder / "samples.jsonl", lines)
    reader = SampleReader()
    groups = reader.read_groups(folder, {"step": "1"})["groups"]
    assert [(group["group"], group["samples"]) for group in groups] == [(0, 1), (None, 2)]
    assert [each["index"] for each in reader.read_page(folder, {"group": "none"})["samples"]] == [1, 2]
    assert [each["index"] for each in reader.read_page(folder, {"group": "0"})["samples"]] == [0]
    assert reader.read_sample(folder, {"step": "1", "group": "none", "index": "2"})["members"] == [[1, 0], [2, 0]]
    with pytest.raises(FileNotFoundError, match="no sample 5 of no group at step 1"):
        reader.read_sample(folder, {"step": "1", "group": "none", "index": "5"})


@pytest.mark.parametrize(
    ("params", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"order": "down"}, [5, 4, 3, 2, 1, 0]),
        ({"sort": "reward"}, [1, 2, 3, 0, 5, 4]),  # without a reward: last
        ({"sort": "reward", "order": "down"}, [5, 0, 2, 3, 1, 4]),
        ({"sort": "length", "order": "down", "limit": "2"}, [4, 5]),
        ({"step": "1", "phase": "train", "group": "1"}, [2, 3]),
        ({"group": "-1"}, [4]),
        ({"search": "STRASSE"}, [5]),
        ({"search": "what is 1"}, [2, 3]),
        ({"search": "nowhere"}, []),
        ({"offset": "4", "limit": "9"}, [4, 5]),
    ],
)
def test_pages_of_samples(folder, params, numbers):
    page = SampleReader().read_page(folder, params)["samples"]
    assert [NAMES.index((each["group"], each["index"])) for each in page] == numbers


def test_a_page_says_how_many_samples_there_are_and_shows_what_was_found(folder):
    text = "x" * 500 + "needle" + "y" * 500
    write_lines(folder / "samples.jsonl", [*SAMPLES, sample(3, 3, 0, 1.0, text)])
    page = SampleReader().read_page(folder, {"search": "NEEDLE"})
    assert page["total"] == 1 and "needle" in page["samples"][0]["found"] and len(page["samples"][0]["response"]) == 160


def test_search_reads_the_turns_of_an_episode(folder):
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculator", "arguments": {}}}]},
        {"role": "tool", "name": "calculator", "content": "FOUR"},
        {"role": "assistant", "content": "It is 4."},
    ]
    write_lines(folder / "samples.jsonl", [*SAMPLES, sample(3, 3, 0, 1.0, messages=messages)])
    reader = SampleReader()
    for text in ("calculator", "four", "it is 4"):
        assert 3 in [each["group"] for each in reader.read_page(folder, {"search": text})["samples"]]
    assert reader.read_page(folder, {"group": "3"})["samples"][0]["turns"] == 2


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"step": "first"}, "step is 'first'; expected a whole number"),
        ({"step": "-1"}, "step is '-1'"),
        ({"sort": "size"}, "sort is 'size'; expected one of file, reward, length"),
        ({"phase": "test"}, "expected one of train, eval"),
        ({"limit": "9" * 30}, "limit is"),
    ],
)
def test_a_wrong_parameter_is_named(folder, params, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        SampleReader().read_page(folder, params)


def test_an_index_follows_a_file_that_grows_and_is_replaced(folder):
    reader, path = SampleReader(), folder / "samples.jsonl"

    def numbers():
        return [each["step"] for each in reader.read_page(folder, {})["samples"]]

    line = json.dumps(sample(3, 3, 0, 1.0)).encode()
    assert numbers() == [1, 1, 1, 1, 1, 2]
    with open(path, "ab") as file:
        file.write(b"no JSON\n" + line[:20])
    assert numbers() == [1, 1, 1, 1, 1, 2]
    with open(path, "ab") as file:
        file.write(line[20:] + b"\n")
    assert numbers() == [1, 1, 1, 1, 1, 2, 3]
    assert reader.read_sample(folder, {"step": "3", "group": "3", "index": "0"})["response"] == "4"
    write_lines(folder / "aside", SAMPLES[:2])
    os.replace(folder / "aside", path)  # as a run that goes back to a checkpoint does
    assert numbers() == [1, 1]
    path.unlink()
    assert numbers() == []


# ---- tokens


def write_rollouts(folder: Path, step: int, rows: list[list[int]], **columns) -> Path:
    ids = [number for row in rows for number in row]
    tensors = {
        "tokens": np.array(ids, np.int32),
        "row_ends": np.cumsum([len(row) for row in rows]).astype(np.int64),
        "prompt_length": np.array([1] * len(rows), np.int32),
    }
    types = {"loss_mask": np.uint8, "weight_version": np.int32}
    tensors |= {name: np.array(values, types.get(name, np.float32)) for name, values in columns.items()}
    path = folder / "rollouts" / f"step_{step}.safetensors"
    path.parent.mkdir(exist_ok=True)
    pieces = {str(number): chr(96 + number) for number in ids}
    save_file(tensors, path, {"pieces": json.dumps(pieces), "step": str(step), "format": "1"})
    return path


def test_tokens_of_a_row_with_ratio_and_divergence(tmp_path):
    nothing = math.nan
    write_rollouts(
        tmp_path,
        1,
        [[1, 2], [3, 4, 5]],
        logprob=[nothing, -1.0, nothing, -2.0, -0.5],
        trainer_logprob=[nothing, -1.0, nothing, -2.0 + math.log(2), -0.5],
        reference_logprob=[nothing, -1.0, nothing, -2.0, -0.5 + math.log(2)],
        advantage=[0, 1, 0, -1.5, -1.5],
        loss_mask=[0, 1, 0, 1, 1],
        weight_version=[-1, 0, -1, 0, 1],
    )
    row = read_row(tmp_path, 1, 1)
    assert row is not None and (row["texts"], row["prompt_length"]) == (["c", "d", "e"], 1)
    measures = row["measures"]
    assert measures["ratio"] == [None, 2.0, 1.0] and measures["advantage"] == [0, -1.5, -1.5]
    # k3 = e^-d - 1 + d, with d = log 2 at the second token and -log 2 at the third.
    assert measures["kl"][0] is None
    assert measures["kl"][1:] == pytest.approx([math.log(2) - 0.5, 1 - math.log(2)], rel=1e-5)
    assert measures["loss_mask"] == [0, 1, 1] and measures["weight_version"] == [-1, 0, 1]
    assert read_row(tmp_path, 1, 2) is None


def test_a_step_has_the_columns_that_it_has(tmp_path):
    write_rollouts(tmp_path, 1, [[1, 2]], logprob=[0, -1])
    row = read_row(tmp_path, 1, 0)
    assert row is not None and set(row["measures"]) == {"logprob"}


def test_damaged_files_of_tokens_are_refused(tmp_path):
    path = write_rollouts(tmp_path, 1, [[1, 2]], logprob=[0, -1])
    whole = path.read_bytes()
    for damaged in (whole[:-4], whole[:40], b"", b"\xff" * 64, whole.replace(b'"format":"1"', b'"format":"2"')):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"step_1\.safetensors"):
            read_row(tmp_path, 1, 0)


def test_a_sample_has_the_tokens_of_its_own_row(folder):
    rows = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [1] * 4, [2] * 6, [3] * 14]
    versions = [version for row in rows for version in (-1, *[0] * (len(row) - 1))]
    write_rollouts(folder, 1, rows, weight_version=versions)
    name = {"step": "1", "group": "1", "index": "1"}
    found = SampleReader().read_sample(folder, name)
    assert found["tokens"]["ids"] == rows[3] and found["members"] == [[0, 0], [1, 0]] and found["response"] == "seven"
    other = {"step": "2", "group": "2", "index": "0"}  # its step has no file
    assert SampleReader().read_sample(folder, other)["tokens"] is None
    write_rollouts(folder, 1, rows[::-1], weight_version=[0] * len(versions))
    with pytest.raises(ValueError, match=r"row 3 has 6 generated tokens, and samples.jsonl says 5"):
        SampleReader().read_sample(folder, name)


# ---- timeline and placement


def bar(name: str, process: int, thread: int, start: float, seconds: float) -> dict:
    times = {"ts": round(start * 1e6), "dur": round(seconds * 1e6)}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "args": {"label": name, "MiB": 3}, **times}


def name(kind: str, text: str, process: int, thread: int) -> dict:
    return {"ph": "M", "name": kind, "args": {"name": text}, "pid": process, "tid": thread}


TRACE = [
    name("process_name", "policy", 1, 0),
    name("thread_name", "replica 0", 1, 1),
    name("thread_name", "replica 1", 1, 2),
    name("process_name", "loop", 2, 0),
    name("thread_name", "loop", 2, 1),
    name("process_name", "trainer", 3, 0),
    name("thread_name", "rank 0 on b", 3, 1),
    bar("generate", 1, 1, 0, 4),
    bar("generate", 1, 2, 0, 2),
    bar("rollout", 2, 1, 0, 4),
    bar("train", 2, 1, 4, 6),
    bar("move", 3, 1, 4, 1),
    bar("train_step", 3, 1, 5, 5),
    {"ph": "b", "ts": 0, "id": 7, "cat": "waiting", "name": "train_step waits", "pid": 3, "tid": 1},
    {"ph": "e", "ts": 5_000_000, "id": 7, "cat": "waiting", "name": "train_step waits", "pid": 3, "tid": 1},
]
PLACEMENT = {
    "step": 0,
    "nodes": ["a", "b"],
    "models": {
        "policy": {"processes": [[0, ["0"]], [0, ["1"]]], "in_turn_with": ["trainer"]},
        "trainer": {"processes": [[0, ["0"]]], "in_turn_with": ["policy"]},
    },
}


def write_trace(folder: Path, step: int) -> None:
    (folder / "timeline").mkdir(exist_ok=True)
    (folder / "timeline" / f"step_{step}.json").write_text(json.dumps({"traceEvents": TRACE}))


def test_lanes_of_a_trace_and_of_devices(tmp_path):
    write_trace(tmp_path, 3)
    assert read_trace(tmp_path, {"step": "3"})["devices"] == []
    (tmp_path / "placement.json").write_text(json.dumps(PLACEMENT))
    trace = read_trace(tmp_path, {"step": "3"})
    assert trace["seconds"] == 10
    lanes = [(lane["model"], lane["process"], lane["idle"]) for lane in trace["lanes"]]
    assert lanes == [
        ("loop", "", None),
        ("policy", "replica 0", pytest.approx(0.6)),
        ("policy", "replica 1", pytest.approx(0.8)),
        ("trainer", "rank 0 on b", pytest.approx(0.5)),  # moving is not computing
    ]
    assert trace["lanes"][3]["bars"][1] == [5, 5, "train_step", "train_step", 3, 1]
    assert trace["lanes"][3]["waits"] == [[0, 5, "train_step waits"]]
    devices = [(each["node"], each["device"], each["lanes"], each["idle"]) for each in trace["devices"]]
    assert devices == [("a", "0", [1, 3], pytest.approx(0.1)), ("a", "1", [2], pytest.approx(0.8))]


def test_narrow_neighbours_of_one_call_are_one_bar():
    bars = [[0, 0.1, "a", "x", 1, 1], [0.1, 0.1, "a", "x", 5, 1], [0.2, 0.1, "b", "y", 1, 1], [9, 0.1, "b", "y", 1, 1]]
    assert merge_narrow(bars, 1) == [[0, 0.2, "a", "x", 5, 2], [0.2, 0.1, "b", "y", 1, 1], [9, 0.1, "b", "y", 1, 1]]
    assert merge_narrow(bars, 0) == bars


def test_a_trace_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"runtime\.timeline_every"):
        read_trace(tmp_path, {"step": "3"})


def test_events_of_the_log(tmp_path):
    (tmp_path / "log.txt").write_text(
        "2026-11-24 10:00:00,123 INFO coalign.launch.run: loading policy\n"
        "2026-11-24 10:00:01,123 INFO coalign.launch.run: continuing from run/checkpoints/step_4\n"
        "2026-11-24 10:00:02,123 WARNING coalign.cluster.cluster: policy, replica 1 is lost (died); it is started "
        "again, 1 of 10 times (runtime.restarts)\n"
        "  a line of a traceback is lost (not at its beginning)\n"
        "2026-11-24 10:00:03,123 WARNING coalign.engine.hooks.guards: loss. Continuing from step 4 with later data\n"
    )
    write_trace(tmp_path, 12)
    write_trace(tmp_path, 3)
    found = read_timeline(tmp_path, {})
    assert found["traces"] == [3, 12]
    expected = [("01", "continued"), ("02", "lost"), ("03", "rolled_back")]
    assert [(event["time"][-2:], event["kind"]) for event in found["events"]] == expected


def test_placement_names_what_each_model_is(tmp_path):
    (tmp_path / "config.yaml").write_text("models: {policy: {load: m, num_gpu: 2, num_process: null, module: vllm}}")
    assert read_placement(tmp_path, {})["placement"] is None
    (tmp_path / "placement.json").write_text(json.dumps(PLACEMENT))
    found = read_placement(tmp_path, {})
    assert found["placement"] == PLACEMENT and found["settings"]["policy"] == {
        "load": "m",
        "module": "vllm",
        "num_gpu": 2,
    }
    (tmp_path / "placement.json").write_text("{}")
    with pytest.raises(ValueError, match=r"placement\.json: expected"):
        read_placement(tmp_path, {})


# ---- checkpoints and flow


def write_checkpoint(directory: Path, step: int, best: list | None = None) -> Path:
    path = directory / f"step_{step}"
    (path / "models" / "trainer").mkdir(parents=True)
    (path / "hf").mkdir()
    files = {
        "state.json": json.dumps({"step": step, "hooks": {"Save": {"best": best}}}).encode(),
        "models/trainer/rank_0.pt": b"a" * 300,
        "hf/model.safetensors": b"b" * 100,
    }
    entries = {}
    for file, content in files.items():
        (path / file).write_bytes(content)
        entries[file] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"files": entries}))
    return path


def test_checkpoints_best_linked_damaged_and_the_one_to_resume(tmp_path, monkeypatch):
    run, memory = tmp_path / "run", tmp_path / "memory"
    monkeypatch.setattr(checkpoints_reader, "MEMORY", memory)
    paths = {step: write_checkpoint(run / "checkpoints", step, [0.5, 2]) for step in (2, 4, 6)}
    (run / "model").symlink_to("checkpoints/step_2/hf")
    (run / "config.yaml").write_text("runtime: {best: eval/mean, best_mode: max, keep: 2, resume: auto}")
    (run / "checkpoints" / ".writing-step_8").mkdir()

    def read():
        found = read_checkpoints(run, {})
        flags = ("problem", "best", "linked", "resume")
        return found, {
            (each["place"], each["step"]): [name for name in flags if each[name]] for each in found["checkpoints"]
        }

    found, marks = read()
    assert marks == {("disk", 6): ["resume"], ("disk", 4): [], ("disk", 2): ["best", "linked"]}
    assert found["best"] == {"value": 0.5, "step": 2, "metric": "eval/mean", "mode": "max"}
    assert found["writing"] == ["step_8"] and found["copies_to"] is None
    sizes = found["checkpoints"][0]["sizes"]
    assert sizes["models/trainer"] == 300 and sizes["hf"] == 100 and sizes["state.json"] > 0

    (paths[6] / "hf" / "model.safetensors").write_bytes(b"b" * 99)
    (paths[4] / "hf" / "model.safetensors").write_bytes(b"c" * 100)  # only a look at the contents finds this
    found, marks = read()
    assert marks["disk", 6] == ["problem"] and marks["disk", 4] == ["resume"]
    assert "99 bytes" in found["checkpoints"][0]["problem"]
    assert "have changed" in read_verification(run, {"step": "4"})["problem"]
    assert read_verification(run, {"step": "2"}) == {"step": 2, "problem": None}
    with pytest.raises(FileNotFoundError):
        read_verification(run, {"step": "5"})

    own = memory / f"coalign-{os.getuid()}-0123456789abcdef"
    write_checkpoint(own, 7)
    (own / "run").symlink_to(run)
    other = memory / f"coalign-{os.getuid()}-fedcba9876543210"
    write_checkpoint(other, 9)
    (other / "run").symlink_to(tmp_path)
    assert read()[1]["memory", 7] == ["resume"] and ("memory", 9) not in read()[1]


def test_copies_are_those_that_the_log_tells_of(tmp_path):
    (tmp_path / "config.yaml").write_text("runtime: {save_copies_to: 's3://bucket/run', resume: never}")
    (tmp_path / "log.txt").write_text(
        "2026-11-24 10:00:00,000 INFO coalign: step 4 is copied to s3://bucket/run: 1.0 of 2.0 MiB sent in 1.0 s\n"
    )
    found = read_checkpoints(tmp_path, {})
    assert found["copied"] == [4] and found["checkpoints"] == [] and found["resume"] == "never"


def call(label: str, *reads: str) -> dict:
    model, _, method = label.rpartition(".")
    columns = {source: ["tokens"] for source in reads}
    return {"label": label, "model": model or None, "method": method, "reads": columns, "makes": []}


def test_a_call_is_below_all_that_it_reads(tmp_path):
    calls = [
        call("prompts"),
        call("policy.generate", "prompts"),
        call("reference.forward_step", "policy.generate"),
        call("advantages", "policy.generate"),
        call("trainer.train_step", "advantages", "reference.forward_step", "policy.generate"),
    ]
    assert list(assign_layers(calls).values()) == [0, 1, 2, 2, 3]
    with pytest.raises(FileNotFoundError, match=r"flow\.json"):
        read_flow(tmp_path, {})
    (tmp_path / "flow.json").write_text(json.dumps({"algorithm": "grpo", "calls": calls}))
    assert read_flow(tmp_path, {})["calls"][4] == {**calls[4], "layer": 3}


def test_the_server_sends_images_and_nothing_else_that_a_sample_lists(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "picture").write_bytes(PNG)  # images of a data file are kept without a suffix
    (run / "page.png").write_text("<svg onload='alert(1)'/>")
    listed = ["picture", str(run / "picture"), "page.png", "gone.png"]
    write_lines(run / "samples.jsonl", [sample(1, -3, 0, 1.0, images=listed)])
    client = TestClient(build_board(run), base_url="http://127.0.0.1:7070")
    answers = [client.get(f"/api/runs/run/image?step=1&group=-3&index=0&image={number}") for number in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 404]
    assert all(answer.content == PNG and answer.headers["content-type"] == "image/png" for answer in answers[:2])


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    for name in ("samples.jsonl", "flow.json", "placement.json", "timeline", "checkpoints"):
        (run / name).symlink_to(tmp_path / "elsewhere")
    (run / "rollouts").symlink_to(tmp_path / "elsewhere")
    client = TestClient(build_board(run), base_url="http://127.0.0.1:7070")
    for reader in ("sample_steps", "sample_page", "flow", "placement", "checkpoints", "verification?step=1"):
        answer = client.get(f"/api/runs/run/{reader}")
        assert answer.status_code == 400 and "leads out of the folder" in answer.json()["error"], reader
