"""The table of docs/templates.md, which `python -m tests.data.test_template_table` writes, is what templates do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coalign.data.sources import BadRow
from coalign.data.templates import TRAINING_TEMPLATES, Template, encode_learned, load_template
from coalign.environments.rendering import Rendering, RenderingError
from tests.data.families import CALLED, DIALOGUE, FAMILIES, PLAIN, RESULT, TOOL, family_tokenizer, read_others, user

PAGE = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
_BARE = str.maketrans("", "", '{}"')
FAILED = (BadRow, RenderingError)


def learn(messages: list[dict[str, Any]], since: int = 0, tools: Any = None) -> Callable[[Template], Any]:
    return lambda template: encode_learned(template, messages, tools, since=since)


def go_on(message: dict[str, Any], tools: Any = None) -> Callable[[Template], Any]:
    end = [9999]  # a token that is none of the template's
    return lambda template: Rendering(template).render_messages(end, [message], tools)[0]


USES: dict[str, tuple[str | None, Callable[[Template], Any]]] = {
    "prompt": (None, lambda template: template.prompt(DIALOGUE[:4])),
    "prompt, tools": (None, lambda template: template.prompt(CALLED[:1], [TOOL])),
    "one turn": (None, learn(DIALOGUE[:3])),
    "turns, none think": (None, learn(PLAIN)),
    "turns, `keep`": ("keep", learn(DIALOGUE)),
    "turns, `last`": ("last", learn(DIALOGUE, since=3)),
    "calls of tools": ("keep", learn(CALLED, tools=[TOOL])),
    "episode, tools": (None, go_on(RESULT, [TOOL])),
    "episode, user": (None, go_on(user("Sure?"))),
}


def describe(family: str, policy: str | None, use: Callable[[Template], Any]) -> str:
    """`yes`, what the error proposes, or `no`."""
    try:
        use(load_template(family_tokenizer(family), reasoning=policy))
    except FAILED as error:
        proposed = re.search(r"(?:; |for example )(data\.(?:chat_template|reasoning).*?)(?: would do)?$", str(error))
        words = [part.split(": ", 1) for part in proposed[1].split(" with data.")] if proposed else []
        return ", ".join(f"`{value.translate(_BARE)}`" for _, value in words) or "no"
    return "yes"


def make_rows() -> dict[str, str]:
    rows = {}
    for family in (*FAMILIES, *read_others()):
        cells = [describe(family, policy, use) for policy, use in USES.values()]
        rows[family] = f"| {family} | {' | '.join(cells)} |"
    return rows


def make_table(rows: dict[str, str]) -> str:
    return "\n".join(
        [f"| | {' | '.join(USES)} |", "|" + "---|" * (len(USES) + 1), *(rows[name] for name in sorted(rows))]
    )


def test_the_table_of_the_page_is_what_the_templates_do():
    shown = {
        line.split(" | ")[0].removeprefix("| "): line for line in PAGE.read_text().splitlines() if line[:2] == "| "
    }
    rows = make_rows()
    assert {name: shown.get(name) for name in rows} == rows
    assert set(TRAINING_TEMPLATES) <= set(re.findall(r"`([\w.-]+-training)`", PAGE.read_text()))


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(
        re.sub(r"\| \| prompt \|.*?\n\n", lambda _: make_table(make_rows()) + "\n\n", page, flags=re.DOTALL)
    )
