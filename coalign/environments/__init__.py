"""Environments play the episodes of a rollout. Start with ``episode.py``. Tools, users, games, agents: coalign-agents.

An environment is a coroutine over one ``episode``, or over all episodes of a ``group``, depending on the name of its
first parameter. Keyword-only arguments are configuration (see docs/environments.md)::

    async def guess(episode, *, tries: int = 3):
        for _ in range(tries):
            turn = await episode.generate()
            if turn.text.strip() == episode.row["answer"]:
                episode.reward(1.0)
                return
            episode.say({"role": "user", "content": "No. Try again."})

    rollout: {fn: "my_environments:guess", tries: 5}
"""

from importlib import import_module
from typing import Any

__all__ = ["single_turn"]


def __getattr__(name: str) -> Any:
    """Import an environment when a run names it."""
    if name not in __all__:
        raise AttributeError(f"module 'coalign.environments' has no attribute '{name}'")
    return getattr(import_module("coalign.environments.conversation"), name)
