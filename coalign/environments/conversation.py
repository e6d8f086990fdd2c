"""The environment of a prompt and its response, and the lookup of those that a configuration names."""

from __future__ import annotations

from coalign.config.errors import located_at
from coalign.config.functions import bind, resolve
from coalign.config.schema import RolloutConfig
from coalign.environments.episode import Episode
from coalign.environments.loop import EnvironmentFunction, Environments


async def single_turn(episode: Episode) -> None:
    """A prompt and its response. Policies generate these without an episode: just as fast, and the same tokens."""
    await episode.generate()


def find_environments(config: RolloutConfig) -> Environments:
    """The environments that `rollout` names; none for `single_turn` alone, which policies do without an episode.

    Raises ConfigError for wrong arguments, ValueError for an unknown function, TypeError for a function that is not an
    environment.
    """
    environments = {}
    for key, section in (config.environments or {"": config}).items():
        path = ("rollout", "environments", key) if key else ("rollout",)
        with located_at(*path, "fn"):
            fn = resolve(section.fn, config.home)
            arguments = bind(fn, section.arguments, ".".join(path))
            if fn is single_turn and not key:
                return {}
            environments[key] = EnvironmentFunction(fn, arguments, section.timeout or config.timeout, key)
    return environments
