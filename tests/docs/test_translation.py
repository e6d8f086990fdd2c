"""The Chinese pages are the English ones: the same headings, the same code and figures, the same links."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import CHINESE, CodeBlock, list_pages, read_page
from tests.runs import ROOT

PAGES = [page for page in list_pages() if page.startswith("docs/")]
ENGLISH_ONLY = {"docs/lab.md"}  # measurements with dates: read by those who work on Coalign
CODE = ("bash", "yaml", "python", "jsonl")
_FIGURE = re.compile(r"\d+(?:[.,:]\d+)*(?! ?[万亿]| [mb]illion)(?![\d.,]*\d)")
WORDS = {  # of docs/zh and of the board: one word for one thing
    "词元": "token",
    "评估": "评测",
    "过采样": "超采",
    "额外依赖": "可选依赖",
    "设备内存": "显存",
    "基准模型": "参考模型",
    "滞后度": "陈旧度",
    "钩子": "hook",
    "对数概率": "log-prob",
}


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


@pytest.mark.parametrize("page", [*TRANSLATED, "README.md"])
def test_a_translation_has_the_same_figures_and_names(page):
    english, chinese = read_page(page), read_page(find_twin(page) if page in TRANSLATED else "README.zh.md")
    for heading, theirs, ours in zip(["", *chinese.headings], chinese.sections, english.sections, strict=True):
        assert list_names(theirs) == list_names(ours), f"{chinese.path}, {heading}"
        assert list_figures(theirs) == list_figures(ours), f"{chinese.path}, {heading}"
    for theirs, ours in zip(chinese.blocks, english.blocks, strict=True):
        assert list_figures(theirs.text) == list_figures(ours.text), str(theirs)


def test_a_translation_has_one_word_for_one_thing():
    files = [
        *(ROOT / CHINESE).rglob("*.md"),
        ROOT / "README.zh.md",
        ROOT / "packages/board/coalign_board/static/i18n/zh.js",
    ]
    found = [(str(file.relative_to(ROOT)), word) for file in files for word in WORDS if word in file.read_text("utf-8")]
    assert found == [], f"in place of these: {WORDS}"


def list_names(text: str) -> set[str]:
    """Return what a section has between backquotes."""
    return set(re.findall(r"`[^`]+`", re.sub(r"\s+", " ", text)))


def list_figures(text: str) -> set[str]:
    """Return the numbers of a text outside of code; those in millions are written otherwise in Chinese."""
    return set(_FIGURE.findall(re.sub(r"`[^`]*`", "", re.sub(r"\s+", " ", text))))


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


def test_figures_may_be_in_millions_and_must_be_the_same():
    assert list_figures("135 million, 1.5 billion, 1,024 steps, `v 2`, 0.5 s") == {"1,024", "0.5"}
    assert list_figures("1.35 亿、15 亿、1600 万，1,024 步，0.6 s") == {"1,024", "0.6"}
