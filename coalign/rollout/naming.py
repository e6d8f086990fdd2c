"""The environment that a configuration names."""

from __future__ import annotations

from coalign.config.functions import bind, resolve
from coalign.config.schema import RolloutConfig
from coalign.rollout.running import EnvironmentFunction
from coalign.rollout.simple import single_turn


def environment(config: RolloutConfig) -> EnvironmentFunction | None:
    """What `rollout` asks for; None for `single_turn`, which policies do by themselves.

    Raises ConfigError for wrong arguments, ValueError where there is no such function, TypeError for a function that is
    no environment.
    """
    fn = resolve(config.fn, "coalign.rollout")
    arguments = bind(fn, config.arguments, "rollout")
    if fn is single_turn:
        return None
    return EnvironmentFunction(fn, arguments, config.timeout)
