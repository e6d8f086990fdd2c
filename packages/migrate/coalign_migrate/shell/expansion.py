"""Expands the words of a shell script: quotes, variables, arrays, substitutions, numbers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from coalign_migrate.shell.arithmetic import compute
from coalign_migrate.shell.lexer import ShellToken, find_end
from coalign_migrate.shell.marks import empty, is_known, mark, show

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*?$#!-])(?:\[([^\]]*)\])?", re.DOTALL)
_DEFAULTS = re.compile(r"(:?[-=+?])(.*)", re.DOTALL)
_CUTS = re.compile(r"(##?|%%?|//?|\^\^?|,,?)(.*)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_BRACES = re.compile(r"\{([^{}\s]*,[^{}\s]*)\}")

Value = str | dict[str, str]  # a text, or the items of an array by index or key


@dataclass
class ShellVariables:
    """The variables of a script: what it sets itself, and behind them the environment's.

    ``borrowed`` collects the names whose values came from the environment.
    """

    environment: Mapping[str, str]
    values: dict[str, Value] = field(default_factory=dict)
    arguments: list[str] | None = None  # known inside of functions; a script's own are not
    borrowed: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Value | None:
        if name in self.values:
            return self.values[name]
        if name.isdigit() and name != "0" and self.arguments is not None:
            return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else ""
        value = self.environment.get(name)
        if value is not None and name != "HOME":
            self.borrowed[name] = value
        return value

    def get_text(self, name: str) -> str | None:
        """Return a variable's text, or the first item of an array."""
        value = self.get(name)
        return value.get("0", "") if isinstance(value, dict) else value

    def copy(self) -> ShellVariables:
        """Return variables that begin as these; what is set there is not set here."""
        return ShellVariables(self.environment, dict(self.values), self.arguments, self.borrowed)


