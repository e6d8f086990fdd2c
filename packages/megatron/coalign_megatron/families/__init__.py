"""Model families: how Hugging Face configurations and tensors map to Megatron's.

    family = find_family(json.loads(config_json))
    config = family.config(hf)  # MegatronConfig
    parameters = family.parameters(config, vocab_divisor=128 * tensor_parallel)

Read first: family.py, then llama.py, the table that others build on. A new architecture is one table in such a file and
its name at the end of it. No megatron is imported. coalign_megatron.layouts.megatron says what each rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from coalign_megatron.families.family import Family, Parameter
from coalign_megatron.families.gpt import GPT_FAMILIES
from coalign_megatron.families.llama import LLAMA_FAMILIES
from coalign_megatron.layouts.megatron_model import MegatronConfig, RopeScaling

FAMILIES = (*LLAMA_FAMILIES, *GPT_FAMILIES)

__all__ = ["FAMILIES", "Family", "MegatronConfig", "Parameter", "RopeScaling", "find_family"]


def find_family(hf: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. ValueError for an unknown one lists the known, the nearest first."""
    architectures = hf.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"config.json: 'architectures' is {architectures!r:.60}; expected a list of names")
    for family in FAMILIES:
        if family.claims(hf):
            return family
    wanted = (architectures or [str(hf.get("model_type"))])[0]
    names = [name for family in FAMILIES for name in (family.architectures if architectures else family.model_types)]
    near = get_close_matches(wanted, set(names), n=len(names), cutoff=0.0)
    raise ValueError(
        f"config.json: no family of Megatron models is known for {wanted!r:.60}; known are {', '.join(near)}"
    )
