"""Reads what recipes, backends and losses declare, from their sources and without importing them.

A launcher has to know the defaults of a recipe, whether a backend forms groups, and whether a loss reads a reference.
Importing any of them imports torch, which takes longer than everything else that rendering a job does.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coalign
from coalign.config.functions import list_classes, resolve_class

PACKAGE = Path(coalign.__file__).parent
READ = ("defaults", "spmd", "sync")  # assigned literals, or what literals and other classes' attributes make


def read_defaults(algorithm: str) -> Mapping[str, Any]:
    """Return the defaults of a recipe; one of somebody's own (`my.pkg:Recipe`) is imported.

    ValueError, as `coalign train` has it, for a recipe that does not exist.
    """
    return _read_attribute(algorithm, "coalign.recipes", "defaults") or {}


def syncs_weights(algorithm: str) -> bool:
    """Return whether a recipe sends the weights that it trains to a model that samples (`Engine.sync`)."""
    return bool(_read_attribute(algorithm, "coalign.recipes", "sync"))


def forms_group(module: str) -> bool:
    """Return whether the processes of a model with this backend form one group (`Module.spmd`)."""
    return bool(_read_attribute(module, "coalign.backends", "spmd"))


def reads_reference(loss: str, arguments: Mapping[str, Any]) -> bool | None:
    """Return whether a loss reads the reference's log-probs with these arguments; None for one that is not here."""
    if loss not in _list_losses():
        return None
    if loss in _list_policy_losses():
        return bool(arguments.get("kl_coef"))
    return loss in _list_losses_with_reference()


@cache
def _list_losses() -> set[str]:
    """List the functions of the modules of losses."""
    modules = [_parse(f"coalign.algorithms.losses.{name}") for name in ("policy", "preference", "supervised")]
    return {node.name for module in modules for node in module.body if isinstance(node, ast.FunctionDef)}


@cache
def _list_policy_losses() -> set[str]:
    """The losses that are policy losses: with a KL term that is left out at `kl_coef: 0`, the default."""
    functions = [node for node in _parse("coalign.algorithms.losses.policy").body if isinstance(node, ast.FunctionDef)]
    marked = {node.name: [ast.unparse(each) for each in node.decorator_list] for node in functions}
    return {name for name, decorators in marked.items() if "policy_loss" in decorators}


@cache
def _list_losses_with_reference() -> set[str]:
    """The losses of preferences that compare with the reference: named in a loop that says so for each."""
    loops = [node for node in _parse("coalign.algorithms.losses.preference").body if isinstance(node, ast.For)]
    found = [loop.iter for loop in loops if any("'ref'" in ast.unparse(line) for line in loop.body)]
    return {each.id for names in found for each in ast.walk(names) if isinstance(each, ast.Name)}


def _parse(module: str) -> ast.Module:
    file = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _read_attribute(name: str, home: str, attribute: str) -> Any:
    classes = list_classes(home)
    if name not in classes:
        return getattr(resolve_class(name, home), attribute, None)
    module, _, cls = classes[name].partition(":")
    return getattr(_read_class(module, cls), attribute, None)


@cache
def _read_class(module: str, name: str) -> SimpleNamespace:
    """Read the attributes ``READ`` of a class, its bases' included; they may refer to those of other classes."""
    tree = _parse(module)
    imported = {
        each.asname or each.name: (str(node.module), each.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    own = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in own:
        return SimpleNamespace()

    def find(used: ast.AST) -> dict[str, SimpleNamespace]:
        names = [each.id for each in ast.walk(used) if isinstance(each, ast.Name)]
        places = {each: imported.get(each, (module, each)) for each in names if each in own or each in imported}
        return {each: _read_class(*place) for each, place in places.items() if place[0].startswith("coalign.")}

    values: dict[str, Any] = {}
    for base in reversed(own[name].bases):
        for found in find(base).values():
            values |= vars(found)
    for line in own[name].body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and target.id in READ and isinstance(value, ast.expr):
            code = compile(ast.Expression(value), module, "eval")
            values[target.id] = eval(code, {"__builtins__": {}}, find(value))
    return SimpleNamespace(**values)
