"""Follows a shell script: sets its variables, chooses its branches, and collects the commands that it would start."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coalign_migrate.shell.arithmetic import compute
from coalign_migrate.shell.conditions import evaluate_condition
from coalign_migrate.shell.expansion import ShellVariables, Value, WordExpander, matches
from coalign_migrate.shell.lexer import ShellToken
from coalign_migrate.shell.marks import is_known, is_variable, mark, show
from coalign_migrate.shell.parser import (
    AndOrList,
    CaseStatement,
    CommandGroup,
    FunctionDefinition,
    IfStatement,
    LoopStatement,
    Pipeline,
    SimpleCommand,
    Statement,
    parse_script,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]+)\])?(\+?)=")
_DECLARATIONS = frozenset(("export", "declare", "local", "readonly", "typeset"))
_QUESTIONS = frozenset(("[", "[[", "test", "command", "which", "type", "hash", "grep", "nvidia-smi", "pgrep"))
_WRITERS = frozenset(("echo", "printf", "cat", "tee", "dirname", "basename", "realpath", "pwd", "expr"))
_MAX_DEPTH, _MAX_ITERATIONS, _MAX_BYTES = 20, 1000, 1 << 20


@dataclass(frozen=True)
class ShellCommand:
    """A command that a script would start: its words, the variables set before it, and its line."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    line: int


class _Exit(Exception):
    """The script ends."""


class _Return(Exception):
    """A function ends."""


class _Leave(Exception):
    """A loop ends, or its next round begins."""


