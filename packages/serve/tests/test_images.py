"""Commands that are given images: generate, score, chat, serve and serve-reward."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import coalign
from coalign.backends.hf.fsdp import FSDPModule
from coalign.cli import app
from coalign.config.schema import DataConfig, ImagesConfig, ModelConfig, SamplingConfig, SourceConfig
from coalign.data.images.image_files import write_data_url
from coalign.data.sources import BadRow
from coalign.http_types import HttpRefusal
from coalign.report.display import Display
from coalign.roles import Context
from coalign_serve.chat import ChatSession, ChatSettings, chat
from coalign_serve.config.serving import CompletionServerConfig, ServeConfig
from coalign_serve.config.stages import ScoreConfig
from coalign_serve.dialects import ChatCompletions, Question
from coalign_serve.judges import open_judge
from coalign_serve.score import score
from coalign_serve.serving.completion_request import tokenize
from coalign_serve.serving.completion_server import load_text_tools
from coalign_serve.serving.request_images import RequestImages
from coalign_serve.serving.reward_server import RewardEndpoint
from packages.serve.tests.serving.http import call
from tests.vision import picture, vision_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and three pictures of the same size."""
    made = tmp_path_factory.mktemp("images")
    vision_model_dir(made / "model")
    for number in range(3):
        picture(made / f"{number}.png", seed=number)
    return made


@pytest.fixture(scope="module")
def reward_model(folder) -> Path:
    config = ModelConfig(load=str(folder / "model"), head="reward", head_init="zero", vision={})
    module = FSDPModule(config, Context(model="reward"))
    module.setup()
    torch.nn.init.normal_(module.model.model.get_parameter("score.weight"), generator=torch.Generator().manual_seed(0))
    module.save_hf(folder / "reward")
    module.close()
    return folder / "reward"


def shown() -> Display:
    return Display(out=Console(record=True, width=200), err=Console(record=True, width=200, stderr=True))


def test_generate_reads_the_images_of_rows_and_those_beside_a_prompt(folder):
    rows = [{"prompt": "<image>What?", "images": [str(folder / f"{n}.png")]} for n in (0, 1)]
    rows += [{"prompt": "What?"}]
    greedy = {"temperature": 0.0, "max_new_tokens": 6, "quiet": True}
    records = coalign.generate(folder / "model", rows, images=True, samples=1, **greedy)
    assert [record["images"] for record in records[:2]] == [row["images"] for row in rows[:2]]
    assert len({record["logprob"] for record in records}) == 3  # each image is another prompt
    options = ["--temperature", "0", "--max-new-tokens", "6", "--device", "cpu"]
    image = ["--image", str(folder / "0.png")]
    said = CliRunner().invoke(app, ["generate", str(folder / "model"), "--prompt", "What?", *image, *options])
    assert said.exit_code == 0 and records[0]["response"] in said.output
    refused = CliRunner().invoke(app, ["generate", str(folder / "model"), "--input", "a.jsonl", *image])
    assert "--image is for --prompt" in str(refused.exception)