class WordExpander:
    """Expands words with ``variables``; ``substitute`` returns what a command in `$(…)` writes, or a marked text."""

    def __init__(self, variables: ShellVariables, substitute: Callable[[str], str]) -> None:
        self.variables, self.substitute = variables, substitute

    def expand(self, word: str) -> list[str]:
        """Return the words that one word of the script becomes: none, one or several."""
        fields: list[str | None] = [None]
        for text, is_quoted in self._list_pieces(self._open_braces(word)):
            if isinstance(text, list):  # the items of an array
                for number, item in enumerate(text):
                    if number:
                        fields.append(None)
                    fields[-1] = (fields[-1] or "") + item
            elif is_quoted:
                fields[-1] = (fields[-1] or "") + text
            else:
                self._split(text, fields)
        return [text for text in fields if text is not None]

    def expand_text(self, word: str) -> str:
        """Return one text for a word, as assignments and comparisons need it."""
        pieces = (" ".join(text) if isinstance(text, list) else text for text, _ in self._list_pieces(word))
        return "".join(pieces)

    def expand_document(self, token: ShellToken) -> str:
        """Return the text of a here-document."""
        if token.is_quoted:
            return token.text
        return self.expand_text('"' + token.text.replace('"', '\\"').replace("\\\n", "") + '"')

    def expand_array(self, items: list[ShellToken], previous: Value | None) -> dict[str, str]:
        """Return the items of an array's value, behind those of its ``previous`` value."""
        array = previous if isinstance(previous, dict) else {"0": previous} if previous else {}
        array = dict(array)
        for token in items:
            if keyed := re.match(r"\[([^\]]+)\]=", token.text):
                array[self.expand_text(keyed[1])] = self.expand_text(token.text[keyed.end() :])
                continue
            for text in self.expand(token.text):
                array[str(len(array))] = text
        return array

    def compute(self, text: str) -> str:
        """Return the value of an arithmetic expression as a text, or a marked text."""
        expanded = self.expand_text(text)
        value = compute(expanded, self.variables.get_text) if is_known(expanded) else None
        return mark(f"$(({show(text)}))") if value is None else str(value)

    def _open_braces(self, word: str) -> str:
        """Return `a{b,c}` as two words with a blank between; a word with quotes or blanks stays."""
        match = _BRACES.search(word)
        if not match or word[match.start() - 1 : match.start()] in ("$", '"', "'", "\\") or re.search(r"[\"'\s]", word):
            return word
        start, end = word[: match.start()], word[match.end() :]
        return " ".join(self._open_braces(f"{start}{item}{end}") for item in match[1].split(","))

    def _split(self, text: str, fields: list[str | None]) -> None:
        """Add a text without quotes, which blanks outside marks divide."""
        pieces = re.split(r"[ \t\n]+(?![^\ue000]*\ue001)", text)
        for number, piece in enumerate(pieces):
            if number and fields[-1] is not None:
                fields.append(None)
            if piece:
                fields[-1] = (fields[-1] or "") + piece

    def _list_pieces(self, word: str) -> Iterator[tuple[str | list[str], bool]]:
        """Yield texts, or the items of a list, and whether they stand in quotes."""
        position = 0
        if word.startswith(("<(", ">(")):  # stands for a file
            yield word, True
            return
        while position < len(word):
            end = find_end(word, position)
            piece = word[position:end]
            if piece[0] == "\\" and len(piece) == 2:
                yield piece[1], True
            elif piece[0] == "'":
                yield piece[1:-1], True
            elif piece.startswith("$'"):
                yield re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), piece[2:-1]), True
            elif piece[0] == '"' or piece.startswith('$"'):
                quoted = list(self._list_quoted(piece.removeprefix("$")[1:-1]))
                yield from quoted or [("", True)]  # "" is a word, and "$@" without arguments is none
            elif piece[0] == "`":
                yield self.substitute(piece[1:-1].replace("\\`", "`")), False
            elif piece[0] == "$" and len(piece) > 1:
                yield self._expand_braced(piece), False
            elif piece == "$" and (name := _NAME.match(word, end)):
                end = name.end()
                yield self._expand_parameter(name[0]), False
            elif position == 0 and piece == "~" and (word == "~" or word.startswith("~/")):
                yield self.variables.get_text("HOME") or "~", True
            else:
                yield piece, False
            position = end

    def _list_quoted(self, text: str) -> Iterator[tuple[str | list[str], bool]]:
        """Yield the pieces of a text in double quotes."""
        position = 0
        while position < len(text):
            if text[position] == "\\" and text[position + 1 : position + 2] in tuple('$`"\\'):
                yield text[position + 1], True
                position += 2
            elif text.startswith("\\\n", position):
                position += 2
            elif text[position] == "`" or text.startswith(("${", "$("), position):
                end = find_end(text, position)
                piece = text[position:end]
                value = self.substitute(piece[1:-1]) if piece[0] == "`" else self._expand_braced(piece)
                yield (value if "@" in piece or isinstance(value, str) else " ".join(value)), True
                position = end
            elif text[position] == "$" and (name := _NAME.match(text, position + 1)):
                value = self._expand_parameter(name[0])
                yield (value if name[0] == "@" or isinstance(value, str) else " ".join(value)), True
                position = name.end()
            else:
                yield text[position], True
                position += 1

    def _expand_braced(self, piece: str) -> str | list[str]:
        """Expand `${…}`, `$((…))` or `$(…)`."""
        if piece.startswith("$((") and piece.endswith("))"):
            return self.compute(piece[3:-2])
        if piece.startswith("$("):
            return self.substitute(piece[2:-1])
        match = _PARAMETER.match(piece, 2)
        if not match:
            return mark(piece)
        prefix, name, index = match.groups()
        rest = piece[match.end() : -1]
        if prefix == "#":
            value = self._look_up(name, index)
            return mark(piece) if value is None else str(len(value))
        if prefix == "!" and index in ("@", "*"):
            array = self.variables.get(name)
            return list(array) if isinstance(array, dict) else []
        if prefix == "!":
            name, index = self.variables.get_text(name) or "", None
        return self._apply(piece, name, self._look_up(name, index), rest)

    def _expand_parameter(self, name: str) -> str | list[str]:
        value = self._look_up(name, None)
        return mark(f"${name}") if value is None else value

    def _look_up(self, name: str, index: str | None) -> str | list[str] | None:
        """Return the text or the items of a variable; None if it is not set."""
        if name in ("@", "*"):
            return self.variables.arguments or []
        if name == "#":
            return None if self.variables.arguments is None else str(len(self.variables.arguments))
        value = self.variables.get(name)
        if index in ("@", "*"):
            items = list(value.values()) if isinstance(value, dict) else [value] if value else []
            separator = (self.variables.get_text("IFS") or " ")[:1]
            return separator.join(items) if index == "*" and separator != " " else items
        if index is not None:
            key = self.expand_text(index) if not isinstance(value, dict) or index not in value else index
            key = key if isinstance(value, dict) and key in value else self.compute(index)
            return value.get(key) if isinstance(value, dict) else value if key == "0" else None
        return value.get("0", "") if isinstance(value, dict) else value

    def _apply(self, piece: str, name: str, value: str | list[str] | None, rest: str) -> str | list[str]:
        """Apply what stands behind a name in `${name…}`: a default, a cut, a replacement."""
        if match := _DEFAULTS.fullmatch(rest):
            return self._choose_default(piece, name, value, match[1], match[2])
        if value is None:
            return mark(piece)
        if not rest:
            return value
        if isinstance(value, list):
            return self._slice_list(piece, value, rest)
        if not is_known(value):
            return mark(piece)
        if match := re.fullmatch(r":([^:]*)(?::(.*))?", rest, re.DOTALL):
            start, length = (self.compute(text) if text else "0" for text in match.groups())
            if is_known(start + length):
                first = int(start) + (len(value) if int(start) < 0 else 0)
                return value[first:] if match[2] is None else value[first:][: int(length)]
        if match := _CUTS.fullmatch(rest):
            return self._cut(value, match[1], match[2])
        return mark(piece)

    def _slice_list(self, piece: str, items: list[str], rest: str) -> str | list[str]:
        if match := re.fullmatch(r":(\d+)(?::(\d+))?", rest):
            return items[int(match[1]) :][: int(match[2]) if match[2] else None]
        if match := _CUTS.fullmatch(rest):
            return [self._cut(item, match[1], match[2]) for item in items]
        return mark(piece)

    def _choose_default(
        self, piece: str, name: str, value: str | list[str] | None, operator: str, default: str
    ) -> str | list[str]:
        is_missing = value is None or (operator[0] == ":" and not value)
        if operator[-1] == "+":
            return "" if is_missing else self._expand_default(default)
        if not is_missing:
            return value if value is not None else ""
        if operator[-1] == "?":
            return mark(piece)
        chosen = self._expand_default(default)
        if operator[-1] == "=":
            self.variables.values[name] = chosen if isinstance(chosen, str) else " ".join(chosen)
        return chosen

    def _expand_default(self, default: str) -> str | list[str]:
        """Expand the word behind `:-`; one array in quotes keeps its items."""
        if re.fullmatch(r'"?\$\{\w+\[@\]\}"?', default):
            return self.expand(default)
        return self.expand_text(default)

    def _cut(self, value: str, operator: str, argument: str) -> str:
        if operator[0] in "^,":
            change = str.upper if operator[0] == "^" else str.lower
            return change(value) if len(operator) == 2 else change(value[:1]) + value[1:]
        if operator[0] == "/":
            pattern, _, new = argument.partition("/")
            anchors = {"#": r"\A", "%": r"\Z"}
            start, end = ("\\A", "") if pattern[:1] == "#" else ("", "\\Z") if pattern[:1] == "%" else ("", "")
            pattern = pattern[1:] if pattern[:1] in anchors else pattern
            expression = start + _translate(self.expand_text(pattern)) + end
            replacement = self.expand_text(new)
            return re.sub(expression, lambda _: replacement, value, count=0 if operator == "//" else 1)
        pattern = re.compile(_translate(self.expand_text(argument)) + r"\Z", re.DOTALL)
        lengths = range(len(value) + 1) if len(operator) == 1 else range(len(value), -1, -1)
        for length in lengths:
            cut, kept = (
                (value[:length], value[length:])
                if operator[0] == "#"
                else (value[len(value) - length :], value[: len(value) - length])
            )
            if pattern.match(cut):
                return kept
        return value


def _translate(pattern: str) -> str:
    """Return a regular expression for a pattern of the shell."""
    return fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix("\\z")


def matches(text: str, pattern: str) -> bool | None:
    """Whether a text matches a pattern of the shell; None if it is not known."""
    if not is_known(empty(text)) or not is_known(empty(pattern)):
        return None
    return re.match(_translate(empty(pattern)) + r"\Z", empty(text), re.DOTALL) is not None
