"""Chat templates of model families, as they come with the models, and tokenizers that know their special tokens.

The files of `templates` are those of TRL 1.16 (Apache-2.0; `trl/chat_templates`), which stores what the models' own
repositories hold: Qwen and gpt-oss (Apache-2.0), DeepSeek, GLM-4.5 and Phi (MIT). Phi-4's is not among TRL's.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.tiny import tiny_tokenizer

FAMILIES = {
    file.stem: file.read_text("utf-8") for file in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}


# Of families whose licences are others, TRL's own files are read where it is installed.
OTHERS = {
    "Nemotron-3-Nano": "nemotron_3_nano",
    "Nemotron-3-Super": "nemotron_3_super",
    "Llama-3.1": "llama3_1",
    "Llama-3.2": "llama3_2",
    "Gemma-3": "gemma3",
    "Gemma-4": "gemma4",
    "LFM2.5": "lfm2_2_5",
    "Command-A": "cohere2",
}


def read_others() -> dict[str, str]:
    """The templates of OTHERS by family; empty without TRL."""
    found = find_spec("trl")
    folder = Path(found.origin or "").parent / "chat_templates" if found else Path("nowhere")
    return {family: (folder / f"{name}.jinja").read_text("utf-8") for family, name in OTHERS.items() if folder.is_dir()}


@cache
def family_tokenizer(family: str):
    """A byte-level tokenizer with the family's template, and every token that the template writes."""
    jinja = FAMILIES.get(family) or read_others()[family]
    tokenizer = tiny_tokenizer(chat_template=jinja, bos_token="<|bos|>", eos_token="<|endoftext|>")
    special = sorted({*re.findall(r"<[|｜][\w▁]+[|｜]?>|<\w+\|>|<\w+_of_turn>|\[gMASK\]|<sop>", jinja)})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, thoughts: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"reasoning_content": thoughts} if thoughts else {}), **more}


SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first."},
                "b": {"type": "array", "items": {"type": "number"}},
                "unit": {"type": "string", "enum": ["m", "km"], "default": "m"},
                "exact": {"type": "boolean", "default": True},
            },
            "required": ["a", "b"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5], "unit": "km"}}}
RESULT = {"role": "tool", "content": "3.5"}
DIALOGUE = [SYSTEM, user("one?"), answer("1", "why one"), user("two?"), answer("2", "why two")]
PLAIN = [SYSTEM, user("one?"), answer("1"), user("two?"), answer("2")]
CALLED = [user("sum?"), answer("", "to add", tool_calls=[CALL]), RESULT, answer("3.5", "added")]
