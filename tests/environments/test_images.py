"""Episodes with images: in the row, in what an environment says, and in what tools return."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coalign.backends.engines.episodes import EpisodesFailed
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.config.schema import ImagesConfig, ModelConfig
from coalign.data.images.image_files import write_data_url
from coalign.environments.episode import Episode
from coalign.environments.loop import EnvironmentFunction
from coalign.roles import Context
from coalign_agents.tools import ToolRequest, _Toolbox
from tests.backends.test_images import build_trainer, load_prompts
from tests.vision import picture, vision_model_dir


async def look_twice(episode: Episode, *, url: str, file: str) -> None:
    """Shows a picture between turns: first as a data URL with words, then as a file's path."""
    await episode.generate(max_new_tokens=3)
    picture = {"type": "image_url", "image_url": {"url": url}}
    episode.say({"role": "user", "content": [{"type": "text", "text": "Now "}, picture]})
    await episode.generate(max_new_tokens=3)
    episode.say({"role": "user", "content": [{"type": "image", "image": file}]})
    await episode.generate(max_new_tokens=3)


def build(path: Path, images: ImagesConfig | None, **arguments: Any) -> NativeModule:
    environments = {"": EnvironmentFunction(look_twice, arguments)}
    vision = {} if images else None
    config = ModelConfig(load=str(path), vision=vision, sampling={"max_new_tokens": 9}, native={"max_sequences": 2})
    module = NativeModule(config, Context(model="policy", seed=5, environments=environments, images=images))
    module.setup()
    return module


def test_what_an_environment_shows_is_seen_by_policy_and_trainer(tmp_path):
    path = vision_model_dir(tmp_path / "model")
    prompts = load_prompts(tmp_path, path)
    other = picture(tmp_path / "c.png", (32, 40), 5)
    policy = build(path, ImagesConfig(), url=write_data_url(str(other)), file=str(tmp_path / "b.png"))
    batch, stats = policy.generate(prompts, samples=2)  # twice as many samples as slots
    assert [len({(s.image, s.start - s.first) for s in own}) for own in batch["images"]] == [3, 3, 2, 2, 4, 4]
    for row in batch.rows():
        placeholders = torch.zeros(len(row["tokens"]), dtype=torch.bool)
        for span in row["images"]:
            placeholders[span.start : span.stop] = True
        assert torch.equal(placeholders, row["tokens"] == policy.engine.model.images.processor.token)
        assert not (placeholders & row["loss_mask"]).any() and row["loss_mask"].sum() == 9
        shown = [m["content"] for m in row["messages"] if m["role"] == "user"][-2:]
        assert shown[0][1]["type"] == shown[1][0]["type"] == "image" and Path(shown[0][1]["image"]).is_file()
    found = build_trainer(path).forward_step(batch)["ref_logprobs"]
    torch.testing.assert_close(found, batch["rollout_logprobs"], rtol=0, atol=1e-5)
    assert stats["episode/turns"].value == 3
    policy.close()


@pytest.mark.slow
def test_an_image_in_a_run_that_reads_text_alone_is_refused_by_name(tmp_path):
    path = vision_model_dir(tmp_path / "model")
    policy = build(path, None, url="a.png", file="b.png")
    prompts = load_prompts(tmp_path, path).without("images")
    with pytest.raises(EpisodesFailed, match=r"the environment shows an image, and the run reads text alone; set data"):
        policy.generate(prompts.select([1]), samples=1)
    policy.close()


class Counted:
    def count(self, name: str, value: float = 1.0) -> None: ...

    async def call_service(self, call: Any, patience: float) -> Any:
        return await call()


def test_a_tool_may_return_images_among_texts(tmp_path):
    box = _Toolbox.build(["packages.agents.tests.simple_tools:draw"], timeout=30.0, max_chars=11)
    call = ToolRequest("draw", {"path": str(tmp_path / "a.png"), "size": 20})
    [message] = asyncio.run(box.answer(Counted(), [call]))  # pyright: ignore[reportArgumentType]
    assert json.loads(json.dumps(message["content"])) == [
        {"type": "text", "text": "A drawing: "},
        {"type": "image", "path": str(tmp_path / "a.png")},
        {"type": "text", "text": "x" * 11 + "… (20 characters)"},
    ]
