"""What errors say of keys and files of other frameworks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from coalign.config.errors import Key
from coalign_migrate.keys.foreign_keys import load_keys

_MOST = 3  # keys of a section that a message translates

_TITLES = {"verl": "verl", "openrlhf": "OpenRLHF", "slime": "slime", "chatlearn": "ChatLearn", "trl": "TRL"}
_TITLES |= {"llama_factory": "LLaMA-Factory", "swift": "ms-swift", "axolotl": "Axolotl"}
_SCRIPTS = {  # what a script says that starts the framework's program
    "verl": r"-m\s+(?:verl|recipe)\.|actor_rollout_ref\.",
    "openrlhf": r"openrlhf\.cli",
    "slime": r"--hf-checkpoint",
    "chatlearn": r"chatlearn",
    "llama_factory": r"llamafactory-cli",
    "axolotl": r"axolotl(?:\.cli)?[. ]",
    "swift": r"(?:swift|megatron)[ /](?:cli/)?(?:sft|rlhf|pt)\b",
    "trl": r"\btrl (?:sft|dpo|kto|reward|grpo|rloo)\b|(?:from|import) trl\b|accelerate launch",
}


def find_framework(data: Any) -> str | None:
    """Return the framework whose configuration a YAML's mapping is, such as `verl`; None for other files."""
    if not isinstance(data, Mapping):
        return None
    names = {str(name) for name in data}
    sections = [data[name] for name in ("runtime_args", "runtime", "rlhf") if isinstance(data.get(name), Mapping)]
    if "models" in names and any({"num_episode", "sample_per_episode"} & set(section) for section in sections):
        return "chatlearn"
    rows = data.get("data")
    if "actor_rollout_ref" in names or (isinstance(rows, Mapping) and "train_files" in rows):
        return "verl"
    if "base_model" in names:
        return "axolotl"
    if names & {"stage", "finetuning_type"} or {"model_name_or_path", "template"} <= names:
        return "llama_factory"
    if "model_name_or_path" in names:
        return "trl"
    return "swift" if "model" in names and "dataset" in names else None


def name_command(file: Any, data: Any, text: str = "") -> str | None:
    """Say whose a file is, and which command translates it; None for one of ours, and for one of nobody's.

    ``data`` is what a YAML holds, ``text`` that of a script.
    """
    framework = find_framework(data)
    if framework is None:
        framework = next((name for name, pattern in _SCRIPTS.items() if re.search(pattern, text)), None)
    if framework is None:
        return None
    what = "script" if text else "configuration"
    return f"is a {what} of {_TITLES[framework]}; `coalign import-config {file} > run.yaml` translates it"


def is_path_of_verl(key: Key, value: Any) -> bool:
    """Whether ``key``, or one of those below it, is exactly a key that verl has; such a path is no slip of the pen."""
    path = ".".join(map(str, key))
    return any("." in name and load_keys("verl").describe(name) is not None for name in _list_paths(path, value))


def translate_key(key: Key, value: Any) -> str | None:
    """Say what a key of TRL or verl, or the keys below it, are called here, as the end of a sentence; else None."""
    path = ".".join(map(str, key))
    if ours := load_keys("verl").describe(path):
        paths = [name for name in _list_paths(path, value) if name != path]
        below = [f"{name} is {said}" for name in paths if (said := load_keys("verl").describe(name))]
        return f"is verl's; here {', '.join(below[:_MOST]) or f'it is {ours}'}"
    if key and (ours := load_keys("trl").describe(str(key[-1]))):
        return f"is TRL's; here it is {ours}"
    return None


def _list_paths(path: str, value: Any) -> Iterator[str]:
    """Yield the paths of all values at ``path`` and below that hold no further keys."""
    if not isinstance(value, dict):
        yield path
        return
    for name, item in value.items():
        yield from _list_paths(f"{path}.{name}", item)
