"""Commands on a run beside training it."""

from coalign import load_config
from coalign.commands.evaluate import show_data
from coalign.report.display import Display
from tests.runs import settings


def test_data_can_be_looked_at_before_there_is_a_reward(tmp_path, capsys):
    config = settings(tmp_path, "grpo")
    config.pop("reward")
    show_data(load_config(config), 1, Display())
    assert "prompt" in capsys.readouterr().out
