"""What became of each key of another framework's configuration, and the run's settings that came of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coalign.hub import is_hub_name
from coalign.hub_data import FILE
from coalign_migrate.keys.foreign_keys import POLICY, TRAINER, ForeignKeys
from coalign_migrate.shell.marks import is_known, show

_INPUT = re.compile(r"\.load\b|^data\.(train|eval)\b")  # what a person has to fill in
_SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
_SCHEDULES |= {name: name for name in ("constant", "linear", "cosine")}
_TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")


class ForeignTranslation:
    """The settings of a run, made from those of another framework; every key that was not read is listed at the end.

    ``run`` maps our dotted keys to values. ``given`` are theirs, by the names of the table. A value that is not known,
    such as a shell's `$MODEL`, is a mark to fill in where it is a model, data or a plain setting.
    """

    def __init__(self, keys: ForeignKeys, values: Mapping[str, Any], *, main: str) -> None:
        """``main`` is the model that a name without a model belongs to, such as `policy`."""
        self.keys, self.main = keys, main
        self.given: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.run: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.notes: list[str] = []
        self._read: set[str] = set()
        self.names: dict[str, str] = {}  # key in the table -> key in the file
        for name, value in values.items():
            if value is not None:
                self._take(name, value)

    def _take(self, name: str, value: Any) -> None:
        key = self.keys.find_name(name)
        self.names[key] = name
        if (
            all(map(is_known, _list_texts(value)))
            or self.keys.find_reason(key)
            or not (description := self.keys.describe(key))
        ):
            self.given[key] = _show_texts(value)
        elif _INPUT.search(description):
            self.given[key] = _mark_inputs(value)
        else:
            self.unknown[key] = show(str(value))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of theirs, or their default, or ``default``; the key counts as read.

        ValueError for a value that is not known: other settings depend on it.
        """
        self._read.add(key)
        if key in self.unknown:
            raise ValueError(
                f"{self.names[key]} is {self.unknown[key]}, which is not known here, and other settings depend on it: "
                "write its value, or set the variable in the environment of this command"
            )
        return self.given.get(key, self.keys.defaults.get(key, default))

    def get_text(self, key: str) -> str | None:
        """Return a value that is a name of something, as a text; None for one that is not known."""
        value = None if key in self.unknown else self.get(key)
        return None if value is None else str(value)

    def has(self, *names: str) -> bool:
        """Whether the file itself sets one of these keys."""
        return any(key in self.given for key in names)

    def set(self, ours: str, value: Any) -> None:
        """Set a key of the run; None sets nothing."""
        if value is not None:
            self.run[ours] = value

    def set_discounts(self, algorithm: str, gamma: float, lam: float) -> None:
        """Set the discounts that the advantage of a recipe has."""
        if algorithm in ("ppo", "reinforce_pp"):
            self.set("advantage.gamma", gamma)
        if algorithm == "ppo":
            self.set("advantage.lam", lam)

    def refuse(self, key: str, reason: str) -> None:
        """List a key as not translated, for a reason, if the file has it."""
        self._read.add(key)
        if key in self.given:
            self.refused[key] = reason

    def skip(self, pattern: str, reason: str) -> None:
        """List keys as not needed, for a reason, if the file has them."""
        for key in fnmatch.filter(list(self.given), pattern):
            if key not in self._read:
                self.skipped[key] = reason

    def hide(self, key: str) -> None:
        """Count a key as read, without its value, which may be a secret."""
        self._read.add(key)
        self.unknown.pop(key, None)

    def copy_same(self) -> None:
        """Set every key that has one counterpart, with its value converted."""
        for key, ours in self.keys.same.items():
            names = ours.replace("NAME", self.main).split()
            if key in self.unknown:
                for name in names if names not in (["output"], ["runtime.trackers"]) else ():
                    self.set(name, f"<{self.unknown[key]}>")
                continue
            value = self.get(key)
            if value is None:
                continue
            if self.main == "trainer" and all(name.startswith(f"{POLICY}.") for name in names):
                self.refuse(key, "the run samples nothing")
                continue
            try:
                for name in names:
                    self.set(name, convert_value(name, value))
            except (ValueError, TypeError) as error:
                reason = str(error) if isinstance(error, ValueError) else f"{', '.join(names)} takes other values"
                self.refuse(key, reason)

    def convert_warmup(self, key: str, named: str | None = None) -> None:
        """Set the warm-up from a share of the run, if the file says how many steps that has."""
        share, steps = float(self.get(key, 0.0)), self.run.get("runtime.steps")
        if share and isinstance(steps, int):
            self.set(f"{TRAINER}.optimizer.warmup", round(share * steps))
        elif share:
            self.refuse(named or key, f"{share:g} of the run; set models.trainer.optimizer.warmup in steps")

    def list_unneeded(self) -> Iterator[tuple[str, Any, str]]:
        """Yield keys of the file that have no counterpart because none is needed: key, value, reason."""
        for key, value in self.given.items():
            reason = self.skipped.get(key) or self.keys.find_reason(key)
            if reason and key not in self._read:
                yield self.names[key], value, reason

    def list_untranslated(self) -> Iterator[tuple[str, Any, str]]:
        """Yield keys of the file that nothing here takes: key, value, and the reason, if one is known."""
        for key, value in self.given.items():
            if key in self.refused:
                yield self.names[key], value, self.refused[key]
            elif key not in self._read and key not in self.skipped and not self.keys.find_reason(key):
                yield self.names[key], value, ""

    def list_unknown(self) -> Iterator[tuple[str, str]]:
        """Yield the keys whose values are to be filled in: those of the run, then those that set nothing."""
        for ours, value in self.run.items():
            for text in _list_texts(value):
                if text.startswith("<") and text.endswith(">"):
                    yield ours, text
        for key, text in self.unknown.items():
            yield self.names[key], text