class ShellScript:
    """A script that has been followed.

    ``commands`` are those it would start, ``files`` what it writes from here-documents, ``notes`` what a person has to
    know: conditions that only a machine could decide are taken as false, and variables came from the environment.
    """

    def __init__(
        self,
        text: str,
        path: str = "",
        environment: Mapping[str, str] | None = None,
        parent: ShellScript | None = None,
    ) -> None:
        """Follow a text. ValueError, with a line, where it is no shell."""
        self.path = path
        self.environment = os.environ if environment is None else environment
        self.variables = (
            parent.variables.copy() if parent else ShellVariables(self.environment, {"0": path, "PWD": os.getcwd()})
        )
        self.commands: list[ShellCommand] = parent.commands if parent else []
        self.files: dict[str, str] = parent.files if parent else {}
        self._notes: list[str] = parent._notes if parent else []
        self._functions: dict[str, Statement] = dict(parent._functions) if parent else {}
        self._depth = parent._depth + 1 if parent else 0
        self._output: list[str | None] | None = [] if parent else None  # None while nobody reads what is written
        self._expander = WordExpander(self.variables, self._substitute)
        if not parent:
            self.variables.values["BASH_SOURCE"] = {"0": path}
        with suppress(_Exit, _Return, _Leave):
            self._run(parse_script(text))

    @property
    def notes(self) -> list[str]:
        borrowed = [f"{name} is {value!r} in the environment" for name, value in self.variables.borrowed.items()]
        return list(dict.fromkeys(self._notes + borrowed))

    @property
    def output(self) -> str | None:
        """What a substitution writes; None if it is not known."""
        texts = [text for text in self._output or [] if text is not None]
        return "\n".join(texts).rstrip("\n") if len(texts) == len(self._output or [None]) else None

    def _run(self, statements: Iterable[Statement]) -> bool | None:
        """Follow statements; return whether the last one succeeds, None if that is not known."""
        status: bool | None = True
        for statement in statements:
            status = self._follow(statement)
        return status

    def _follow(self, statement: Statement) -> bool | None:
        match statement:
            case SimpleCommand():
                return self._run_command(statement)
            case AndOrList(items=items):
                return self._follow_and_or(items)
            case Pipeline(commands=commands):
                return self._follow_pipeline(commands, statement.is_negated)
            case CommandGroup(body=body, is_subshell=is_subshell):
                outer_values = dict(self.variables.values)
                status = self._run(body)
                if is_subshell:
                    self.variables.values = outer_values
                return status
            case IfStatement():
                return self._follow_if(statement)
            case CaseStatement():
                return self._follow_case(statement)
            case LoopStatement():
                return self._follow_loop(statement)
            case FunctionDefinition(name=name, body=body):
                self._functions[name] = body
        return True

    def _follow_and_or(self, items: list[tuple[str, Statement]]) -> bool | None:
        status: bool | None = True
        for index, (operator, statement) in enumerate(items):
            if status is None and operator == "&&" and _does_anything([statement]):
                self._notes.append(
                    f"line {statement.line}: what stands before && is not known here; it is taken as false"
                )
            if (operator == "&&" and not status) or (operator == "||" and status):
                continue
            if operator and _ends([statement]):
                continue  # a guard, of an argument that a person gives
            decides = index + 1 < len(items)
            status = self._test([statement]) if decides else self._follow(statement)
            if status is None and decides and self._output is None and not _asks(statement):
                status = True  # a program that starts is taken to succeed
        return status

    def _follow_pipeline(self, commands: list[Statement], is_negated: bool) -> bool | None:
        output, self._output = self._output, None if len(commands) > 1 else self._output
        status: bool | None = self._run(commands)
        if output is not None and len(commands) > 1:
            self._output = [*output, None]  # what the last command makes of it
        return (None if status is None else not status) if is_negated else status

    def _test(self, condition: list[Statement]) -> bool | None:
        """Follow a condition; where it is not known, it writes nothing."""
        output = list(self._output) if self._output is not None else None
        status = self._run(condition)
        if status is None:
            self._output = output
        return status

    def _follow_if(self, statement: IfStatement) -> bool | None:
        for condition, body in statement.branches:
            status = self._test(condition)
            if status and _ends(body):
                self._notes.append(f"line {statement.line}: the script would end here; it is read as if it did not")
                continue
            if status is None and _does_anything(body):
                self._notes.append(
                    f"line {statement.line}: whether this `if` holds is not known here; it is passed over"
                )
            if status:
                return self._run(body)
        return self._run(statement.otherwise)

    def _follow_case(self, statement: CaseStatement) -> bool | None:
        text = self._expander.expand_text(statement.word.text)
        for patterns, body in statement.branches:
            statuses = [matches(text, self._expander.expand_text(pattern.text)) for pattern in patterns]
            if any(statuses):
                return self._run(body)
            if None in statuses:
                self._notes.append(f"line {statement.line}: {show(text)} is not known; no `case` of it is taken")
                return None
        return True

    def _follow_loop(self, statement: LoopStatement) -> bool | None:
        if statement.condition:
            if self._test(statement.condition) is not False and _does_anything(statement.body):
                self._notes.append(f"line {statement.line}: the loop is not followed")
            return None
        if statement.words is None or not statement.name:
            self._notes.append(f"line {statement.line}: the loop is not followed")
            return None
        items = [text for word in statement.words for text in self._expander.expand(word.text)]
        for item in items[:_MAX_ITERATIONS]:
            self.variables.values[statement.name] = item
            try:
                self._run(statement.body)
            except _Leave as leave:
                if leave.args == ("break",):
                    break
        return True

    def _run_command(self, command: SimpleCommand) -> bool | None:
        """Set the variables of a command without words; run what a shell does itself; else collect the command."""
        words = list(command.words)
        if words and words[0].text in ("[", "[[", "test"):
            return evaluate_condition([word.text for word in words], self._expander)
        if words and words[0].type == "arithmetic":
            value = self._expander.compute(words[0].text[2:-2])
            return value != "0" if is_known(value) else None
        prefix: list[ShellToken] = []
        while words and (words[0].type == "array" or _ASSIGNMENT.match(words[0].text)):
            prefix.append(words.pop(0))
        if not words or words[0].text in _DECLARATIONS:
            for token in [*prefix, *words[1:]]:
                self._assign(token)
            return True
        expanded = self._expand_words(words, command.line)
        if not expanded:
            return True
        if expanded[0].startswith("-") or re.match(r"\+*[\w.]+=", expanded[0]):
            self._notes.append(
                f"line {command.line}: `{show(expanded[0])}` begins no command; the one before has ended"
            )
        assignments = [(_ASSIGNMENT.match(token.text), token.text) for token in prefix if token.type == "word"]
        variables = {match[1]: self._expander.expand_text(text[match.end() :]) for match, text in assignments if match}
        return self._start(ShellCommand(tuple(expanded), variables, command.line), command)

    def _expand_words(self, words: list[ShellToken], line: int) -> list[str]:
        """Expand the words of a command; variables that are not set and stand alone vanish."""
        expanded: list[str] = []
        for token in words:
            if token.type != "word":
                expanded.append(token.text)
                continue
            texts = self._expander.expand(token.text)
            if not token.text.startswith(('"', "'")) and any(map(is_variable, texts)):
                self._notes.append(f"line {line}: {token.text} is not set: it stands for nothing")
                texts = [text for text in texts if not is_variable(text)]
            expanded += texts
        return expanded

    def _assign(self, token: ShellToken) -> None:
        match = _ASSIGNMENT.match(token.text)
        if not match:
            return
        name, key, adds = match.groups()
        current: Value | None = self.variables.get(name) if adds or key else None
        if token.type == "array":
            value: Value = self._expander.expand_array(token.items, current)
        else:
            text = self._expander.expand_text(token.text[match.end() :])
            if key:
                array = dict(current) if isinstance(current, dict) else {}
                value = array | {self._expander.expand_text(key): text}
            elif isinstance(current, dict):
                value = current | {"0": current.get("0", "") + text}
            else:
                value = (current or "") + text
        self.variables.values[name] = value

    def _start(self, command: ShellCommand, source: SimpleCommand) -> bool | None:
        name, *arguments = command.words
        if name in self._functions:
            return self._call(name, arguments)
        if name in ("exit", "return", "break", "continue"):
            raise {"exit": _Exit, "return": _Return}.get(name, _Leave)(name)
        documents = [token for _, token in source.redirections if token.type == "document"]
        text = self._expander.expand_document(documents[0]) if documents else None
        if name in ("true", ":", "set", "shift", "unset", "cd", "pushd", "popd", "trap", "wait", "sleep", "mkdir"):
            return self._change_shell(name, arguments)
        if name == "false":
            return False
        if name in ("source", "."):
            return self._include(arguments, command.line)
        if name == "eval":
            return self._run(parse_script(" ".join(arguments)))
        if name == "read":
            return self._read(arguments, command, source, text)
        if name in _WRITERS:
            return self._write(_print(name, arguments, self.variables), source, text, arguments)
        if self._output is not None and not any(op in (">", "&>") for op, _ in source.redirections):
            self._output.append(None)
        self.commands.append(command)
        return None

    def _change_shell(self, name: str, arguments: list[str]) -> bool:
        if name == "set" and "--" in arguments:
            self.variables.arguments = arguments[arguments.index("--") + 1 :]
        elif name == "shift" and self.variables.arguments:
            del self.variables.arguments[0]
        elif name == "unset":
            for variable in arguments:
                self.variables.values.pop(variable, None)
        elif name == "cd" and self._output is not None and arguments and is_known(arguments[-1]):
            self.variables.values["PWD"] = os.path.normpath(os.path.join(os.getcwd(), arguments[-1]))
        return True

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        if self._depth >= _MAX_DEPTH:
            raise _Exit
        outer_arguments, self.variables.arguments = self.variables.arguments, arguments
        self._depth += 1
        try:
            return self._follow(self._functions[name])
        except _Return:
            return True
        finally:
            self._depth -= 1
            self.variables.arguments = outer_arguments

    def _include(self, arguments: list[str], line: int) -> bool | None:
        """Follow another file, as `source` does, if it is there."""
        file = Path(arguments[0]) if arguments and is_known(arguments[0]) else None
        if file is None or not file.is_file() or file.stat().st_size > _MAX_BYTES or self._depth >= _MAX_DEPTH:
            self._notes.append(f"line {line}: {show(' '.join(arguments[:1]))} is not read; what it sets is not known")
            return None
        self._depth += 1
        self._run(parse_script(file.read_text(encoding="utf-8")))
        self._depth -= 1
        return True

    def _read(
        self, arguments: list[str], command: ShellCommand, source: SimpleCommand, text: str | None
    ) -> bool | None:
        """Set the variables that `read` fills from a here-document or a here-string."""
        strings = [self._expander.expand_text(token.text) for op, token in source.redirections if op == "<<<"]
        text = strings[0] if strings else text
        names = [name for index, name in enumerate(arguments) if name.isidentifier()]
        if text is not None and names and "-a" in " ".join(arguments):
            separators = command.variables.get("IFS", " \t\n")
            items = [item for item in re.split(f"[{re.escape(separators)}]+", text.strip()) if item]
            self.variables.values[names[-1]] = {str(index): item for index, item in enumerate(items)}
        elif names:
            self.variables.values[names[-1]] = mark(f"${names[-1]}") if text is None else text.strip()
        return None

    def _write(self, text: str | None, source: SimpleCommand, document: str | None, arguments: list[str]) -> bool:
        """Add what a command writes to the output, or keep it as the file that it goes to."""
        targets = [
            self._expander.expand_text(token.text) for op, token in source.redirections if op in (">", ">|", ">>")
        ]
        targets += arguments if source.words[0].text == "tee" else []
        text = document if document is not None else text
        if targets and text is not None:
            self.files[targets[0]] = text + "\n"
        elif self._output is not None and not targets:
            self._output.append(text)
        return True

    def _substitute(self, source: str) -> str:
        """Return what a command in `$(…)` writes, or its source between marks."""
        if self._depth >= _MAX_DEPTH:
            return mark(f"$({source})")
        commands = len(self.commands)
        inner = ShellScript(source, self.path, self.environment, self)
        del self.commands[commands:]
        return mark(f"$({source})") if inner.output is None else inner.output


