"""Environments play the episodes of a rollout: tools, users, games, agents. Start with ``episode.py``.

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

from coalign.environments.chat import agent
from coalign.environments.conversation import simulated_user, single_turn
from coalign.environments.games import game, self_play
from coalign.environments.tools import tool_use

__all__ = ["agent", "game", "self_play", "simulated_user", "single_turn", "tool_use"]
