"""Makes statements of a shell script's tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from coalign_migrate.shell.lexer import Lexer, ShellToken

_REDIRECTIONS = frozenset(("<", ">", ">>", ">|", "<>", "&>", "&>>", ">&", "<&", "<<", "<<-", "<<<"))
_DIGITS = "0123456789"
_ENDS = frozenset(("then", "fi", "elif", "else", "do", "done", "esac", "}"))


@dataclass
class SimpleCommand:
    """A command with its redirections: ``words`` as they are written, assignments before it among them."""

    line: int
    words: list[ShellToken]
    redirections: list[tuple[str, ShellToken]] = field(default_factory=list)


@dataclass
class Pipeline:
    """Commands of which each reads what the one before it writes."""

    line: int
    commands: list[Statement]
    is_negated: bool = False


@dataclass
class AndOrList:
    """Statements behind `&&` or `||`, with the operator before each; "" before the first."""

    line: int
    items: list[tuple[str, Statement]]


@dataclass
class CommandGroup:
    line: int
    body: list[Statement]
    is_subshell: bool = False


@dataclass
class IfStatement:
    line: int
    branches: list[tuple[list[Statement], list[Statement]]]
    otherwise: list[Statement] = field(default_factory=list)


@dataclass
class CaseStatement:
    line: int
    word: ShellToken
    branches: list[tuple[list[ShellToken], list[Statement]]]


@dataclass
class LoopStatement:
    """`for` with a ``name``, or with an arithmetic head, and `while` or `until` with a ``condition``."""

    line: int
    body: list[Statement]
    name: str = ""
    words: list[ShellToken] | None = None
    condition: list[Statement] = field(default_factory=list)


@dataclass
class FunctionDefinition:
    line: int
    name: str
    body: Statement


Statement = (
    SimpleCommand
    | Pipeline
    | AndOrList
    | CommandGroup
    | IfStatement
    | CaseStatement
    | LoopStatement
    | FunctionDefinition
)


def parse_script(text: str) -> list[Statement]:
    """Return the statements of a text. ValueError, with a line, for what is no shell."""
    parser = _Parser(Lexer(text).read())
    statements = parser.read_list()
    if parser.token is not None:
        raise ValueError(f"line {parser.line}: '{parser.token.text}' is not expected here")
    return statements


class _Parser:
    def __init__(self, tokens: list[ShellToken]) -> None:
        self.tokens, self.index = tokens, 0

    @property
    def token(self) -> ShellToken | None:
        return self.tokens[self.index] if self.index < len(self.tokens) else None

    @property
    def line(self) -> int:
        return self.token.line if self.token else self.tokens[-1].line if self.tokens else 1

    def is_at(self, *texts: str) -> bool:
        return self.token is not None and self.token.type in ("word", "operator") and self.token.text in texts

    def take(self, *texts: str) -> bool:
        if self.is_at(*texts):
            self.index += 1
            return True
        return False

    def need(self, text: str) -> None:
        if not self.take(text):
            there = self.token.text.strip() if self.token else "the end of the file"
            raise ValueError(f"line {self.line}: expected '{text}', not '{there}'")

    def next(self) -> ShellToken:
        if self.token is None:
            raise ValueError(f"line {self.line}: the script ends within a statement")
        self.index += 1
        return self.tokens[self.index - 1]

    def skip_newlines(self) -> None:
        while self.take("\n", ";", "&"):
            pass

    def read_list(self) -> list[Statement]:
        """Read statements up to a word that ends a list, which is left."""
        statements: list[Statement] = []
        self.skip_newlines()
        while self.token is not None and not self.is_at(")", ";;", ";&", ";;&", *_ENDS):
            statements.append(self.read_and_or())
            self.skip_newlines()
        return statements

    def read_body(self, end: str) -> list[Statement]:
        body = self.read_list()
        self.need(end)
        return body

    def read_and_or(self) -> Statement:
        line, items = self.line, [("", self.read_pipeline())]
        while self.is_at("&&", "||"):
            operator = self.next().text
            self.skip_newlines()
            items.append((operator, self.read_pipeline()))
        return items[0][1] if len(items) == 1 else AndOrList(line, items)

    def read_pipeline(self) -> Statement:
        line, negated = self.line, self.take("!")
        commands = [self.read_command()]
        while self.take("|"):
            self.skip_newlines()
            commands.append(self.read_command())
        return commands[0] if len(commands) == 1 and not negated else Pipeline(line, commands, negated)

    def read_command(self) -> Statement:
        line = self.line
        if self.take("("):
            statement: Statement = CommandGroup(line, self.read_body(")"), is_subshell=True)
        elif self.take("{"):
            statement = CommandGroup(line, self.read_body("}"))
        elif self.take("if"):
            statement = self.read_if(line)
        elif self.take("case"):
            statement = self.read_case(line)
        elif self.is_at("for", "select", "while", "until"):
            statement = self.read_loop(line)
        elif self.take("function"):
            name = self.next().text
            if self.take("("):
                self.need(")")
            self.skip_newlines()
            return FunctionDefinition(line, name, self.read_command())
        else:
            return self.read_simple(line)
        self.read_redirections()  # theirs say nothing of settings
        return statement

    def read_if(self, line: int) -> IfStatement:
        branches = [(self.read_body("then"), self.read_list())]
        while self.take("elif"):
            branches.append((self.read_body("then"), self.read_list()))
        otherwise = self.read_list() if self.take("else") else []
        self.need("fi")
        return IfStatement(line, branches, otherwise)

    def read_case(self, line: int) -> CaseStatement:
        word, branches = self.next(), []
        self.skip_newlines()
        self.need("in")
        self.skip_newlines()
        while not self.take("esac"):
            self.take("(")
            patterns = [self.next()]
            while self.take("|"):
                patterns.append(self.next())
            self.need(")")
            branches.append((patterns, self.read_list()))
            self.take(";;", ";&", ";;&")
            self.skip_newlines()
        return CaseStatement(line, word, branches)

    def read_loop(self, line: int) -> LoopStatement:
        if self.take("while", "until"):
            condition = self.read_body("do")
            return LoopStatement(line, self.read_body("done"), condition=condition)
        self.next()
        head, words = self.next(), None
        self.skip_newlines()
        if self.take("in"):
            words = []
            while self.token and not self.is_at(";", "\n"):
                words.append(self.next())
        self.skip_newlines()
        self.need("do")
        return LoopStatement(line, self.read_body("done"), head.text if head.type == "word" else "", words)

    def read_simple(self, line: int) -> Statement:
        words, redirections = [], self.read_redirections()
        while self.token and self.token.type != "operator":
            words.append(self.next())
            if words[0].text == "[[":
                while not self.is_at("]]"):
                    words.append(self.next())
                words.append(self.next())
            if len(words) == 1 and self.take("("):
                self.need(")")
                self.skip_newlines()
                return FunctionDefinition(line, words[0].text, self.read_command())
            redirections += self.read_redirections()
        if not words and not redirections:
            raise ValueError(f"line {line}: '{self.next().text.strip()}' begins no command")
        return SimpleCommand(line, words, redirections)

    def read_redirections(self) -> list[tuple[str, ShellToken]]:
        redirections = []
        while self.token and self.token.type == "operator" and self.token.text.lstrip(_DIGITS) in _REDIRECTIONS:
            redirections.append((self.next().text, self.next()))
        return redirections
