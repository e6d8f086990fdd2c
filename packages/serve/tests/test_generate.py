"""`coalign generate`: what it writes, best-of-n, going on after a kill, bad input."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from coalign.backends.engines.native.native_engine import NativeModule
from coalign.cli import app
from coalign.config.schema import DataConfig, NativeConfig, SamplingConfig, SourceConfig
from coalign.report.display import Display
from coalign.rewards.calls import RewardError
from coalign.run_files.lock import FolderInUse
from coalign_serve.config.stages import GenerateConfig
from coalign_serve.generate import generate
from coalign_serve.resumable import ResumableOutput
from packages.serve.tests.interruption import Killed, kill_after, read_rows, write_rows
from tests.runs import ROOT
from tests.tiny import tiny_model_dir, tiny_reward_model_dir

ROWS, SAMPLES = 6, 3


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("generate")
    tiny_model_dir(path / "model")
    write_sums(path, ROWS)
    return path


def settings(home, **changes):
    """Two prompts are answered, and kept, at a time."""
    data = DataConfig(train=[SourceConfig(path=str(home / "sums.jsonl"))], chat_template="none", shuffle=False)
    given = {"model": str(home / "model"), "data": data, "samples": SAMPLES, "native": NativeConfig(max_sequences=2)}
    return GenerateConfig(**given | {"sampling": SamplingConfig(max_new_tokens=6)} | changes)


def write_sums(path, rows):
    write_rows(path / "sums.jsonl", *({"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)} for i in range(rows)))


def quiet():
    return Display(quiet=True, err=Console(quiet=True))


def test_a_record_for_each_response(home, tmp_path):
    counts = generate(settings(home), tmp_path / "out.jsonl", quiet())
    records = read_rows(tmp_path / "out.jsonl")
    assert [(r["group"], r["index"]) for r in records] == [(g, i) for g in range(ROWS) for i in range(SAMPLES)]
    assert records[SAMPLES]["prompt"] == "1+4=" and records[SAMPLES]["answer"] == "5"
    assert records[0]["messages"] == [{"role": "user", "content": "0+3="}]
    assert {"response", "status", "tokens", "logprob"} <= set(records[0]) and "score" not in records[0]
    assert counts["responses"] == ROWS * SAMPLES and counts["tokens"] == sum(r["tokens"] for r in records)
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_the_engine_on_transformers_cache_writes_the_same(home, tmp_path):
    for module in ("native", "transformers"):
        generate(settings(home, module=module), tmp_path / module, quiet())
    ours, theirs = read_rows(tmp_path / "native"), read_rows(tmp_path / "transformers")
    assert [row.pop("logprob") for row in theirs] == pytest.approx([row.pop("logprob") for row in ours], abs=1e-4)
    assert ours == theirs


def test_the_best_of_n_has_the_highest_score(home, tmp_path):
    reward = [{"fn": "tests.digits:digits"}]
    generate(settings(home, reward=reward), tmp_path / "all.jsonl", quiet())
    generate(settings(home, reward=reward, keep="best"), tmp_path / "best.jsonl", quiet())
    everything = read_rows(tmp_path / "all.jsonl")
    assert len({r["score"] for r in everything}) > 1
    for group, best in enumerate(read_rows(tmp_path / "best.jsonl")):
        samples = [r for r in everything if r["group"] == group]
        assert best == max(samples, key=lambda r: r["score"])  # of equals the first


def test_a_reward_model_scores_the_conversation_as_its_template_renders_it(home, tmp_path):
    judge = tiny_reward_model_dir(tmp_path / "judge", seed=3)
    generate(settings(home, reward_model=str(judge)), tmp_path / "out.jsonl", quiet())
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    for record in read_rows(tmp_path / "out.jsonl"):
        messages = [*record["messages"], {"role": "assistant", "content": record["response"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
        text = text.removesuffix("<|im_end|>") if record["status"] == "truncated" else text
        with torch.no_grad():
            states = model.model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
            expected = model.score(states[0, -1])
        assert record["score"] == pytest.approx(float(expected), abs=1e-5)


def test_a_prompt_that_is_too_long_follows_the_policy_and_is_named_by_its_line(home, tmp_path, caplog):
    lines = [{"prompt": "" if i == 1 else f"{i}+1="} for i in range(4)] + [{"prompt": "1" * 2048}, {"prompt": "9+1="}]
    write_rows(tmp_path / "p.jsonl", *lines)
    options = {"train": [{"path": str(tmp_path / "p.jsonl")}], "chat_template": "none", "max_prompt_tokens": 10**6}
    with pytest.raises(ValueError, match=r"p\.jsonl:5: .*2048 tokens, and 2047 are .*max_position_embeddings of model"):
        generate(settings(home, data=DataConfig(**options, on_long="error")), tmp_path / "a.jsonl", quiet())
    counts = generate(settings(home, data=DataConfig(**options)), tmp_path / "b.jsonl", quiet())
    assert counts["responses"] == 4 * SAMPLES and "p.jsonl:5: " in caplog.text
    cut = DataConfig(**options, on_long="truncate_left")
    assert generate(settings(home, data=cut), tmp_path / "c.jsonl", quiet())["responses"] == 5 * SAMPLES


@pytest.mark.parametrize("units", [1, *(pytest.param(units, marks=pytest.mark.slow) for units in (2, 3))])
@pytest.mark.parametrize("cut", [0, 40], ids=["whole lines", "a line cut in half"])
def test_a_killed_call_goes_on_where_it_was(home, tmp_path, monkeypatch, units, cut):
    config = settings(home, reward=[{"fn": "tests.digits:digits"}])
    generate(config, tmp_path / "whole.jsonl", quiet())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, ResumableOutput, "add", units)
        generate(config, tmp_path / "killed.jsonl", quiet())
    assert not (tmp_path / "killed.jsonl").exists()
    partial = tmp_path / "killed.jsonl.partial"
    os.truncate(partial, partial.stat().st_size - cut)
    answered, real = [], NativeModule.generate
    monkeypatch.setattr(NativeModule, "generate", lambda self, p, **k: (answered.append(len(p)), real(self, p, **k))[1])
    generate(config, tmp_path / "killed.jsonl", quiet())
    assert answered == [2] * (3 - units + (cut > 0))
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("sampling.temperature", {"sampling": SamplingConfig(max_new_tokens=6, temperature=0.5)}),
        pytest.param("seed", {"seed": 1}, marks=pytest.mark.slow),
        pytest.param("prompts", {"prompts": 5}, marks=pytest.mark.slow),
        ("model", None),
    ],
)
def test_what_was_begun_otherwise_begins_anew(home, tmp_path, monkeypatch, caplog, what, change):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, ResumableOutput, "add", 1)
        generate(settings(home), tmp_path / "out.jsonl", quiet())
    change = change or {"model": str(tiny_model_dir(tmp_path / "other", seed=5))}
    with caplog.at_level(logging.WARNING):
        generate(settings(home, **change), tmp_path / "out.jsonl", quiet())
    assert f"out.jsonl.partial: {what} changed since it was begun, so it starts over" in caplog.text
    generate(settings(home, **change), tmp_path / "whole.jsonl", quiet())
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_two_calls_cannot_write_one_file(home, tmp_path):
    with open(tmp_path / "out.jsonl.partial", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse, match=r"out\.jsonl is being written by another process"):
            generate(settings(home), tmp_path / "out.jsonl", quiet())


def test_rewards_that_fail_are_counted(home, tmp_path):
    err = Console(record=True, width=200)
    failing = [{"fn": "packages.serve.tests.functions:partly_digits", "retries": 0}]
    counts = generate(settings(home, reward=failing, keep="best"), tmp_path / "out.jsonl", Display(err=err))
    assert [r["group"] for r in read_rows(tmp_path / "out.jsonl")] == [0, 1, 3, 4]  # 2+5= and 5+8= have a five
    assert counts["responses"] == 4
    assert "responses without a score: 6 raised; first: reward function 'partly_digits' on group 2" in err.export_text()


def test_a_reward_that_never_works_ends_the_call(home, tmp_path):
    failing = [{"fn": "packages.serve.tests.functions:never", "retries": 0}]
    with pytest.raises(RewardError, match=r"no response could be scored; .*ValueError: no"):
        generate(settings(home, reward=failing), tmp_path / "out.jsonl", quiet())


def test_each_round_draws_other_prompts(home, tmp_path):
    data = settings(home).data.model_copy(update={"shuffle": True})
    drawn = []
    for round in (1, 2, 3):
        out = tmp_path / f"{round}.jsonl"
        generate(settings(home, data=data, prompts=2, samples=1), out, quiet(), round=round)
        assert [r["group"] for r in read_rows(out)] == [2 * round - 2, 2 * round - 1]
        drawn += [r["_row"] for r in read_rows(out)]
    assert sorted(drawn) == list(range(ROWS)) and drawn != sorted(drawn)


def test_on_the_command_line(home, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ["--chat-template", "none", "--max-new-tokens", "6", "-n", str(SAMPLES)]
    command = ["generate", str(home / "model"), "-i", str(home / "sums.jsonl"), "-o", str(out), *options]
    assert CliRunner().invoke(app, [*command, "--best", "--reward", "tests.digits:digits"]).exit_code == 0
    generate(settings(home, reward=["tests.digits:digits"], keep="best"), tmp_path / "best.jsonl", quiet())
    assert out.read_bytes() == (tmp_path / "best.jsonl").read_bytes()
    shown = CliRunner().invoke(app, ["generate", str(home / "model"), "-p", "0+3=", *options])
    assert shown.exit_code == 0 and read_rows(out)[0]["response"].strip() in shown.stdout
    assert "give either --prompt" in str(CliRunner().invoke(app, ["generate", str(home / "model")]).exception)


def rows_of(path):
    return {"data": DataConfig(train=[SourceConfig(path=str(path))], prompt_key="question")}


WRONG = {  # changes of the settings, by the folders of the model and of the test; and what is said
    "model": (lambda home, tmp: {"model": str(tmp)}, "is not a Hugging Face model directory"),
    "file": (lambda home, tmp: rows_of(home / "sum.jsonl"), r"sum\.jsonl does not exist; did you mean .*sums\.jsonl"),
    "rows": (lambda home, tmp: rows_of(tmp / "empty.jsonl"), r"empty\.jsonl holds no rows"),
    "key": (lambda home, tmp: rows_of(home / "sums.jsonl"), r"sums\.jsonl:1: no key 'question'; the row has answer, "),
    "score": (lambda home, tmp: {"keep": "best"}, "nothing scores the responses"),
    "argument": (
        lambda home, tmp: {"reward": [{"fn": "regex", "pattern": "a", "patern": "b"}]},
        r"reward\[0\]\.patern: unknown argument of regex; did you mean 'pattern'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(home, tmp_path, changes, message):
    out = tmp_path / "out.jsonl"
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        generate(settings(home, **changes(home, tmp_path)), out, quiet())
    assert not out.exists() and not out.with_name("out.jsonl.partial").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigkill(home, tmp_path):
    write_sums(tmp_path, 400)
    options = ["-i", str(tmp_path / "sums.jsonl"), "-n", "4", "--max-new-tokens", "32", "--chat-template", "none"]

    def start(out):
        command = [sys.executable, "-m", "coalign.cli", "generate", str(home / "model"), "-o", str(out), *options]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)

    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    start(whole).communicate()
    process, partial = start(killed), killed.with_name("killed.jsonl.partial")
    while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not killed.exists()
    start(killed).communicate()
    assert killed.read_bytes() == whole.read_bytes()
