"""Reward functions: plain Python functions of finished samples. `calls.py` calls them.

`rules.py` has rewards by length and form. What grades answers comes from the companion coalign-graders.

**What a function takes** depends on the name of its first parameter:

======================================================  ==========================================================
``def f(sample: Sample, *, k=1) -> float``              one sample a call (any name but the two below)
``def f(group: list[Sample], *, k=1) -> list[float]``   the samples of one prompt together: rankings, comparisons
``def f(samples: list[Sample], *, k=1) -> list[float]``  everything this worker scores at once: batched services
======================================================  ==========================================================

Each may be ``async def``; functions that wait for a network should be. Calls run concurrently, in
threads (`thread_pool.py`). What is not Coalign's runs in processes of its own (`processes/function_process.py`): one
that hangs, exits or crashes is killed and replaced.
Keyword-only arguments are configuration::

    reward:
      - {fn: math, weight: 1.0}                                  # a function of this package
      - {fn: "my_rewards:polite", weight: 0.2, timeout: 5, words: [please, thanks]}

A class keeps state between calls (a client, a cache): it is instantiated once in its process, and again in the process
that replaces a dead one, with the configuration as its keyword arguments, and then called like a function. ``at_once``
limits the concurrent calls of an async one; of a plain one it is the number of processes, each with an instance.

**What it sees**: ``sample.response`` (without special tokens; ``sample.raw_response`` has them), ``sample.prompt`` (as
the model saw it), ``sample.messages`` (the conversation, response included), ``sample.meta`` (the data set's row:
ground truth, unit tests, …), ``sample.status`` and the tokens. Samples whose generation failed are left out, so a group
may have fewer than n. A function must not change a sample: others read the same one.

**What it returns**: a finite number for each sample (bool, NumPy and zero-dimensional tensors too); 0.0 is a reward. Or
a dict with the key ``"reward"``, whose other entries are logged as ``reward/<name>/<entry>``.

**The reward** of a sample is the sum over functions of weight * value; docs/rewards.md says how reward models join in
and how values are normalised. The batch gets the columns ``reward`` and ``reward/<name>``, where the name is the
function's or the configuration's ``name``. A function of weight 0 is only logged, as ``reward/<name>/mean``.

**Failure** is an exception, None, NaN, infinity, anything that is no number, a list of the wrong length, or no answer
within ``timeout`` seconds. The call is repeated ``retries`` times, after growing pauses; ``GiveUp`` of
coalign.rewards.calls asks for no retry. ``ServiceError`` of coalign.services says that a service failed: the call is
repeated for ``patience`` seconds, while the batch is kept. After that its samples get status ERROR and the reward NaN,
leave the batch before any baseline sees them, and are counted in ``reward/failed/<reason>``. If no sample of a batch
could be scored, the run stops with the function's own traceback.
"""

from importlib import import_module
from typing import Any

from coalign.companions import REWARDS, list_entries

_RULES = (
    *("CosineLength", "episode", "length_penalty", "length_range", "length_target"),
    *("repetition_penalty", "script", "tags"),
)
__all__ = [*_RULES]


def __getattr__(name: str) -> Any:
    """Import a rule when it is asked for; refuse a reward function that a companion brings, with where it is."""
    if name in _RULES:
        return getattr(import_module("coalign.rewards.rules"), name)
    if (entry := list_entries(REWARDS).get(name)) is not None:
        raise AttributeError(f"coalign.rewards.{name} is {entry.value} now; a YAML names it `{name}`")
    raise AttributeError(f"module 'coalign.rewards' has no attribute '{name}'")
