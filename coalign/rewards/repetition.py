"""Does a response repeat itself, and does it keep to its script?"""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from coalign.types import Sample


def repetition_penalty(sample: Sample, *, n: PositiveInt = 4, unit: Literal["words", "characters"] = "words") -> float:
    """Minus the share of the response's n-grams that stood in it before: 0.0 where all differ, towards -1.0 for one
    that is repeated on and on; 0.0 for fewer than n units.

    Words are runs of letters, digits and underscores, their case aside; `characters`, spaces aside, are for scripts
    that do not part words.
    """
    text = sample.response.lower()
    units = re.findall(r"\w+" if unit == "words" else r"\S", text)
    grams = list(zip(*(units[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def script(sample: Sample, *, scripts: Annotated[list[str], Field(min_length=1)]) -> float:
    """The share of the response's letters whose Unicode name begins with one of ``scripts`` (`LATIN`, `CYRILLIC`,
    `CJK`, `HIRAGANA`, …); 1.0 for a response without letters, which breaks no rule.

    What it says of a language is only that, so it tells Chinese from English, and not French from English.
    """
    known = tuple(name.upper() for name in scripts)
    letters = [character for character in sample.response if character.isalpha()]
    inside = sum(unicodedata.name(letter, "").startswith(known) for letter in letters)
    return inside / len(letters) if letters else 1.0
