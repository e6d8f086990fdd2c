"""Plans that transformers' models bring along: patterns of names (`layers.*.mlp.up_proj`) and what to do there."""

from __future__ import annotations

import re


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """What ``plan`` says about the module or parameter ``name``."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
