"""Hooks of MkDocs: what `make docs` adds to the pages of docs/.

- The reference (docs/generate.py) is made from the package when the site is built, so it cannot be out of date.
- Files outside of docs/ that a page links to become pages below source/, so that no link leaves the site.
- What the theme would load from another server is the site's own docs/frame_worker.js.
- A Chinese page has the Chinese navigation, which follows from the English one, and a link to its English twin.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from docs.generate import build_reference

ROOT = Path(__file__).resolve().parent.parent
CHINESE = "zh/"
LANGUAGES = {"en": "English", "zh": "中文"}
SECTIONS = {  # titles of mkdocs.yml in the Chinese navigation
    "First": "先读这些",
    "Tutorials": "教程",
    "Write your own part": "编写自己的部分",
    "Coming from elsewhere": "从其他框架迁移",
    "Data and models": "数据与模型",
    "Algorithms": "算法",
    "Machines": "机器",
    "Runs": "运行",
    "Reference": "参考",
    "How it is built": "设计",
}
_SHIM = "https://unpkg.com/iframe-worker/shim"  # written by the plugin `offline`
_FENCE = re.compile(r"^( *)(```+)([^\n`]*)\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_PICTURES = (".png", ".jpg", ".svg")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_LANGUAGES_OF_FILES = {
    ".py": "python",
    ".yaml": "yaml",
    ".sh": "bash",
    ".json": "json",
    ".jsonl": "json",
    ".toml": "toml",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the navigation of the Chinese pages that are there."""
    assert config.nav is not None, "mkdocs.yml has a nav"
    config.nav = [*config.nav, {LANGUAGES["zh"]: list(_translate_nav(config.nav, Path(config.docs_dir)))}]
    return config


def _translate_nav(items: list[Any], docs: Path) -> Iterator[Any]:
    for item in items:
        if isinstance(item, str):
            if (docs / CHINESE / item).exists():
                yield CHINESE + item
            continue
        [(title, inner)] = item.items()
        if pages := list(_translate_nav(inner, docs)):
            yield {SECTIONS[title]: pages}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference, and one for each file outside of docs/ that a page links to."""
    for uri, text in build_reference().items():
        files.append(File.generated(config, uri, content=text))
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for path in list_links(read_page(page), page):
            if path not in seen and not path.startswith("docs/") and not path.endswith(_PICTURES):
                seen.add(path)
                waiting.append(path)
                files.append(File.generated(config, find_page(path), content=rewrite(read_page(path), path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page of docs/ into the site, and take from Markdown what Python's cannot read."""
    if page.file.generated_by is None:
        markdown = rewrite(markdown, f"docs/{page.file.src_uri}")
    return markdown


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Take the Chinese pages out of the order of the English ones."""
    pages = [[page for page in nav.pages if _is_chinese(page) is chinese] for chinese in (False, True)]
    for ordered in pages:
        for page, before, behind in zip(ordered, [None, *ordered], [*ordered[1:], None], strict=False):
            page.previous_page, page.next_page = before, behind
    return nav


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> dict[str, Any]:
    """Give a page the navigation and the interface of its language, and a link to the same page in the other one."""
    language = "zh" if _is_chinese(page) else "en"
    config.theme["language"] = language
    files = page.file.src_uri.removeprefix(CHINESE)
    twins = {"en": files, "zh": CHINESE + files}
    known = {inner.file.src_uri: inner.url for inner in nav.pages}
    config.extra["alternate"] = [
        {
            "name": name,
            "lang": code,
            "link": known.get(twins[code], known.get(twins[code][: -len(files)] + "README.md", "")),
        }
        for code, name in LANGUAGES.items()
    ]
    chinese = [item for item in nav.items if isinstance(item, Section) and item.title == LANGUAGES["zh"]]
    english = [item for item in nav.items if item not in chinese]
    items = chinese[0].children if chinese and language == "zh" else english
    context["nav"] = Navigation(items, [inner for inner in nav.pages if _is_chinese(inner) is (language == "zh")])
    context["nav"].homepage = next(
        (inner for inner in context["nav"].pages if inner.file.name == "index"), nav.homepage
    )
    return context


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let a page that is opened from a disk search without a network."""
    return output.replace(_SHIM, get_relative_url("frame_worker.js", page.url))


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Let the page of errors search, too."""
    return output.replace(_SHIM, "frame_worker.js")


def _is_chinese(page: Page) -> bool:
    return page.file.src_uri.startswith(CHINESE)


def read_page(path: str) -> str:
    """Return a file of the repository as Markdown: a directory is a list of links, any other file a block of code."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(entry.name for entry in file.iterdir() if entry.is_file() and entry.name != "__init__.py")
        return "\n".join([f"# {path}", "", *(f"- [{name}]({posixpath.basename(path)}/{name})" for name in names), ""])
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    language = _LANGUAGES_OF_FILES.get(file.suffix, "text")
    return f"# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def find_page(path: str) -> str:
    """Return the page of the site, relative to docs/, for a path of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def list_links(markdown: str, path: str) -> Iterator[str]:
    """Yield the paths of the repository that a page at ``path`` links to, outside of code."""
    for match in _LINK.finditer(_FENCE.sub("", markdown)):
        if target := _resolve(match[2], path):
            yield target[0]


def rewrite(markdown: str, path: str) -> str:
    """Return the Markdown of the file at ``path`` as Python-Markdown and the site read it.

    Links to files of the repository point to their pages. The second word behind ``` goes, and so does the backslash
    before a | within code in a table: Python-Markdown knows neither.
    """
    parts: list[str] = []
    end = 0
    for fence in _FENCE.finditer(markdown):
        parts.append(_rewrite_text(markdown[end : fence.start()], path))
        words = fence[3].split()
        parts.append(fence[0].replace(fence[3], words[0] if words else "", 1))
        end = fence.end()
    return "".join([*parts, _rewrite_text(markdown[end:], path)])


def _rewrite_text(text: str, path: str) -> str:
    lines = [
        re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in text.split("\n")
    ]
    return _LINK.sub(lambda match: f"{match[1]}{_point(match[2], path)}{match[3]}", "\n".join(lines))


def _point(target: str, path: str) -> str:
    """Return the link from the page of ``path`` to the page of its target; anything else as it is."""
    found = _resolve(target, path)
    if found is None:
        return target
    to, anchor = found
    return posixpath.relpath(find_page(to), posixpath.dirname(find_page(path)) or ".") + anchor


def _resolve(target: str, path: str) -> tuple[str, str] | None:
    """Return the path within the repository, and the anchor, of a relative link to a file that exists."""
    if re.match(r"\w+:|#|/", target):
        return None
    file, _, anchor = target.partition("#")
    directory = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    if (ROOT / path).is_dir():
        directory = posixpath.dirname(path)
    found = posixpath.normpath(posixpath.join(directory, file))
    if found.startswith("..") or not os.path.exists(ROOT / found):
        return None
    return found, f"#{anchor}" if anchor else ""
