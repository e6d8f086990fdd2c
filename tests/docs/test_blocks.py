"""Every block of code of the documentation is right: settings, commands, rows and Python, without running any."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from coalign.cli import TAKE_SETTINGS, app
from coalign.config import ConfigError, load, load_section
from coalign.config.functions import bind, resolve
from coalign.config.schema import Function, RunConfig, Section
from coalign.config.yaml_reader import parse
from coalign.launch.plan import find_recipe
from coalign_jobs.sweep.config import SweepConfig
from coalign_serve.config.pipeline_file import load_pipeline
from tests.docs.pages import CodeBlock, list_blocks, list_pages, read_commands, read_page
from tests.runs import ROOT

LANGUAGES = {"bash", "yaml", "python", "jsonl", "text", ""}
NOT_HERE = re.compile(  # the reader's own files and functions
    r"there is no (file|directory)|the environment variable \w+ is not set|no module '(my_\w+|mine)' in the current"
)
SWEEP = {"base": "run.yaml", "output": "runs/sweep", "space": {"seed": [0, 1]}, "metric": "eval/mean"}


@pytest.mark.parametrize("path", list_pages())
def test_marks_are_used_and_name_tests(path):
    page = read_page(path)
    assert page.unused_marks == [], "a mark stands directly above its block"
    assert {block.language for block in page.blocks} <= LANGUAGES
    for block in page.blocks:
        if block.mark == "run by":
            assert (ROOT / block.reason).is_file(), f"{block}: {block.reason}"


def test_commands_stand_in_blocks_of_shell():
    """A block without a language is a drawing or an output: nothing runs it, and it needs no mark."""
    command = re.compile(r"(coalign|python|make|pip|ray|pytest|docker) ")
    blocks = [block for block in list_blocks("", "text", unmarked=False) if command.match(block.text)]
    assert blocks == [], "give these the language bash, and a mark if a test cannot run them"


def test_settings_on_the_pages_are_those_of_the_schema():
    problems = [f"{block}: {problem}" for block in list_blocks("yaml") for problem in check_yaml(block)]
    assert problems == []


def test_a_wrong_setting_on_a_page_is_found():
    def check(text: str) -> list[str]:
        return list(check_yaml(CodeBlock("page", 1, "yaml", text)))

    assert check("runtime: {step: 3}\n") and check("loss: {fn: dpo, betta: 1}\n")
    assert check("rounds: 2\nstages: [{select: {keep: bestt}}]\n") and check("scheduler: ashaa\n")
    assert not check("loss: {fn: dpo}\nloss: {fn: ipo}\n"), "alternatives below each other"


def check_yaml(block: CodeBlock) -> Iterator[str]:
    """Yield the problems of a block: of a run, a pipeline or a sweep, or of some sections of one."""
    for text in _split_alternatives(block.text):
        try:
            data, _ = parse(text, str(block))
        except ConfigError as error:
            yield str(error)
            continue
        if "stages" in data:
            yield from _list_problems(lambda text=text: check_stages(text))
        elif data.keys() & set(SweepConfig.model_fields) - set(RunConfig.model_fields):
            yield from _list_problems(lambda data=data: load_section(SweepConfig, SWEEP | data))
        else:
            yield from check_run(data)


def check_stages(text: str) -> None:
    """Load a pipeline and every stage of it, with stand-ins for what earlier stages would have made."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "pipeline.yaml"
        file.write_text(text)
        pipeline = load_pipeline(file)
        stages = {stage.called: {"output": "output.jsonl"} for stage in pipeline.header.stages}
        for index in range(len(stages)):
            pipeline.settings(index, {"model": "model", "round": 1, "stages": stages}, ["output.jsonl"], _find_defaults)


def check_run(data: dict[str, Any], overrides: list[str] | None = None) -> Iterator[str]:
    """Yield the problems of a run's settings, put over the defaults of their recipe, or of `grpo`."""
    name = data.get("algorithm", "grpo")

    def read() -> None:
        config = load({"algorithm": name} | data, overrides or [], defaults=_find_defaults)
        for where, section in _list_functions(config, ""):
            if ":" not in (section.fn or ":"):
                bind(resolve(section.fn, section.home), section.arguments, where)

    yield from _list_problems(read)


def _find_defaults(name: str) -> Any:
    return {} if ":" in name else find_recipe(name).defaults


def _list_problems(read: Any) -> list[str]:
    try:
        read()
    except ConfigError as error:
        return [str(problem) for problem in error.problems if not NOT_HERE.search(problem.message)]
    except ValueError as error:
        return [str(error)]
    return []