def _list_texts(value: Any) -> list[str]:
    """Return all texts in a value."""
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _list_texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _list_texts(item)]
    return [value] if isinstance(value, str) else []


def _show_texts(value: Any) -> Any:
    """Return a value without the marks in its texts."""
    if isinstance(value, dict):
        return {key: _show_texts(item) for key, item in value.items()}
    return (
        [_show_texts(item) for item in value]
        if isinstance(value, list)
        else show(value)
        if isinstance(value, str)
        else value
    )


def _mark_inputs(value: Any) -> Any:
    """Return a path or paths; one that is not known becomes a mark to fill in."""
    if isinstance(value, list):
        return [_mark_inputs(item) for item in value]
    return value if is_known(value) else f"<{re.sub(r'[{}]', '', show(value))}>"


def convert_value(ours: str, value: Any) -> Any:
    """Convert a value of theirs to one of our key; None if it sets nothing here. ValueError without a counterpart."""
    for pattern, convert in _CONVERSIONS.items():
        if re.fullmatch(pattern, ours):
            return convert(value)
    return value


def name_data(text: Any, split: str | None = None, config: str | None = None) -> str:
    """Return the name here of a data file or of a dataset of the hub."""
    name = str(text).removeprefix("file://")
    if name.startswith("<"):
        return name
    if not is_hub_name(name) or FILE.search(name):
        return name
    return ":".join([name, *([config] if config else []), *([split] if split else [])])


def list_values(value: Any) -> list[Any]:
    """Return a list: the items of a list, what commas separate in a text, or any other value alone."""
    if isinstance(value, list | tuple):
        return list(value)
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else [value]


def count_updates(translation: ForeignTranslation, batch: float, update: float, key: str) -> int:
    """Return how many optimizer steps a batch makes, rounded, with a note where theirs leave a rest."""
    updates = max(1, round(batch / update))
    if updates * update != batch:
        translation.notes.append(
            f"models.trainer.updates_per_batch is {updates}: a batch of {batch:g} is cut into equal parts, and {key} "
            f"is {update:g}"
        )
    return updates


def _convert_schedule(value: str) -> str:
    if value not in _SCHEDULES:
        raise ValueError(f"schedules are {', '.join(sorted(set(_SCHEDULES.values())))} and wsd")
    return _SCHEDULES[value]


def _convert_trackers(value: Any) -> list[str]:
    names = [name for name in list_values(value) if name not in ("console", "none")]
    if unknown := [name for name in names if name not in _TRACKERS]:
        raise ValueError(f"no tracker {', '.join(map(str, unknown))}; there are {', '.join(_TRACKERS)}")
    return names


