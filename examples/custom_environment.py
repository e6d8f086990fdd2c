"""An environment of one's own: a number is to be found, and each guess is answered by higher or lower.

    rollout: {fn: "examples.custom_environment:higher_or_lower", tries: 6}
    reward: {fn: episode}

Each guess earns what it cuts from the range of possible numbers, so the reward is dense; the guess that hits earns 1.
"""

from __future__ import annotations

import re

from coalign.environments.episode import Episode


async def higher_or_lower(episode: Episode, *, highest: int = 50, tries: int = 6) -> None:
    """The number is drawn from the episode's own random numbers: the same again in every run of this seed."""
    number, low, high = episode.random.randint(1, highest), 1, highest
    episode.begin([{"role": "user", "content": f"I think of a number from 1 to {highest}. Which one is it?"}])
    for _ in range(tries):
        turn = await episode.generate(max_new_tokens=16)
        said = re.search(r"\d+", turn.text)
        guess = int(said.group()) if said else 0
        if guess == number:
            episode.count("found")
            episode.reward(1.0)
            return
        if low <= guess <= high:
            ruled_out = guess - low + 1 if guess < number else high - guess + 1
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
            episode.reward(ruled_out / highest)
        else:
            episode.reward(-0.1)  # it was known not to be that
        episode.say({"role": "user", "content": f"It is {'higher' if guess < number else 'lower'}."})