def _list_functions(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the sections that name a function of ours by a short name, with their keys."""
    if isinstance(value, Function) and value.home and value.fn:
        yield where, value
    children: dict[Any, Any] = {}
    if isinstance(value, Section):
        children = {name: getattr(value, name) for name in type(value).model_fields}
    elif isinstance(value, dict | list):
        children = dict(value.items() if isinstance(value, dict) else enumerate(value))
    for name, item in children.items():
        yield from _list_functions(item, f"{where}.{name}".lstrip("."))


def _split_alternatives(text: str) -> list[str]:
    """Cut a block at top-level keys that it has already: the page then shows alternatives."""
    documents: list[list[str]] = [[]]
    seen: set[str] = set()
    for line in text.splitlines():
        key = re.match(r"(\w+):", line)
        if key and key[1] in seen:
            documents.append([])
            seen = set()
        seen |= {key[1]} if key else set()
        documents[-1].append(line)
    return ["\n".join(lines) for lines in documents]


def test_commands_on_the_pages_are_those_of_the_command_line():
    blocks = list_blocks("bash", "", "text", unmarked=False)
    problems = [
        f"{block}: {' '.join(words)}: {problem}"
        for block in blocks
        for words in _read_commands(block)
        for problem in check_command(words)
    ]
    assert problems == []


def test_a_wrong_command_on_a_page_is_found():
    for text in ("coalign trian run.yaml", "coalign launch slurm run.yaml --node 2", "coalign merge a", "make demos"):
        assert list(check_command(text.split())), text
    assert list(check_command(["coalign", "train", "run.yaml", "runtime.step=2"]))
    assert list(check_command(["python", "examples/none.py"])) and list(
        check_command(["python", "-m", "examples.none"])
    )


def _read_commands(block: CodeBlock) -> list[list[str]]:
    """The commands of a block; of one without a language, which may be a drawing, lines that begin like ours."""
    text = block.text
    if block.language != "bash":
        text = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(("coalign ", "python ", "make ")))
    return list(read_commands(text))


@cache
def _command_line() -> TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def check_command(words: list[str]) -> Iterator[str]:
    """Yield what is wrong with a command of ours, of Python or of make; nothing is run."""
    program, *rest = words
    if program == "coalign":
        yield from _check_own(rest)
    elif program == "make" and rest:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"no target {target}" for target in rest if target not in targets)
    elif program == "python" and rest[:1] == ["-m"]:
        if rest[1].startswith(("examples", "tests", "coalign", "benchmarks")) and find_spec(rest[1]) is None:
            yield f"no module {rest[1]}"
    elif program == "python" and rest and not (ROOT / rest[0]).exists() and "/" in rest[0]:
        yield f"no file {rest[0]}"


def _check_own(words: list[str]) -> Iterator[str]:
    command: TyperCommand | TyperGroup = _command_line()
    name = "coalign"
    while isinstance(command, TyperGroup) and words and not words[0].startswith("--"):
        name, *words = words
        known = command.get_command(None, name)
        if known is None:
            yield f"no command {name}"
            return
        command = known
    if isinstance(command, TyperGroup):
        return  # `coalign --help`, `coalign --install-completion`
    try:
        context = command.make_context(name, list(words))
    except typer.Exit:
        return
    except Exception as error:  # click's, which typer brings along under a private name
        yield str(error)
        return
    overrides = list(context.params.get("overrides") or [])
    if name in TAKE_SETTINGS and name not in ("pipeline", "sweep") and overrides:
        example = ROOT / str(context.params.get("config"))
        if example.is_file():
            yield from _list_problems(lambda: load(example, overrides, defaults=_find_defaults, planned=True))
        else:
            yield from check_run({}, overrides)


def test_rows_on_the_pages_are_json():
    for block in list_blocks("jsonl"):
        for line in block.text.splitlines():
            assert isinstance(json.loads(line), dict), f"{block}: {line}"


def test_python_on_the_pages_compiles_and_its_imports_exist():
    problems = [f"{block}: {problem}" for block in list_blocks("python", unmarked=False) for problem in _check(block)]
    assert problems == []


def _check(block: CodeBlock) -> Iterator[str]:
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        if block.mark != "not run":
            yield f"line {error.lineno}: {error.msg}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("coalign", "examples"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name) and find_spec(f"{node.module}.{alias.name}") is None:
                    yield f"{node.module} has no {alias.name}"


@pytest.mark.parametrize(
    "path", [path for path in list_pages() if any(b.language == "python" for b in read_page(path).blocks)]
)
def test_python_on_a_page_runs(path, tmp_path, monkeypatch):
    """The blocks of a page that have no mark run in their order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block in read_page(path).blocks:
        if block.language == "python" and not block.mark:
            exec(compile(block.text, str(block), "exec", dont_inherit=True), names)  # of our own making
