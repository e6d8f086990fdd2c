"""Cuts a shell script into tokens. Words keep their quotes; ``expansion.py`` removes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OPERATORS = re.compile(r"\d+(?:>>|>&|<&|>\||[<>])|&>>|<<<|<<-|;;&|&&|\|\||;;|;&|<<|>>|&>|>&|<&|>\||<>|[;&|()<>]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_QUOTE = re.compile(r"\$?['\"]|`")
_CLOSING = {"{": "}", "(": ")"}
_COMMAND_STARTS = frozenset(("", "\n", ";", "&", "&&", "|", "||", "(", "{", "!", "then", "do", "else", "elif", "if"))
_COMMAND_STARTS |= {"while", "until", "for"}


@dataclass
class ShellToken:
    """A word, an operator, an array's value (``NAME=`` with its ``items``) or a here-document (its ``text``)."""

    type: str  # word, operator, array, document, arithmetic
    text: str
    line: int
    items: list[ShellToken] = field(default_factory=list)
    is_quoted: bool = False  # a document without variables


def find_end(text: str, start: int) -> int:
    """Return the position behind what begins at ``start``: a quoted text, a substitution, or one character.

    ValueError if it does not end.
    """
    if text[start] == "\\":
        return min(start + 2, len(text))
    if text.startswith(("${", "$("), start):
        return find_closing(text, start + 1)
    opening = _QUOTE.match(text, start)
    if not opening:
        return start + 1
    position = opening.end()
    while position < len(text) and text[position] != opening[0][-1]:
        nests = text[position] == "\\" and opening[0] != "'"
        if opening[0][-1] == '"':
            nests = text[position] in "\\`" or text.startswith(("${", "$("), position)
        position = find_end(text, position) if nests else position + 1
    return _require(position, text, opening.end() - 1)


def find_closing(text: str, start: int) -> int:
    """Return the position behind the bracket that closes the one at ``start``."""
    opening, closing, position = text[start], _CLOSING[text[start]], start + 1
    while position < len(text) and text[position] != closing:
        if text[position] == opening == "(":
            position = find_closing(text, position)
        elif opening == "(" and text[position] == "#" and text[position - 1] in " \t\n":
            position = _find_line_end(text, position)
        else:
            position = find_end(text, position)
    return _require(position, text, start)


def _find_line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _require(position: int, text: str, start: int) -> int:
    if position >= len(text):
        raise ValueError(f"line {text.count(chr(10), 0, start) + 1}: {text[start]} is not closed")
    return position + 1


class Lexer:
    """Cuts a text into tokens, newlines among them as operators."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.position, self.line = 0, 1
        self._documents: list[tuple[ShellToken, str, bool]] = []  # that begin behind the next newline

    def read(self, closing: str = "") -> list[ShellToken]:
        """Return the tokens up to the end, or up to the operator ``closing``, which is passed over."""
        tokens: list[ShellToken] = []
        while self._skip_blanks():
            previous = tokens[-1].text if tokens else ""
            if self.text[self.position] == "\n":
                self._add(tokens, "operator", 1)
                self._read_documents()
            elif self.text.startswith("((", self.position) and previous in _COMMAND_STARTS and not closing:
                end = find_closing(self.text, self.position)
                self._add(tokens, "arithmetic", end - self.position)
            elif self.text.startswith(("<(", ">("), self.position):  # stands for a file
                end = find_closing(self.text, self.position + 1)
                self._add(tokens, "word", end - self.position)
            elif match := _OPERATORS.match(self.text, self.position):
                self._add(tokens, "operator", len(match[0]))
                if closing and match[0] == closing:
                    return tokens[:-1]
                if match[0] in ("<<", "<<-"):
                    tokens.append(self._begin_document(match[0]))
            else:
                tokens.append(self._read_word())
        if closing:
            raise ValueError(f"line {self.line}: an array is not closed")
        return tokens

    def _add(self, tokens: list[ShellToken], type_: str, length: int) -> None:
        text = self.text[self.position : self.position + length]
        tokens.append(ShellToken(type_, text, self.line))
        self._move(self.position + length)

    def _move(self, position: int) -> None:
        self.line += self.text.count("\n", self.position, position)
        self.position = position

    def _skip_blanks(self) -> bool:
        """Move behind blanks, comments and joined lines. Return whether anything follows."""
        while self.position < len(self.text):
            if self.text[self.position] in " \t\r":
                self.position += 1
            elif self.text.startswith("\\\n", self.position):
                self._move(self.position + 2)
            elif self.text[self.position] == "#":
                self.position = _find_line_end(self.text, self.position)
            else:
                return True
        return False

    def _read_word(self) -> ShellToken:
        start, line = self.position, self.line
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == "(" and _ARRAY.fullmatch(self.text, start, self.position):
                name = self.text[start : self.position]
                self.position += 1
                items = [token for token in self.read(")") if token.type == "word"]
                return ShellToken("array", name, line, items)
            if character in " \t\n;&|()<>" and not self._continues(start):
                break
            if self.text.startswith("\\\n", self.position):  # the word goes on in the next line
                self.text = self.text[: self.position] + self.text[self.position + 2 :]
                self.line += 1
            else:
                self._move(find_end(self.text, self.position))
        return ShellToken("word", self.text[start : self.position], line)

    def _continues(self, start: int) -> bool:
        """Whether an operator's character belongs to the word: the brackets of patterns such as `@(a|b)`."""
        return self.text[self.position] == "(" and self.position > start and self.text[self.position - 1] in "@?+!*"

    def _begin_document(self, operator: str) -> ShellToken:
        self._skip_blanks()
        word = self._read_word()
        token = ShellToken("document", "", self.line, is_quoted=word.text[:1] in "'\"\\")
        self._documents.append((token, re.sub(r"['\"\\]", "", word.text), operator == "<<-"))
        return token

    def _read_documents(self) -> None:
        for token, end, strips in self._documents:
            lines: list[str] = []
            while self.position < len(self.text):
                stop = _find_line_end(self.text, self.position)
                line = self.text[self.position : stop]
                self._move(min(stop + 1, len(self.text)))
                line = line.lstrip("\t") if strips else line
                if line == end:
                    break
                lines.append(line)
            token.text = "\n".join(lines)
        self._documents = []
