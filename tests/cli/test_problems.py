"""What a command says when people's own code fails: message, file, line and source line, on one screen."""

import sys

import pytest

from coalign import cli

SOURCE = "def fails(sample):\n    return helper(sample)\n\n\ndef helper(sample):\n    return 1 / sample\n"


def fail(monkeypatch, capsys, action, *options):
    monkeypatch.setattr(sys, "argv", ["coalign", "train", *options])
    monkeypatch.setattr(cli, "app", lambda **_: action())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1 and "--traceback" not in sys.argv
    return capsys.readouterr().err


@pytest.fixture
def reward(tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_reward  # pyright: ignore[reportMissingImports]

    yield own_reward
    del sys.modules["own_reward"]


def test_a_reward_that_raises_is_named_with_its_line(monkeypatch, capsys, reward):
    said = fail(monkeypatch, capsys, lambda: reward.fails(0))
    assert said.splitlines() == [
        "error: ZeroDivisionError: division by zero",
        f"  at {reward.__file__}:6, in helper",
        "      return 1 / sample",
        "`--traceback` shows the whole traceback; log.txt of a run has it",
    ]
    whole = fail(monkeypatch, capsys, lambda: reward.fails(0), "--traceback")
    assert whole.startswith("Traceback") and said in whole


def test_a_syntax_error_is_named_with_its_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "broken_reward.py").write_text("def fails(sample)\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = fail(monkeypatch, capsys, lambda: __import__("broken_reward"))
    assert "SyntaxError: expected ':'" in said and f"at {tmp_path / 'broken_reward.py'}:1\n" in said
    assert "def fails(sample)" in said and len(said.splitlines()) <= 10


def test_the_error_of_a_worker_is_shown_without_its_traceback(monkeypatch, capsys, tmp_path):
    from coalign.cluster.batch_ref import WorkerFailure
    from coalign.cluster.future import Call, WorkerError

    trace = f'Traceback (most recent call last):\n  File "{tmp_path}/mine.py", line 7, in loss\n    return x.y\n'
    error = WorkerError(Call("trainer", "train_step"), "trainer", WorkerFailure("AttributeError", "no y", trace))

    def work():
        raise error

    said = fail(monkeypatch, capsys, work).splitlines()
    assert said[0].startswith("error: WorkerError: trainer.train_step failed in trainer: AttributeError: no y")
    assert said[1:3] == [f"  at {tmp_path}/mine.py:7, in loss", "      return x.y"] and len(said) == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tran", "x"], "there is no command 'tran'; did you mean 'train'? (`coalign --help`"),
        (["frobnicate"], "there is no command 'frobnicate' (`coalign --help` shows what there is)"),
        (["generate", "m", "--engine", "x"], "--engine: there is no such option"),
        (["generate", "m", "--temperature", "-1"], "--temperature: expected at least 0 (`coalign generate --help`"),
        (["generate", "m", "--dtype", "bf16"], "'bf16' is not one of "),
        (["merge", "a", "b"], "--output (-o): missing (`coalign merge --help`"),
        (["serve", "m", "--port", "70000"], "--port: expected at most 65535"),
        (["generate", "nowhere", "-p", "x"], "error: MODEL: there is no directory 'nowhere'"),
        (["chat", "nowhere"], "error: there is no directory 'nowhere'"),
        (["generate", "MODEL", "-i", "x.jsonl"], "error: --input: there is no file 'x.jsonl'"),
        (["generate", "MODEL", "-p", "x", "--device", "cuda"], "error: --device: 'cuda' is not here"),
        (["diagnose", "/nowhere"], ""),
    ],
)
def test_a_command_line_that_is_wrong_is_one_line(monkeypatch, capsys, tmp_path, words, expected):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["coalign", *(str(tmp_path) if word == "MODEL" else word for word in words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and expected in said


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_a_question_ends_well(monkeypatch, word):
    monkeypatch.setattr(sys, "argv", ["coalign", word])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
