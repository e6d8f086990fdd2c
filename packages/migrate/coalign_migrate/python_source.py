"""Reads a Python script of TRL without running it: the literals of `XConfig(…)`, `XTrainer(…)` and what they name."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coalign_migrate.shell.marks import is_known, mark

TRAINER_CLASSES = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward",
    "PRMTrainer": "prm",
    "GRPOTrainer": "grpo",
    "RLOOTrainer": "rloo",
    "PPOTrainer": "ppo",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo",
    "OnlineDPOTrainer": "online_dpo",
}
_POSITIONAL = {  # arguments of trainers whose order is not that of SFT
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "rloo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "dpo": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "kto": ("model", "ref_model", "args", "train_dataset", "eval_dataset"),
    "ppo": ("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
    "online_dpo": ("model", "ref_model", "reward_funcs", "judge", "args", "data_collator", "train_dataset"),
}
_NOT_NEEDED = ("processing_class", "tokenizer", "callbacks", "optimizers", "reward_processing_classes")
_ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_ADAPTER |= {"target_modules": "lora_target_modules", "use_rslora": "use_rslora", "use_dora": "use_dora"}
_ADAPTER_UNNEEDED = (
    "task_type",
    "bias",
    "inference_mode",
    "random_state",
    "use_gradient_checkpointing",
    "loftq_config",
)
_FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow")
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def read_python(text: str, path: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return TRL's trainer, its arguments by TRL's names, and notes. ValueError if the file calls no trainer of TRL."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no Python: {error}") from error
    return _PythonReader(tree, path).read()


class _PythonReader:
    """Follows names to what they were assigned, within one file."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.tree, self.path = tree, path
        self.notes: list[str] = []
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        self.assigned: dict[str, list[ast.expr]] = {}
        self._options: dict[str, ast.expr] | None = None
        self.changed: dict[str, dict[str, ast.expr]] = {}  # attributes that are set later: `config.max_steps = 5`
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                        self.changed.setdefault(target.value.id, {})[target.attr] = node.value
            for target, value in _list_assignments(node):
                self.assigned.setdefault(target, []).append(value)

    def read(self) -> tuple[str, dict[str, Any], list[str]]:
        calls = [(self._find_trainer(node), node) for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        trainers = sorted(((name, node) for name, node in calls if name), key=lambda pair: pair[1].lineno)
        if not trainers:
            called = sorted({name for _, node in calls if re.fullmatch(r"\w*Trainer", name := _name(node.func))})
            supported = ", ".join(TRAINER_CLASSES)
            raise ValueError(f"{self.path}: calls {', '.join(called) or 'no trainer'}; of TRL's are read: {supported}")
        if len(trainers) > 1:
            self.notes.append(f"{self.path.name} has {len(trainers)} trainers; this is the first")
        name, call = trainers[0]
        arguments = self._bind(call, _POSITIONAL.get(name, ("model", "args", "data_collator", "train_dataset")))
        values = self._read_config(arguments.pop("args", None) or arguments.pop("config", None))
        for key, node in arguments.items():
            values |= self._read_argument(key, node, values)
        return name, values, self.notes

    def _find_trainer(self, call: ast.Call) -> str | None:
        """Return the trainer that a call makes, also by a class of the file that inherits from one of TRL's."""
        name = _name(call.func)
        for base in (name, *(_name(base) for base in getattr(self.classes.get(name), "bases", ()))):
            if base in TRAINER_CLASSES:
                if base != name:
                    self.notes.append(f"{name} is a class of {self.path.name}: what it changes is not translated")
                return TRAINER_CLASSES[base]
        return None

    def _bind(self, call: ast.Call, names: tuple[str, ...]) -> dict[str, ast.expr]:
        """Return the arguments of a call by their names; those of `**{…}` too."""
        bound = dict(zip(names, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg:
                bound[keyword.arg] = keyword.value
                continue
            spread = self._follow(keyword.value)
            if isinstance(spread, ast.Dict):
                bound |= {
                    str(self.evaluate(key)): value for key, value in zip(spread.keys, spread.values, strict=True) if key
                }
            elif isinstance(spread, ast.Call) and _name(spread.func) == "dict":
                bound |= self._bind(spread, ())
            else:
                self.notes.append(f"line {keyword.value.lineno}: **{ast.unparse(keyword.value)} is not read")
        return bound

    def _read_config(self, node: ast.expr | None) -> dict[str, Any]:
        """Return the arguments of a configuration's call. ValueError where they come from the command line."""
        config = self._follow(node)
        if node is not None and not (
            isinstance(config, ast.Call) and re.search(r"(Config|Arguments)$", _name(config.func))
        ):
            raise ValueError(
                f"{self.path}:{node.lineno}: the settings `{ast.unparse(node)}` are no call such as GRPOConfig(…) in "
                "this file; where they come from its command line, give the script or the YAML that starts it"
            )
        arguments = self._bind(config, ("output_dir",)) if isinstance(config, ast.Call) else {}
        arguments |= self.changed.get(_name(node), {}) if node is not None else {}
        return {name: self.evaluate(value) for name, value in arguments.items()}

    def _read_argument(self, key: str, node: ast.expr, config: dict[str, Any]) -> dict[str, Any]:
        """Return what an argument of a trainer is by TRL's command-line names."""
        if key == "model":
            return self._read_model(node, config)
        if key in ("train_dataset", "eval_dataset"):
            return self._read_rows(key, node)
        if key == "peft_config":
            return self._read_adapter(node)
        if key == "reward_funcs":
            return {key: self._list_rewards(node)}
        if key in ("ref_model", "reward_model", "value_model"):
            value = self._follow(node)
            name = None if isinstance(value, ast.Constant) and value.value is None else self._find_weights(node)
            return {"reward_model_name_or_path" if key == "reward_model" else key: name}
        return {} if key in _NOT_NEEDED else {key: self.evaluate(node)}

    def _read_model(self, node: ast.expr, config: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {"model_name_or_path": self._find_weights(node)}
        for value in self._list_origins(node):
            for call in (inner for inner in ast.walk(value) if isinstance(inner, ast.Call)):
                if _name(call.func) == "get_peft_model":
                    adapters = [*call.args[1:], *(word.value for word in call.keywords if word.arg == "peft_config")]
                    values |= self._read_adapter(adapters[0] if adapters else call)
                for keyword in call.keywords:
                    if keyword.arg == "load_in_4bit" and self.evaluate(keyword.value) is True:
                        values["load_in_4bit"] = True
                    elif keyword.arg == "quantization_config":
                        quantized = self._follow(keyword.value)
                        four = {word.arg: word.value for word in getattr(quantized, "keywords", ())}.get("load_in_4bit")
                        values |= {"load_in_4bit": True} if four is not None and self.evaluate(four) is True else {}
        return values

    def _find_weights(self, node: ast.expr) -> str:
        """Return the model that an expression loads, as a text; its source between marks if that is not known."""
        value = self.evaluate(node)
        if isinstance(value, str) and is_known(value):
            return value
        for origin in reversed(self._list_origins(node)):
            for call in (inner for inner in ast.walk(origin) if isinstance(inner, ast.Call)):
                if _name(call.func) in ("from_pretrained", "from_config"):
                    names = self._bind(call, ("name",))
                    weights = names.get("name") or names.get("model_name") or names.get("pretrained_model_name_or_path")
                    if weights is not None:
                        return str(self.evaluate(weights))
        return mark(ast.unparse(node))

    def _read_adapter(self, node: ast.expr) -> dict[str, Any]:
        """Return the arguments of `LoraConfig(…)` by TRL's names, over peft's own defaults."""
        config = self._follow(node)
        if isinstance(config, ast.Constant) and config.value is None:
            return {}
        if not isinstance(config, ast.Call):
            return {"peft_config": mark(ast.unparse(node))}
        values: dict[str, Any] = {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
        for name, value in self._bind(config, ()).items():
            if name in _ADAPTER:
                values[_ADAPTER[name]] = self.evaluate(value)
            elif name not in _ADAPTER_UNNEEDED:
                values[f"peft_config.{name}"] = self.evaluate(value)
        return values

    def _list_rewards(self, node: ast.expr) -> list[Any]:
        """Return rewards: a function of the file as `file.py:name`, a name that is imported, or a model."""
        value = self._follow(node)
        items = value.elts if isinstance(value, ast.List | ast.Tuple) else [node]
        rewards: list[Any] = []
        for item in items:
            name = _name(item)
            if name in self.functions:
                rewards.append(f"{self.path.name}:{name}")
            elif isinstance(item, ast.Name) and name not in self.assigned:
                rewards.append(name)
            else:
                weights = self._find_weights(item)
                rewards.append(weights if is_known(weights) else ast.unparse(item))
        return rewards

    def _read_rows(self, key: str, node: ast.expr) -> dict[str, Any]:
        """Return the data that an expression loads, by TRL's command-line names or as a file."""
        split = "train" if key == "train_dataset" else "test"
        for origin in self._list_origins(node):
            for call in (inner for inner in ast.walk(origin) if isinstance(inner, ast.Call)):
                if _name(call.func) in ("map", "filter", "train_test_split", "select", "shuffle", "rename_column"):
                    self.notes.append(
                        f"line {call.lineno}: .{_name(call.func)}(…) changes the rows; the run reads them as they are, "
                        "so write what it makes to a file, or see docs/data.md"
                    )
        for origin in self._list_origins(node):
            for call in (inner for inner in ast.walk(origin) if isinstance(inner, ast.Call)):
                if _name(call.func) in ("load_dataset", "from_json", "from_csv", "from_parquet"):
                    return {key: self._name_rows(call, self._find_split(node) or split)}
        value = self.evaluate(node)
        return {} if value is None else {key: value if isinstance(value, str) else mark(ast.unparse(node))}

    def _find_split(self, node: ast.expr) -> str | None:
        """Return the split that a subscript takes: `dataset["train"]`."""
        for origin in self._list_origins(node):
            for inner in ast.walk(origin):
                if isinstance(inner, ast.Subscript) and isinstance(name := self.evaluate(inner.slice), str):
                    return name if is_known(name) else None
        return None

    def _name_rows(self, call: ast.Call, split: str) -> str:
        """Return the name of rows: a file, or `org/name:config:split`."""
        if _name(call.func) != "load_dataset":
            return str(self.evaluate(call.args[0])) if call.args else mark(ast.unparse(call))
        arguments = self._bind(call, ("path", "name"))
        values = {key: self.evaluate(value) for key, value in arguments.items()}
        path, files = str(values.get("path", "")), values.get("data_files")
        chosen = str(values.get("split") or split)
        if "[" in chosen:
            self.notes.append(
                f"line {call.lineno}: of the rows {chosen} is taken; the run reads all (data.train[].max_samples)"
            )
            chosen = chosen.partition("[")[0]
        if path in _FILE_FORMATS and files is not None:
            files = files.get(chosen, next(iter(files.values()))) if isinstance(files, dict) else files
            return str(files[0] if isinstance(files, list) else files)
        config = values.get("name")
        fields = [path, *([str(config)] if config else []), chosen]
        return ":".join(fields) if is_known(path) and not path.startswith((".", "/")) else path

    def _list_origins(self, node: ast.expr) -> list[ast.expr]:
        """Return an expression, and those that the names in it were assigned, functions of the file included."""
        origins, seen, waiting = [], set(), [node]
        while waiting and len(origins) < 100:
            current = waiting.pop(0)
            origins.append(current)
            for inner in ast.walk(current):
                name = inner.id if isinstance(inner, ast.Name) else ""
                if not name or name in seen:
                    continue
                seen.add(name)
                waiting += self.assigned.get(name, [])
                if name in self.functions:
                    body = self.functions[name].body
                    waiting += [
                        value for statement in body for item in ast.walk(statement) for value in _list_values(item)
                    ]
        return origins

    def _follow(self, node: ast.expr | None) -> ast.expr | None:
        """Return what a name was assigned, if that happens once; another expression as it is."""
        for _ in range(10):
            if not (isinstance(node, ast.Name) and len(self.assigned.get(node.id, ())) == 1):
                break
            node = self.assigned[node.id][0]
        return node

    def evaluate(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of a literal, of a name of one, or of arithmetic on them; else the source between marks."""
        try:
            return self._evaluate(node, depth)
        except (ValueError, TypeError, ZeroDivisionError, RecursionError, OverflowError, KeyError):
            return mark(ast.unparse(node))

    def _evaluate(self, node: ast.expr, depth: int) -> Any:
        if depth > 20:
            raise ValueError("names that refer to each other")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self._evaluate(item, depth + 1) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self._evaluate(key, depth + 1): self.evaluate(value, depth + 1) for key, value in pairs if key}
            case ast.Name(id=name):
                values = [self._evaluate(value, depth + 1) for value in self.assigned.get(name, [])]
                if not values or any(value != values[0] for value in values):
                    raise ValueError(f"{name} is not known")
                return values[0]
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in self._find_options():
                calls = [value.func for value in self.assigned.get(name, []) if isinstance(value, ast.Call)]
                if not any(_name(call).startswith("parse_args") for call in calls):
                    raise ValueError(f"{name} is not parsed in this file")
                self.notes.append(f"{name}.{attribute} is its default, {ast.unparse(self._find_options()[attribute])}")
                return self._evaluate(self._find_options()[attribute], depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self._evaluate(inner, depth + 1)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _compute(
                    _ARITHMETIC[type(op)], self._evaluate(left, depth + 1), self._evaluate(right, depth + 1)
                )
            case ast.JoinedStr(values=pieces):
                values = (piece.value if isinstance(piece, ast.FormattedValue) else piece for piece in pieces)
                return "".join(str(self._evaluate(value, depth + 1)) for value in values)
            case ast.Call():
                return self._evaluate_call(node, depth)
        raise ValueError(f"{ast.unparse(node)} is no literal")

    def _find_options(self) -> dict[str, ast.expr]:
        """Return the defaults of a command line's options: of argparse, and of dataclasses' fields."""
        if self._options is None:
            self._options = {}
            for node in ast.walk(self.tree):
                for name, default in _list_defaults(node):
                    self._options[name] = default
        return self._options

    def _evaluate_call(self, node: ast.Call, depth: int) -> Any:
        """Return the value of a call that only reads: `os.getenv(…)`, `os.path.join(…)`, `int(…)` and the like."""
        name, values = ast.unparse(node.func), [self._evaluate(value, depth + 1) for value in node.args]
        if name in ("os.environ.get", "os.getenv"):
            value = os.environ.get(values[0], values[1] if len(values) > 1 else None)
            if value is None:
                raise ValueError(f"{values[0]} is not set")
            return value
        if name == "os.path.join":
            return os.path.join(*values)
        if name in ("str", "int", "float", "Path", "list", "tuple", "dict") and len(values) == 1:
            return {"int": int, "float": float, "str": str, "Path": str}.get(name, lambda value: value)(values[0])
        raise ValueError(f"{name} is not called here")


def _compute(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Compute with numbers, or join texts. ValueError for others, and for large results."""
    numbers = all(isinstance(value, int | float) and abs(value) < 2**64 for value in (left, right))
    texts = function is operator.add and all(isinstance(value, str | list) for value in (left, right))
    if not numbers and not texts:
        raise ValueError("no numbers")
    return function(left, right)


def _name(node: ast.AST) -> str:
    """Return the last name of an expression: `GRPOTrainer` of `trl.GRPOTrainer`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _list_assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement assigns, each with the value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for index, name in enumerate(names):
                if isinstance(name, ast.Name):
                    is_pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                    yield name.id, values[index] if is_pair and index < len(values) else node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value


def _list_defaults(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield an option's name and default: of `add_argument("--name", default=…)`, and of a dataclass's fields."""
    if isinstance(node, ast.Call) and _name(node.func) == "add_argument":
        names = [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
        defaults = [word.value for word in node.keywords if word.arg == "default"]
        long = [name for name in names if name.startswith("--")]
        if long and defaults:
            yield long[0].removeprefix("--").replace("-", "_"), defaults[0]
    elif isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value:
                call = field.value
                words = call.keywords if isinstance(call, ast.Call) and _name(call.func) == "field" else None
                default = next((word.value for word in words or () if word.arg == "default"), None)
                if words is None or default is not None:
                    yield field.target.id, call if words is None or default is None else default


def _list_values(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expression of a statement that assigns or returns one."""
    value = getattr(node, "value", None)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr) and isinstance(value, ast.expr):
        yield value
