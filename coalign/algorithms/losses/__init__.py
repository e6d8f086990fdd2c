"""Losses: pure functions of one micro-batch of trained tokens. They return values; the framework weighs and adds up.

Keyword-only arguments are configuration. A loss says by attributes what its values stand for (``per``) and which inputs
it needs that are not there unasked (``needs``); see coalign.algorithms.traits.
"""

from coalign.algorithms.losses.policy import policy_gradient
from coalign.algorithms.losses.sft import sft
from coalign.algorithms.losses.value import value

__all__ = ["policy_gradient", "sft", "value"]