@pytest.mark.slow
def test_score_reads_the_images_of_rows(folder, reward_model, tmp_path):
    rows = [{"prompt": "<image>?", "images": [f"{n}.png"], "response": "A dot."} for n in (0, 1, 0)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(train=[SourceConfig(path=str(folder / "rows.jsonl"))], images=ImagesConfig())
    score(ScoreConfig(data=data, reward_model=str(reward_model), device="cpu"), tmp_path / "out.jsonl", shown())
    scores = [json.loads(line)["score"] for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert scores[0] == pytest.approx(scores[2], abs=1e-5) and abs(scores[0] - scores[1]) > 1e-4


@pytest.mark.slow
def test_chat_shows_images_with_the_next_message(folder):
    settings = ChatSettings(folder / "model", SamplingConfig(max_new_tokens=4), images=True)
    display = shown()
    lines = [f"/image {folder / '0.png'}", "What?", str(folder / "1.png"), "And this?", "/image nothing.png", "/quit"]
    chat(settings, lines, display)
    notes = display.err.export_text() if display.err is not None else ""
    assert "0.png: 24 x 16 pixels, with the next message" in notes and "1.png: 24 x 16" in notes
    assert "error: the image nothing.png does not exist" in notes
    conversation = ChatSession(settings)
    conversation.show(str(folder / "0.png"))
    conversation.answer("What?", str)
    conversation.answer("Well?", str)
    first, _, third, _ = conversation.messages
    assert first["content"] == [
        {"type": "image", "image": str(folder / "0.png")},
        {"type": "text", "text": "What?"},
    ] and third == {"role": "user", "content": "Well?"}
    assert len(conversation._prompt(conversation.messages)["images"][0]) == 1
    blind = ChatSession(ChatSettings(folder / "model", SamplingConfig(max_new_tokens=4)))
    with pytest.raises(ValueError, match=r"loaded to read text alone; start with `coalign chat MODEL --images`"):
        blind.show(str(folder / "0.png"))


# ---- servers


def ask(*urls: str, text: str = "What?") -> Question:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return ChatCompletions.read(json.dumps({"messages": messages}).encode())


def test_a_request_names_images_as_data_urls_or_below_the_root_and_nothing_else(folder, tmp_path):
    config = CompletionServerConfig(model=str(folder / "model"), images=ImagesConfig())
    template = load_text_tools(config).template
    assert template is not None
    images = RequestImages(ImagesConfig())
    url = write_data_url(str(folder / "0.png"))
    prompt = tokenize(ask(url, text="<|image_pad|> is text"), template, images)
    assert len(prompt.images) == 1 and Path(prompt.images[0].path).is_file()
    place = prompt.images[0]
    assert prompt.tokens.count(prompt.tokens[place.start]) == place.length  # the text's spelling is none
    images.close()
    assert not Path(place.path).exists()
    (tmp_path / "inside").mkdir()
    picture(tmp_path / "inside" / "a.png")
    picture(tmp_path / "outside.png")
    (tmp_path / "inside" / "link.png").symlink_to(tmp_path / "outside.png")
    rooted = RequestImages(ImagesConfig(root=str(tmp_path / "inside")))
    inside = f"file://{tmp_path / 'inside' / 'a.png'}"
    assert len(tokenize(ask("a.png", inside), template, rooted).images) == 2
    broken = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    for served, url, message in (
        (RequestImages(ImagesConfig()), str(folder / "0.png"), "reads no files; send the image as a data URL"),
        (rooted, "../outside.png", "is not in the folder"),
        (rooted, str(tmp_path / "outside.png"), "is not in the folder"),
        (rooted, "link.png", "is not in the folder"),
        (rooted, "b.png", "does not exist"),
        (rooted, "https://example.org/a.png", "is a URL of the kind `https`: nothing is fetched"),
        (rooted, broken, "is no image that Pillow can read"),
        (RequestImages(ImagesConfig(max_file_pixels=100)), write_data_url(str(folder / "0.png")), "24 x 16 pixels"),
    ):
        with pytest.raises(HttpRefusal, match=message):
            tokenize(ask(url), template, served)
    blind = load_text_tools(CompletionServerConfig(model=str(folder / "model"))).template
    assert blind is not None
    with pytest.raises(HttpRefusal, match="this server reads text alone; one that is started with --images"):
        tokenize(ask("a.png"), blind)


@pytest.mark.slow
def test_serve_answers_about_an_image(folder):
    from packages.serve.tests.serving.test_completion_server import NAME, load, serving

    loop, config = load(folder / "model", max_new_tokens=6, images=ImagesConfig())
    rows = [{"prompt": "<image>What?", "images": [str(folder / "0.png")]}]
    [record] = coalign.generate(folder / "model", rows, images=True, temperature=0.0, max_new_tokens=6, quiet=True)
    body = ask(write_data_url(str(folder / "0.png"))).model_dump(exclude_none=True)
    with serving(loop, config) as base:
        said = call(f"{base}/v1/chat/completions", {**body, "model": NAME, "temperature": 0})
        assert said[0] == 200 and said[1]["choices"][0]["message"]["content"] == record["response"]
        bad = {**body, "model": NAME, "messages": ask("http://example.org/a.png").messages}
        status, answer, _ = call(f"{base}/v1/chat/completions", bad)
        assert status == 400 and "nothing is fetched" in answer["error"]["message"]


@pytest.mark.slow
def test_a_reward_server_sees_the_images_of_messages(folder, reward_model):
    config = ServeConfig(reward_model=str(reward_model), device="cpu", images=ImagesConfig())
    judge = open_judge(config, config.images)
    endpoint = RewardEndpoint(judge, config)

    def score(*names: str) -> Any:
        conversations = [
            [*ask(write_data_url(str(folder / name))).messages, {"role": "assistant", "content": "A dot."}]
            for name in names
        ]
        body = json.dumps({"query": ["-"] * len(names), "messages": conversations}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        from starlette.requests import Request

        scope = {"type": "http", "method": "POST", "headers": [], "path": "/", "query_string": b""}
        return asyncio.run(endpoint.get_reward(Request(scope, receive)))

    first, second, third = score("0.png", "1.png", "0.png")["rewards"]
    assert first == pytest.approx(third, abs=1e-5) and abs(first - second) > 1e-4
    judge.close()


def test_files_of_a_request_are_gone_after_it():
    images = RequestImages(ImagesConfig())
    with pytest.raises(BadRow, match="reads no files"):
        images.store("/etc/passwd")
    images.close()
