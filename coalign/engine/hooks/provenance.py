"""Records the inputs of a run in each checkpoint: settings, source files of functions, contents of models and data.

When a run resumes, what has changed is listed in the log as old → new. Settings that results depend on, and models with
other contents, are refused unless `runtime.allow_changed` names them; training data are compared by their loader
(coalign.data.order).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.config.errors import Key, format_key
from coalign.config.introspect import find_input, has_default, is_continuable, list_relevant_settings
from coalign.config.secrets import hide_secrets
from coalign.engine.engine import Hook
from coalign.files import hash_file, hash_samples
from coalign.hub import find_directory

if TYPE_CHECKING:
    from coalign.config.schema import RunConfig

log = logging.getLogger(__name__)


class Provenance(Hook):
    """Keeps the run's current inputs, and compares a checkpoint's inputs with them."""

    def __init__(self, config: RunConfig, held_out: Mapping[str, Any] | None = None) -> None:
        """Read the models' directories. ``held_out`` is the state of the evaluation data's loader."""
        self.allowed = config.runtime.allow_changed
        self.output = config.output
        self.fixed: set[str] = set()  # settings that may not change when a run is resumed
        self.defaults: set[str] = set()  # settings that have the schema's value
        self.settings: dict[str, Any] = {}
        self.models: dict[str, str] = {}
        hashes: dict[str, str] = {}
        for key, value in list_relevant_settings(config):
            name = format_key(key)
            self.settings[name] = value
            if not is_continuable(key, type(config)):
                self.fixed.add(name)
            if has_default(key, value, type(config)):
                self.defaults.add(name)
            self.settings |= fingerprint_source(key, value)
            mark = find_input(key, type(config))
            if value is not None and mark is not None and mark.content == "model":
                if value not in hashes:
                    hashes[value] = hash_model(find_directory(value))
                self.models[name] = hashes[value]
        for index, source in enumerate(held_out["sources"] if held_out else ()):
            self.settings[f"data.eval[{index}] (contents)"] = source["hash"]
        self.settings = hide_secrets(self.settings)

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "models": self.models, "fixed": sorted(self.fixed)}

    def compare(self, state: Mapping[str, Any] | None) -> None:
        """Compare with a checkpoint's record (`state_dict`), if it has one.

        ValueError for settings or contents of models that have changed and may not. What else has changed is logged.
        """
        if state is None:
            log.warning("the checkpoint has no record of settings and models, so they are not compared")
            return
        earlier, now = state["settings"], self.settings
        changed = {
            name: f"{name}: {_shorten(earlier, name)} → {_shorten(now, name)}"
            for name in sorted({*earlier, *now} - (self.defaults - earlier.keys()))  # a newer version's settings
            if name not in earlier or name not in now or earlier[name] != now[name]
        }
        fixed = {*self.fixed, *state.get("fixed", ())}
        refused = [text for name, text in changed.items() if name in fixed]
        if refused and "settings" not in self.allowed:
            raise ValueError(
                f"{self.output} holds a run with other settings:\n  " + "\n  ".join(refused) + "\n"
                "Train elsewhere with `output=…`, start anew here with `runtime.resume=never` (the old run is moved "
                "aside), or go on with the new settings: `runtime.allow_changed=settings`"
            )
        if changed:
            log.warning("settings that differ from the checkpoint's:\n  %s", "\n  ".join(changed.values()))
        replaced = [name for name, value in self.models.items() if state["models"].get(name, value) != value]
        if not replaced:
            return
        named = ", ".join(f"{name} ({now[name]})" for name in replaced)
        if "models" not in self.allowed:
            raise ValueError(
                f"the checkpoint was made with other contents of {named}; restore them, or allow it with "
                "`runtime.allow_changed: [models]`"
            )
        log.warning("models with other contents than the checkpoint was made with: %s", named)


def hash_model(directory: Path) -> str:
    """Return a hash of a model directory: names and contents of its files; large ones are sampled (`hash_samples`).

    Hidden files, texts for readers (.md) and subfolders do not count.
    """
    files = sorted(file for file in directory.iterdir() if file.is_file())
    counted = [file for file in files if file.suffix != ".md" and not file.name.startswith(".")]
    return hashlib.sha256(json.dumps([(file.name, hash_samples(file)) for file in counted]).encode()).hexdigest()


def fingerprint_source(key: Key, value: Any) -> dict[str, str]:
    """Return {`KEY (source)`: hash of the source file} where ``value`` names a user's own function, `my.pkg:fn`.

    What that file imports does not count. A function without a file has the hash "".
    """
    if not (isinstance(value, str) and ":" in value and key[-1] in ("fn", "algorithm", "module")):
        return {}
    module = value.partition(":")[0]
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
    else:
        spec = importlib.util.find_spec(module)
        file = spec and spec.origin
    return {f"{format_key(key)} (source)": hash_file(Path(file))[:32] if file and Path(file).is_file() else ""}


def _shorten(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "not set"
    text = json.dumps(settings[name], ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}…"
