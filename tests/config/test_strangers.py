"""Files of strangers: YAML that would never end, names of code; and secrets that would be written down."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest
import yaml
from hypothesis import strategies as st
from rich.console import Console

from coalign import cli
from coalign.config import ConfigError, dump, load, load_section
from coalign.config.functions import bind, refuse_code, resolve
from coalign.config.secrets import hide_secrets
from coalign.config.yaml_reader import parse
from coalign.data.sources import BadRow, _JsonLines
from coalign.files import RecordFile, RecordHandler
from coalign.report.display import Display
from coalign_graders.services.remote import Remote
from coalign_serve.config.stages import ScoreConfig
from coalign_serve.resumable import fingerprint_settings
from tests.config.conftest import recipe_defaults
from tests.fuzzing import CASES, JSON, damage, try_cases
from tests.runs import ROOT

GOOD = """
algorithm: grpo
output: runs/${env:USER_NAME,x}
data: {train: train.jsonl}
models:
  policy: &policy {load: model, optimizer: {lr: 1e-6}}
  trainer: {like: policy, optimizer: {lr: "${models.policy.optimizer.lr}"}}
runtime: {steps: 10_000, save_every: "${runtime.steps}"}
"""
ALIASES = "a: &a0 [x]\n" + "".join(f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
MERGES = "a: &a0 {x: 1}\n" + "".join(f"b{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60))
LADDER = "a: &a0 [x]\n" + "".join(f"b{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 90))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "over 100000 values, with aliases written out"),
        (MERGES, "over 100000 values, with aliases written out"),
        (LADDER, "over 50 levels"),
        ("a: " + "[" * 100_000, "over 50 levels"),
        ("a: " + "{x: " * 100_000, "over 50 levels"),
        ("- " * 1000, "over 50 levels"),
        ("a: " + "9" * 5000, "is no int that can be read"),
        ("a: !!int x", "is no int that can be read"),
        ("a: !!float x", "is no float that can be read"),
        ("a: " + "1" * 200_000 + "x\nb: [", "not valid YAML"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", "not valid YAML"),
        ("a: " + "x" * 5_000_000, "too long"),
        ("a: 1\nb: 'x\x85y'\nc: 2", r"run.yaml:2: .*U\+0085.*write \"\\u0085\" in double quotes"),
        ("# a note\u2028\na: 1", r"run.yaml:1: .*U\+2028"),
    ],
    ids=[
        "aliases",
        "merges",
        "ladder",
        "lists",
        "maps",
        "dashes",
        "digits",
        "int",
        "float",
        "number",
        "character",
        "version",
        "size",
        "next line",
        "line separator",
    ],
)
def test_a_bomb_is_refused_at_once_with_its_place(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text, "run.yaml")
    assert "run.yaml" in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("steps", [12, 30])
def test_references_of_references_do_not_grow_without_end(run, steps):
    texts = {f"a{i}": f"${{models.policy.vllm.a{i - 1}}}" * 4 for i in range(1, steps)}
    given = {"algorithm": "grpo", "models": {"policy": {"vllm": {"a0": "xxxx", **texts}}}}
    with pytest.raises(ConfigError, match="references add up to too much"):
        run(yaml.safe_dump(given))


def test_a_chain_of_references_is_followed_and_a_circle_named(run, complaint):
    assert (
        run(
            "{algorithm: grpo, seed: '${runtime.steps}', runtime: {steps: '${runtime.save_every}', save_every: 7}}"
        ).seed
        == 7
    )
    text = "{algorithm: grpo, seed: '${runtime.steps}', runtime: {steps: '${seed}'}}"
    assert "refers to itself" in complaint(text)


def test_the_value_of_a_secret_is_in_no_file(run, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    monkeypatch.setenv("STEPS", "12")
    config = run(
        "{algorithm: grpo, runtime: {steps: '${env:STEPS}'}, models: {policy: {sampling: {stop: "
        "['${env:MY_API_KEY}', 'a ${env:MY_API_KEY} b', '${models.policy.sampling.stop[0]}']}}}}"
    )
    assert config.models["policy"].sampling.stop[1] == "a hunter2-hunter2 b"
    text = dump(config)
    assert "hunter2" not in text and text.count("${env:MY_API_KEY}") >= 3 and "steps: 12" in text
    assert "hunter2" not in json.dumps(hide_secrets(config.model_dump())) and run(text) == config


@pytest.mark.parametrize("secret", ["hunter2-hunter2", "long-" * 20, 'it\'s "quoted" \\', "20261122", "a${b}c#d"])
@pytest.mark.parametrize(
    "text",
    [
        "{algorithm: grpo, seed: 'x ${env:MY_API_KEY}'}",
        "{algorithm: grpo, models: {policy: {dtype: '${env:MY_API_KEY}'}}}",
        "{algorithm: grpo, models: {policy: {load: './a/${env:MY_API_KEY}'}}}",
        "{algorithm: grpo, runtime: {colocation: [['${env:MY_API_KEY}']]}}",
        "{algorithm: grpo, reward: [{fn: math, name: 'x${env:MY_API_KEY}'}, {fn: math, name: 'x${env:MY_API_KEY}'}]}",
        "{algorithm: '${env:MY_API_KEY}x'}",
    ],
)
def test_the_value_of_a_secret_is_in_no_message(complaint, monkeypatch, text, secret):
    monkeypatch.setenv("MY_API_KEY", secret)
    said = complaint(text)
    assert "${env:MY_API_KEY}" in said and not any(part in said for part in (secret, secret[:6], repr(secret)[1:-1]))


def test_the_value_of_a_secret_is_in_no_message_of_a_function(run, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    arguments = "url: 'ftp://x/${env:MY_API_KEY}', pause: '${env:MY_API_KEY}'"
    config = run(f"{{algorithm: grpo, reward: {{fn: remote, {arguments}}}}}")
    with pytest.raises(ConfigError) as caught:
        bind(Remote, config.reward[0].arguments, "reward")
    for said in (str(caught.value), repr(caught.value)):
        assert "hunter2" not in said and said.count("${env:MY_API_KEY}") >= 2


def test_the_value_of_a_secret_is_in_no_output_of_a_command(write, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    text = "{reward: {fn: remote, url: 'http://x', extra: {key: '${env:MY_API_KEY}', say: 'a ${env:MY_API_KEY}'}}}"
    written = json.dumps(fingerprint_settings(load_section(ScoreConfig, write(text))))
    assert "hunter2" not in written and written.count("${env:MY_API_KEY}") == 2


@pytest.mark.parametrize("reference", ["${env:MY_API_KEY}", "${oc.env:MY_API_KEY}"])
def test_the_value_of_a_secret_is_in_no_file_log_or_screen(run, here, monkeypatch, reference):
    monkeypatch.setenv("MY_API_KEY", "hunter2/hunter2")
    monkeypatch.setenv("WANDB_API_KEY", "swordfish-swordfish")  # which wandb's client reads by itself
    config = run(f"{{algorithm: grpo, output: 'x/{reference}'}}")
    assert str(config.output).endswith("hunter2/hunter2")
    screen = Console(file=io.StringIO(), width=200)
    record = logging.makeLogRecord(
        {"levelno": logging.ERROR, "levelname": "ERROR", "msg": "%s, %s and %s failed"}
        | {"args": ("hunter2/hunter2", "https://x?key=hunter2%2Fhunter2", "swordfish-swordfish")}
    )
    Display(err=screen).handler().handle(record)
    RecordHandler(RecordFile(here / "log.txt"), hide_secrets).handle(record)
    for text in (dump(config), screen.file.getvalue(), (here / "log.txt").read_text()):
        assert "hunter2" not in text and "swordfish" not in text and "${env:MY_API_KEY}" in text


def test_the_value_of_a_secret_is_in_no_traceback_of_a_command(run, monkeypatch, capsys):
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    run("{algorithm: grpo, output: '${oc.env:MY_API_KEY}'}")

    def fail(**_):
        raise RuntimeError("no hunter2-hunter2 there")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "RuntimeError: no ${env:MY_API_KEY} there" in said and "hunter2" not in said


def test_a_path_that_is_too_long_is_that_of_no_file(complaint):
    text = f"{{algorithm: grpo, data: {{train: {'x' * 300}}}, models: {{policy: {{load: {'y' * 300}}}}}}}"
    assert "data.train.path: " in (said := complaint(text)) and "models.policy.load: " in said


def test_what_is_short_or_named_like_no_secret_is_shown(run, monkeypatch):
    monkeypatch.setenv("STEPS_TOKEN", "12")
    monkeypatch.setenv("PLACE", "somewhere")
    text = dump(run("{algorithm: grpo, output: '${env:PLACE}', runtime: {steps: '${env:STEPS_TOKEN}'}, seed: 12}"))
    assert "output: somewhere" in text and "steps: 12\n" in text and "seed: 12\n" in text


def test_a_row_with_a_number_of_5000_digits_is_a_bad_row():
    for line in (b'{"a": 1' + b"0" * 5000 + b"}", b'{"a": ' + b"[" * 100_000, b"\xff", b'"x"'):
        with pytest.raises(BadRow):
            _JsonLines.parse(line)


@pytest.fixture
def no_code():
    refuse_code()
    yield
    refuse_code(False)


@pytest.mark.parametrize("name", ["os:system", "coalign.files:os.system", "coalign.files:os", "tests.digits:digits"])
def test_with_no_code_only_coaligns_own_functions_are_found(no_code, name):
    assert resolve("math", "coalign.rewards") and resolve("coalign_graders.math_answer:math", "coalign.rewards")
    with pytest.raises(ValueError, match=f"'{name}' is not Coalign's own"):
        resolve(name, "coalign.rewards")


def test_with_no_code_no_code_of_a_model_is_trusted(no_code, complaint):
    assert "with --no-code no code of a model is run" in complaint(
        "{algorithm: grpo, models: {policy: {trust_remote_code: true}}}"
    )


@pytest.mark.slow
def test_no_code_of_a_strangers_folder_is_run(here):
    marker = here / "was run"
    for module in ("stranger", "transformers", "yaml", "torch"):
        (here / f"{module}.py").write_text(f"open({str(marker)!r}, 'w')\ndef fn(sample): return 0.0\n")
    (here / "run.yaml").write_text("algorithm: grpo\ndata: {train: train.jsonl}\nreward: {fn: 'stranger:fn'}\n")
    command = [sys.executable, "-m", "coalign.cli", "check", "run.yaml", "--no-code"]
    # As for the installed command, which does not begin with the current directory.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "'stranger:fn' is not Coalign's own" in done.stderr, done.stderr
    assert not marker.exists()


@CASES
def test_any_yaml_is_read_or_refused(here, cases):
    def check(text):
        for source in (text, text.replace("\x00", "")):
            (here / "run.yaml").write_text(source, errors="replace")
            try:
                load("run.yaml", defaults=recipe_defaults)
            except ConfigError as problem:
                assert str(problem)

    pieces = [
        b"&a ",
        b"*a",
        b"<<: *a",
        b"${",
        b"}",
        b"[",
        b"{",
        b": ",
        b"!!int ",
        b"? ",
        b"|\n",
        b"'",
        b"${env:",
        b"\n- ",
    ]
    changed = damage(GOOD.encode(), pieces).map(lambda raw: raw.decode(errors="replace"))
    trees = JSON.map(lambda value: yaml.safe_dump({"algorithm": "grpo", "models": value}, allow_unicode=True))
    try_cases(st.text(max_size=100) | changed | trees, check, cases)


@CASES
def test_any_line_of_rows_is_read_or_refused(cases):
    def check(line):
        try:
            _JsonLines.parse(line)
        except BadRow as problem:
            assert str(problem)

    good = json.dumps({"messages": [{"role": "user", "content": "x"}], "answer": 3}).encode()
    try_cases(st.binary(max_size=50) | damage(good) | JSON.map(lambda value: json.dumps(value).encode()), check, cases)
