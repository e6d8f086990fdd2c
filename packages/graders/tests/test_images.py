"""What rewards that are services are sent of images."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch

from coalign.rewards.calls import GiveUp
from coalign.types import Sample
from coalign_graders.services.remote import Remote
from coalign_graders.services.remote_judge import RemoteJudge
from tests.vision import picture


def answer(path: Path) -> Sample:
    content = [{"type": "image", "image": str(path)}, {"type": "text", "text": "What?"}]
    asked = [{"role": "user", "content": content}]
    return Sample(
        group=0, index=0, tokens=torch.zeros(0), loss_mask=torch.zeros(0), logprobs=torch.zeros(0),
        prompt="<placeholder>What?", response="A dot.", messages=[*asked, {"role": "assistant", "content": "A dot."}],
        meta={"prompt": "What?", "messages": asked, "images": [str(path)]},
    )  # fmt: skip


def test_services_get_the_content_of_images(tmp_path):
    path = picture(tmp_path / "a.png")
    content = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    part = {"type": "image_url", "image_url": {"url": content}}
    judge, sample = RemoteJudge(url="http://127.0.0.1:1/v1/chat/completions", judge="some"), answer(path)
    [body] = judge._write(judge._questions.ask([sample]), sample)
    [question] = json.loads(body)["messages"]
    assert question["content"][0] == part and "What?" in question["content"][1]["text"]
    blind = RemoteJudge(url="http://127.0.0.1:1/v1/chat/completions", judge="some", show_images=False)
    [body] = blind._write(blind._questions.ask([sample]), sample)
    assert isinstance(json.loads(body)["messages"][0]["content"], str)
    body = Remote(url=["http://127.0.0.1:1/get_reward"])._body([sample])
    [sent] = json.loads(body)["messages"]
    assert sent[0]["content"] == [part, {"type": "text", "text": "What?"}] and sent[1]["content"] == "A dot."
    path.unlink()
    with pytest.raises(GiveUp, match=r"an image of the prompt cannot be read: .*a\.png"):
        judge._write(judge._questions.ask([sample]), sample)
