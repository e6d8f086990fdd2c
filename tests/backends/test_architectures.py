"""The page docs/architectures.md: each class of causal language models does what its line says. Those marked `backends`
are all of the installed transformers."""

from __future__ import annotations

import pytest
from transformers import __version__

from tests.backends.architectures import CLASSES, PAGE, measure

QUICK = ("llama", "mamba", "qwen3_next", "gpt_oss", "gptj", "xlm")


def test_the_page_lists_every_class():
    text = PAGE.read_text()
    assert f"transformers {__version__}" in text, "python -m tests.backends.architectures writes it anew"
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and line[3:].count("`") > 2]
    assert [name for name in listed if name in CLASSES] == sorted(CLASSES)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in QUICK else pytest.mark.backends) for family in sorted(CLASSES)],
)
def test_an_architecture_does_what_its_line_says(family):
    found = measure(family)
    assert f"\n{found} " in PAGE.read_text()
    assert found.reason or (found.trains and found.transformers)
