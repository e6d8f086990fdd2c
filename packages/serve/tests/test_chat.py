"""`coalign chat`: answers as they come, what has been said, commands, Ctrl-C, a pipe."""

import json
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coalign.cli import app
from coalign.config.schema import SamplingConfig
from coalign.report.display import Display
from coalign_serve.chat import ChatSession, ChatSettings, chat
from tests.runs import ROOT
from tests.tiny import tiny_model_dir, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("chat"), max_position_embeddings=128)


def settings(model, **changes):
    return ChatSettings(**{"model": model, "sampling": SamplingConfig(max_new_tokens=8), **changes})


def shown():
    return Display(out=Console(record=True, width=200), err=Console(record=True, width=200, stderr=True))


def test_the_pieces_are_the_answer(model):
    pieces = []
    conversation = ChatSession(settings(model))
    answer = conversation.answer("hello", pieces.append)
    assert "".join(pieces) == answer and len(pieces) > 2
    assert [message["content"] for message in conversation.messages] == ["hello", answer]


def test_arguments_of_the_template_reach_the_model(model):
    thinking = {"chat_template": "qwen3-training", "chat_template_kwargs": {"enable_thinking": False}}
    conversation = ChatSession(settings(model, **thinking))
    prompt = conversation._prompt([{"role": "user", "content": "hello"}])["tokens"]
    assert conversation._module.tokenizer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    options = ["chat", str(model), "--chat-template", "qwen3-training", "--chat-template-kwargs"]
    refused = CliRunner().invoke(app, [*options, "{enable_thinkin: false}"], input="/quit\n")
    assert "did you mean 'enable_thinking'" in str(refused.exception)
    refused = CliRunner().invoke(app, [*options, "false"], input="/quit\n")
    assert "'false' is no mapping like {enable_thinking: false}" in str(refused.exception)
    assert CliRunner().invoke(app, [*options, "{enable_thinking: false}"], input="/quit\n").exit_code == 0


def test_the_model_reads_what_was_said_before(model, monkeypatch):
    conversation, asked = ChatSession(settings(model, system="Be brief.")), []
    module, generate = conversation._module, conversation._module.generate
    monkeypatch.setattr(module, "generate", lambda p, **k: (asked.append(p["tokens"].tolist()), generate(p, **k))[1])
    tokenizer = module.tokenizer
    first = conversation.answer("one", str)
    conversation.answer("two", str)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    longer = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    for found, said in zip(asked, (messages, longer), strict=True):
        assert tokenizer.decode(found) == tokenizer.apply_chat_template(
            said, tokenize=False, add_generation_prompt=True
        )
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_equal_questions_get_other_random_numbers_and_equal_seeds_the_same(model):
    def answers(seed):
        conversation = ChatSession(settings(model, seed=seed))
        first = conversation.answer("hello", str)
        conversation.reset()
        return first, conversation.answer("hello", str)

    assert answers(0) == answers(0) != answers(1)
    assert len(set(answers(0))) == 2


def test_ctrl_c_ends_the_answer_and_not_the_chat(model):
    conversation, whole = ChatSession(settings(model)), ChatSession(settings(model))
    expected, pieces = whole.answer("hello", str), []

    def interrupt(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    answer = conversation.answer("hello", interrupt)
    assert expected.startswith(answer) and 0 < len(answer) < len(expected)
    assert conversation.messages[-1]["content"] == answer
    assert conversation.answer("and now?", str)


def test_commands(model, tmp_path):
    display = shown()
    lines = ["hello", "", f"/save {tmp_path / 'said.jsonl'}", "/save", "/reset", "again", "/rest", "/quit", "never"]
    chat(settings(model), lines, display)
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_bytes().splitlines()]
    assert [[m["role"] for m in row["messages"]] for row in said] == [["user", "assistant"]]
    remarks = display.err.export_text()
    assert "(forgotten)" in remarks and "/rest: no such command" in remarks and "/save: no such command" in remarks


@pytest.mark.parametrize(
    ("line", "said"),
    [("x" * 200, "the model's context is 128"), ("/save no/said.jsonl", "No such file or directory")],
    ids=["too long", "cannot be saved"],
)
def test_what_fails_does_not_end_the_chat(model, tmp_path, monkeypatch, line, said):
    monkeypatch.chdir(tmp_path)
    display = shown()
    chat(settings(model), [line, "short"], display)
    assert said in display.err.export_text() and display.out.export_text().strip()


def test_what_is_wrong_is_said(model, tmp_path):
    with pytest.raises(ValueError, match="is not a Hugging Face model directory"):
        ChatSession(settings(tmp_path))
    tiny_model_dir(tmp_path / "plain")
    tiny_tokenizer(tmp_path / "plain", chat_template=None)
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has no chat template"):
        ChatSession(settings(tmp_path / "plain"))


def test_a_pipe(model):
    options = ["chat", str(model), "--max-new-tokens", "4", "--temperature", "0", "--system", "Be brief."]
    result = CliRunner().invoke(app, options, input="hello\n/quit\n")
    assert result.exit_code == 0
    greedy = settings(model, system="Be brief.", sampling=SamplingConfig(max_new_tokens=4, temperature=0.0))
    assert ChatSession(greedy).answer("hello", str).strip() in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_signal_stops_the_answer_of_a_process(tmp_path):
    model = tiny_model_dir(tmp_path, eos_token_id=259)
    command = [sys.executable, "-u", "-m", "coalign.cli", "chat", str(model), "--max-new-tokens", "2000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    process.stdin.write(f"/save {tmp_path / 'said.jsonl'}\n/quit\n".encode())
    process.communicate(timeout=60)
    assert process.returncode == 0
    (row,) = map(json.loads, (tmp_path / "said.jsonl").read_bytes().splitlines())
    assert 0 < len(row["messages"][-1]["content"]) < 2000
