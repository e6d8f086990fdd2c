"""The Chinese pages are the English ones: the same headings, the same code, the same links."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import CHINESE, CodeBlock, list_pages, read_page
from tests.runs import ROOT

PAGES = [page for page in list_pages() if page.startswith("docs/")]
ENGLISH_ONLY = {"docs/lab.md"}  # measurements with dates: read by those who work on Coalign
CODE = ("bash", "yaml", "python", "jsonl")


def find_twin(page: str) -> str:
    return CHINESE + page.removeprefix("docs/")


TRANSLATED = [page for page in PAGES if (ROOT / find_twin(page)).exists()]


def test_every_page_is_translated():
    if not (ROOT / CHINESE).is_dir():
        pytest.skip("there is no docs/zh yet")
    assert {page for page in PAGES if page not in TRANSLATED} == ENGLISH_ONLY


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_translation_has_the_same_form(page):
    english, chinese = read_page(page), read_page(find_twin(page))
    assert [level for level, _ in chinese.headings] == [level for level, _ in english.headings]
    assert [block.info for block in chinese.blocks] == [block.info for block in english.blocks]
    for theirs, ours in zip(chinese.blocks, english.blocks, strict=True):
        assert strip_comments(theirs) == strip_comments(ours), str(theirs)
    assert sorted(map(_to_english, chinese.list_targets())) == sorted(english.list_targets())
    assert sorted(link for link in chinese.links if "://" in link) == sorted(
        link for link in english.links if "://" in link
    )


def _to_english(path: str) -> str:
    return f"docs/{path.removeprefix(CHINESE)}" if path.startswith(CHINESE) else path


def strip_comments(block: CodeBlock) -> list[str]:
    """Return the lines of code, without comments; drawings and outputs may be in another language."""
    if block.language not in CODE:
        return []
    return [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in block.text.splitlines()]


def test_comments_alone_may_differ():
    code = CodeBlock("page", 1, "yaml", "a: 1  # one\nb: 'x#y'\n")
    assert strip_comments(code) == ["a: 1", "b: 'x#y'"]
    assert strip_comments(code) != strip_comments(CodeBlock("page", 1, "yaml", "a: 2  # one\nb: 'x#y'\n"))
