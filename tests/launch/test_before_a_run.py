"""What is refused before a run: rewards of lengths that no response has, and arguments that no template reads."""

import pytest

from coalign import load_config
from coalign.launch.plan import prepare
from tests.runs import settings


@pytest.mark.parametrize(
    ("reward", "refused"),
    [
        ({"fn": "length_penalty", "max_tokens": 10, "buffer": 2}, r"length_penalty begins after 8 tokens .* 8 tokens"),
        ({"fn": "length_penalty", "max_tokens": 9, "buffer": 2}, ""),
        ({"fn": "length_range", "min_tokens": 9, "max_tokens": 20}, r"length_range\.min_tokens is 9"),
        ({"fn": "length_target", "target": 12, "tolerance": 4}, "length_target rewards none below 9 tokens"),
        ({"fn": "length_target", "target": 11, "tolerance": 4}, ""),
    ],
)
def test_a_reward_of_lengths_that_no_response_has_is_refused(tmp_path, reward, refused):
    config = settings(tmp_path, "grpo")  # max_new_tokens is 8
    config["reward"] = [{"fn": "tests.digits:digits"}, reward]
    if not refused:
        prepare(load_config(config))
        return
    with pytest.raises(ValueError, match=rf"reward\[1\]: {refused}.*models\.policy\.sampling\.max_new_tokens"):
        prepare(load_config(config))


def test_arguments_that_the_template_never_reads_are_refused(tmp_path):
    config = settings(tmp_path, "grpo")
    config["data"] |= {"chat_template": "qwen3-training", "chat_template_kwargs": {"enable_thinking": False}}
    assert prepare(load_config(config)).models["policy"].context.chat_template_kwargs == {"enable_thinking": False}
    config["data"]["chat_template_kwargs"] = {"enable_thinkin": False}
    with pytest.raises(
        ValueError, match=r"data\.chat_template_kwargs: .* never reads 'enable_thinkin'; did you mean 'enable_thinking'"
    ):
        prepare(load_config(config))
    config["data"] |= {"chat_template": "auto", "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ValueError, match="never reads 'enable_thinking'; it has no arguments"):
        prepare(load_config(config))
    config["data"] |= {"chat_template_kwargs": {}, "reasoning": "last"}
    config["models"]["policy"] = {**config["models"].get("policy", {}), "chat_template_kwargs": {"x": 1}}
    with pytest.raises(ValueError, match=r"models\.policy\.chat_template_kwargs: this model reads tokens, no text"):
        prepare(load_config(config))


@pytest.mark.parametrize("template", ["auto", "none", "{{ messages[0].content }}", "file"])
def test_a_template_without_room_for_tools_is_refused(tmp_path, template):
    (tmp_path / "file").write_text("{{ messages[0].content }}")
    config = settings(tmp_path, "grpo")
    config["data"]["chat_template"] = str(tmp_path / "file") if template == "file" else template
    prepare(load_config(config))
    config["rollout"] = {"fn": "tool_use", "tools": ["calculator"]}
    with pytest.raises(
        ValueError, match=r"data\.chat_template: the environment `tool_use` shows tools .* no place for them"
    ):
        prepare(load_config(config))
    config["data"]["chat_template"] = "{{ tools }}{{ messages[0].content }}"
    prepare(load_config(config))