def _does_anything(body: list[Statement]) -> bool:
    """Whether a body does more than to write and to end."""
    return not all(
        isinstance(statement, SimpleCommand)
        and statement.words
        and statement.words[0].text in ("echo", "exit", ":", "return")
        for statement in body
    )


def _ends(body: list[Statement]) -> bool:
    """Whether a body ends the script at last."""
    last = body[-1] if body else None
    if isinstance(last, CommandGroup):
        return _ends(last.body)
    return isinstance(last, SimpleCommand) and bool(last.words) and last.words[0].text == "exit"


def _asks(statement: Statement) -> bool:
    """Whether a statement asks about the machine, rather than to do something."""
    first = statement.commands[0] if isinstance(statement, Pipeline) else statement
    return not isinstance(first, SimpleCommand) or not first.words or first.words[0].text in _QUESTIONS


def _print(name: str, arguments: list[str], variables: ShellVariables) -> str | None:
    """Return what one of `_WRITERS` writes of its arguments; None if that is not known."""
    paths = [argument for argument in arguments if argument != "--"]
    path = paths[0].rstrip("/") if paths and is_known(paths[0]) else None
    match name:
        case "echo":
            options = itertools.takewhile(lambda argument: re.fullmatch(r"-[neE]+", argument), arguments)
            return " ".join(arguments[len(list(options)) :])
        case "printf":
            return arguments[1] if len(arguments) == 2 and arguments[0] in ("%s", "%s\\n") else None
        case "dirname":
            return None if path is None else os.path.dirname(path) or "."
        case "basename":
            return None if path is None else os.path.basename(path).removesuffix("".join(paths[1:2]))
        case "realpath":
            return os.path.abspath(arguments[-1]) if arguments and is_known(arguments[-1]) else None
        case "pwd":
            return variables.get_text("PWD")
        case "expr":
            value = compute(" ".join(arguments), lambda name: None)
            return None if value is None else str(value)
    return None
