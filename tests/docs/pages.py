"""The pages of the documentation as tests read them: blocks of code with their marks, headings, links.

Every block is checked or run by the tests of this folder. A block that they cannot run has a comment of HTML above it,
which neither a code host nor the site shows: `<!-- not run: REASON -->`, or `<!-- run by: tests/FILE.py -->`.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.runs import ROOT

_FENCE = re.compile(r"( *)(```+)([^`]*)$")
_MARK = re.compile(r"<!-- (not run|run by): (.+) -->")
_HERE = re.compile(r"(.*<<'(\w+)'.*\n)((?:.*\n)*?)\2\n")
_HEADING = re.compile(r"(#+) +(.*)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
CHINESE = "docs/zh/"


def list_pages() -> list[str]:
    """The English pages: those of docs/ and what a code host shows first."""
    pages = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", "CONTRIBUTING.md", "SECURITY.md", *(page for page in pages if not page.startswith(CHINESE))]


@dataclass(frozen=True)
class CodeBlock:
    """A block of code of a page. ``mark`` is `not run` or `run by`, with ``reason`` the reason or the test's file."""

    page: str
    line: int
    info: str
    text: str
    mark: str | None = None
    reason: str = ""

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class DocsPage:
    """A page: its blocks, its headings as (level, text), the text below each, and the targets of its links."""

    path: str
    blocks: list[CodeBlock]
    headings: list[tuple[int, str]]
    links: list[str]
    unused_marks: list[int]
    sections: list[str]

    def list_targets(self) -> list[str]:
        """Return where the links to files lead, without anchors, from the root of the repository, in order."""
        targets = [link.partition("#")[0] for link in self.links if not re.match(r"\w+:|#", link)]
        folder = posixpath.dirname(self.path)
        return [posixpath.normpath(posixpath.join(folder, target)) for target in targets]


def read_page(path: str) -> DocsPage:
    """Read a page. AssertionError for a block that does not end."""
    page = DocsPage(path, [], [], [], [], [""])
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    mark: re.Match[str] | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        if fence := _FENCE.match(line):
            end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == fence[2]), None)
            assert end is not None, f"{path}:{at + 1}: this block does not end"
            text = "".join(f"{inner.removeprefix(fence[1])}\n" for inner in lines[at + 1 : end])
            page.blocks.append(CodeBlock(path, at + 1, fence[3], text, *(mark.groups() if mark else ())))
            mark, at = None, end
        elif found := _MARK.fullmatch(line.strip()):
            mark = found
        elif line.strip():
            if mark:
                page.unused_marks.append(at)
            mark = None
            if heading := _HEADING.fullmatch(line):
                page.headings.append((len(heading[1]), heading[2]))
                page.sections.append("")
            else:
                page.sections[-1] += f"{line}\n"
            page.links.extend(_LINK.findall(re.sub(r"`[^`]*`", "", line)))
        at += 1
    return page


def list_blocks(*languages: str, unmarked: bool = True) -> list[CodeBlock]:
    """Return the blocks of these languages on all English pages, with ``unmarked`` those without a mark alone."""
    blocks = [block for path in list_pages() for block in read_page(path).blocks]
    blocks += [inner for block in blocks if block.language == "bash" for inner in read_here_documents(block)]
    return [block for block in blocks if block.language in languages and not (unmarked and block.mark)]


def read_here_documents(block: CodeBlock) -> Iterator[CodeBlock]:
    """Yield the files that a block of shell writes (`cat > run.yaml <<'YAML'`) as blocks of that language."""
    for match in _HERE.finditer(block.text):
        line = block.line + 1 + block.text.count("\n", 0, match.start())
        yield CodeBlock(block.page, line, match[2].lower(), match[3], block.mark, block.reason)


def read_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in a block of shell: lines are joined, comments dropped, pipes are cut."""
    for line in re.sub(r"\\\n", " ", _HERE.sub(r"\1", text)).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|;&"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)