def _convert_module(value: str) -> str:
    modules = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
    if value not in modules:
        raise ValueError("trainers are fsdp, deepspeed and megatron")
    return modules[value]


def _convert_engine(value: str) -> str:
    engines = {"vllm": "vllm", "hf": "transformers"}
    if value not in engines:
        raise ValueError("engines are native, vllm and transformers; the run takes native")
    return engines[value]


def _convert_resume(value: str) -> str:
    modes = {"auto": "auto", "disable": "never"}
    if value not in modes:
        raise ValueError("runtime.resume is auto, never, or a checkpoint of Coalign's")
    return modes[value]


def _set_positive(value: Any) -> Any:
    """Their -1 or 0 for "not set"."""
    return value if value > 0 else None


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    r"models\.trainer\.optimizer\.schedule": _convert_schedule,
    r"models\.trainer\.optimizer\.betas": lambda value: [float(beta) for beta in list_values(value)],
    r"models\.trainer\.optimizer\.warmup": _set_positive,
    r"models\.trainer\.activation_checkpointing": lambda value: "full" if value else None,
    r".*\.compute_dtype": lambda value: "bfloat16" if value in (True, "bf16", "bfloat16") else None,
    r"models\.trainer\.module": _convert_module,
    r"models\.policy\.module": _convert_engine,
    r".*\.top_k": lambda value: max(0, value),
    r"runtime\.(save_every|eval_every|eval_prompts|keep|steps|eval_sampling\.top_p)": _set_positive,
    r"runtime\.epochs": lambda value: max(1, round(value)),
    r"runtime\.trackers": _convert_trackers,
    r"runtime\.resume": _convert_resume,
    r"data\.(train|eval)": lambda value: [name_data(name) for name in list_values(value)],
}


def set_adapter(translation: ForeignTranslation, rank: str, alpha: str, dropout: str, target: str) -> None:
    """Set `models.trainer.lora` from the keys of theirs with these names, if there is a rank."""
    if not translation.get(rank):
        for key in (alpha, dropout, target):
            translation.get(key)  # without an adapter they mean nothing
        return
    section = f"{TRAINER}.lora"
    translation.set(f"{section}.rank", translation.get(rank))
    translation.set(f"{section}.alpha", float(translation.get(alpha, 16)))
    if dropped := translation.get(dropout):
        translation.set(f"{section}.dropout", float(dropped))
    target_value = translation.get(target)
    if isinstance(target_value, str) and re.search(r"[()\[\]|\\+^$]", target_value):
        return translation.refuse(target, "patterns are those of files here (`*.q_proj`); the run takes all-linear")
    if target_value and target_value != "all-linear":
        translation.set(
            f"{section}.target", [name if "*" in name else f"*.{name}" for name in list_values(target_value)]
        )


def set_trackers(translation: ForeignTranslation, project: str, run: str) -> None:
    """Give the trackers of the run the project and the name of theirs."""
    names = {"project": translation.get_text(project), "run": translation.get_text(run)}
    names = {name: value for name, value in names.items() if value is not None}
    trackers = translation.run.get("runtime.trackers")
    if names and trackers:
        translation.run["runtime.trackers"] = [
            {"name": name, **names} if name != "tensorboard" else name for name in trackers
        ]


def set_reference(translation: ForeignTranslation) -> None:
    """Store the reference in bfloat16, as it multiplies, where the run has one."""
    charged = translation.run.get("loss.kl_coef") or translation.run.get("kl.coef")
    if charged and translation.run.get(f"{POLICY}.compute_dtype") == "bfloat16":
        translation.set("models.reference.dtype", "bfloat16")


def set_policy_parallel(translation: ForeignTranslation) -> None:
    """Keep the trainer from inheriting how the policy is cut over devices, and options of vLLM from other engines."""
    for degree in ("tensor_parallel", "pipeline_parallel"):
        if translation.run.get(f"{POLICY}.{degree}", 1) != 1:
            translation.run.setdefault(f"{TRAINER}.{degree}", 1)
    if translation.run.get(f"{POLICY}.module") != "vllm":
        for key in [key for key in translation.run if key.startswith(f"{POLICY}.vllm.")]:
            del translation.run[key]
