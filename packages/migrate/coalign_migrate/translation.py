"""What became of each key of another framework's configuration, and the run's settings that came of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from coalign.hub import is_hub_name
from coalign.hub_data import FILE
from coalign_migrate.keys.foreign_keys import POLICY, TRAINER, ForeignKeys
from coalign_migrate.shell.marks import is_known, show

KL_IN_REWARD = ("ppo", "rloo", "reinforce_pp", "remax")
_CLIPPED = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "clip_cov")
_CLIPPED += ("on_policy_distillation",)
_TAKEN_BY = {  # patterns of settings that some recipes alone have
    r"loss\.clip_low": (*_CLIPPED, "gspo", "gmpo"),
    r"loss\.clip_high": (*_CLIPPED, "gspo", "gmpo", "cispo"),
    r"loss\.dual_clip": _CLIPPED,
    r"loss\.tau_": ("sapo",),
    r"advantage\.gamma": ("ppo", "reinforce_pp"),
    r"advantage\.lam": ("ppo",),
    r"models\.value\.|models\.trainer\.learns_after": ("ppo",),
}
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_KL_ESTIMATORS |= {"k1+": "k1", "k2+": "k2", "k3+": "k3", "low_var_kl+": "k3"}
_INPUT = re.compile(r"\.load\b|^data\.(train|eval)\b")  # what a person has to fill in
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

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a value of theirs as a float; None where neither the file nor the framework has one."""
        value = self.get(key, default)
        return None if value is None else float(value)

    def has(self, *names: str) -> bool:
        """Whether the file itself sets one of these keys."""
        return any(key in self.given for key in names)

    def set(self, ours: str, value: Any) -> None:
        """Set a key of the run; None sets nothing."""
        if value is not None:
            self.run[ours] = value

    def presume(self, **values: Any) -> None:
        """Give keys that the file does not set these values."""
        for key, value in values.items():
            self.given.setdefault(key, value)

    def drop(self, *prefixes: str) -> None:
        """Take settings out of the run, by how their keys begin."""
        self.run = {key: value for key, value in self.run.items() if not key.startswith(prefixes)}

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

    def restrict(self, algorithm: str) -> None:
        """Take out what the loss, the advantage or the models of a recipe do not have."""
        for key, ours in self.keys.same.items():
            names = ours.split()
            missing = [name for name in names if algorithm not in _list_recipes(name, algorithm)]
            for name in missing:
                self.run.pop(name, None)
            if missing == names and key in self.given:
                listed = self.refused if names[0].startswith("loss.") else self.skipped
                listed[key] = f"`{algorithm}` has no {'value model' if names[0].startswith('models.') else names[0]}"

    def list_unneeded(self) -> Iterator[tuple[str, Any, str]]:
        """Yield keys of the file that have no counterpart because none is needed: key, value, reason."""
        for key, value in self.given.items():
            reason = self.skipped.get(key) or (None if key in self._read else self.keys.find_reason(key))
            if reason:
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


def _list_recipes(name: str, algorithm: str) -> tuple[str, ...]:
    """Return the recipes that have a setting; ``algorithm`` is among them where all have it."""
    return next((recipes for pattern, recipes in _TAKEN_BY.items() if re.match(pattern, name)), (algorithm,))


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
    if isinstance(value, list):
        return [_show_texts(item) for item in value]
    return show(value) if isinstance(value, str) else value


def _mark_inputs(value: Any) -> Any:
    """Return a path or paths; one that is not known becomes a mark to fill in."""
    if isinstance(value, list):
        return [_mark_inputs(item) for item in value]
    return value if is_known(value) else f"<{re.sub(r'[{}]', '', show(value))}>"


def _convert_trackers(value: Any) -> list[str]:
    names = [name for name in list_values(value) if name not in ("console", "none")]
    if unknown := [name for name in names if name not in _TRACKERS]:
        raise ValueError(f"no tracker {', '.join(map(str, unknown))}; there are {', '.join(_TRACKERS)}")
    return names


def _set_positive(value: Any) -> Any:
    """Their -1 or 0 for "not set"."""
    return value if value > 0 else None


_SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
_SCHEDULES |= {name: name for name in ("constant", "linear", "cosine")}
_CHOICES = {  # what their names of a choice are here, and what to say of other names
    "models.trainer.optimizer.schedule": (_SCHEDULES, "schedules are constant, cosine, linear and wsd"),
    "models.trainer.module": (
        {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"},
        "trainers are fsdp, deepspeed and megatron",
    ),
    "models.policy.module": (
        {"vllm": "vllm", "hf": "transformers"},
        "engines are native, vllm and transformers; the run takes native",
    ),
    "runtime.resume": (
        {"auto": "auto", "disable": "never"},
        "runtime.resume is auto, never, or a checkpoint of Coalign's",
    ),
}
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    r"models\.trainer\.optimizer\.betas": lambda value: [float(beta) for beta in list_values(value)],
    r"models\.(trainer|value)\.optimizer\.warmup|models\.trainer\.learns_after": _set_positive,
    r"models\.trainer\.activation_checkpointing": lambda value: (
        value if value == "selective" else "full" if value and value != "none" else None
    ),
    r".*\.compute_dtype": lambda value: "bfloat16" if value in (True, "bf16", "bfloat16") else None,
    r".*\.top_k": lambda value: max(0, value),
    r"loss\.entropy_coef": lambda value: float(value) or None,
    r"(loss|advantage)\..*|models\.value\.(optimizer\.(lr|weight_decay)|loss\..*)|.*\.router_\w+": float,
    r"runtime\.(save_every|eval_every|eval_prompts|keep|steps|eval_sampling\.top_p)": _set_positive,
    r"runtime\.epochs": lambda value: max(1, round(value)),
    r"runtime\.trackers": _convert_trackers,
}


def convert_value(ours: str, value: Any) -> Any:
    """Convert a value of theirs to one of our key; None if it sets nothing here. ValueError without a counterpart."""
    if ours in _CHOICES:
        names, message = _CHOICES[ours]
        if value not in names:
            raise ValueError(message)
        return names[value]
    return next((convert(value) for pattern, convert in _CONVERSIONS.items() if re.fullmatch(pattern, ours)), value)


def name_data(text: Any, split: str | None = None, config: str | None = None) -> str:
    """Return the name here of a data file or of a dataset of the hub."""
    name = str(text).removeprefix("file://")
    if name.startswith("<") or not is_hub_name(name) or FILE.search(name):
        return name
    return ":".join([name, *([config] if config else []), *([split] if split else [])])


def list_values(value: Any) -> list[Any]:
    """Return a list: the items of a list, what commas separate in a text, or any other value alone."""
    if isinstance(value, list | tuple):
        return list(value)
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else [value]


def look_up(table: Mapping[str, str], name: Any, what: str) -> str:
    """Return the recipe of a name of theirs. ValueError, beginning with ``what``, for one without."""
    if name not in table:
        raise ValueError(f"{what} has no recipe here; there are recipes for {', '.join(table)}")
    return table[name]


def count_updates(translation: ForeignTranslation, batch: float, update: float, key: str) -> int:
    """Return how many optimizer steps a batch makes, rounded, with a note where theirs leave a rest."""
    updates = max(1, round(batch / update))
    if updates * update != batch:
        translation.notes.append(
            f"models.trainer.updates_per_batch is {updates}: a batch of {batch:g} is cut into equal parts, and {key} "
            f"is {update:g}"
        )
    return updates


def set_rows(
    translation: ForeignTranslation,
    ours: str,
    names: Any,
    *,
    keys: dict[str, str] | None = None,
    split: str | None = None,
    weights: Any = None,
    max_rows: Any = None,
) -> None:
    """Set `data.train` or `data.eval`: files or datasets of the hub, what their columns are called, and their shares.

    ``weights`` and ``max_rows`` are for training alone.
    """
    sources: list[dict[str, Any]] = [{"path": name_data(name, split)} for name in list_values(names or [])]
    shares = list_values(weights) if weights is not None and len(sources) > 1 else []
    for number, source in enumerate(sources):
        source |= {"keys": keys} if keys else {}
        if ours == "data.train":
            source |= {"weight": float(shares[number])} if number < len(shares) else {}
            source |= {"max_samples": int(max_rows)} if max_rows and max_rows > 0 else {}
    translation.set(ours, sources or None)


def set_warmup(translation: ForeignTranslation, key: str, named: str | None = None) -> None:
    """Set the warm-up from a share of the run, if the file says how many steps that has."""
    share, steps = float(translation.get(key, 0.0)), translation.run.get("runtime.steps")
    if share and isinstance(steps, int):
        translation.set(f"{TRAINER}.optimizer.warmup", round(share * steps))
    elif share:
        translation.refuse(named or key, f"{share:g} of the run; set models.trainer.optimizer.warmup in steps")


def set_least_rate(translation: ForeignTranslation, key: str) -> None:
    """Set the least learning rate, where the schedule falls to one."""
    least, lr, ratio = translation.get(key), translation.run.get(f"{TRAINER}.optimizer.lr"), "optimizer.min_lr_ratio"
    if least and lr:
        translation.set(f"{TRAINER}.{ratio}", round(float(least) / float(lr), 6))
    if translation.run.get(f"{TRAINER}.optimizer.schedule", "constant") == "constant":
        translation.run.pop(f"{TRAINER}.{ratio}", None)


def set_divergence(
    translation: ForeignTranslation,
    algorithm: str,
    *,
    in_reward: float,
    in_loss: float,
    estimator: str,
    keys: tuple[str, str, str],
) -> None:
    """Set the coefficient of the divergence, which a recipe charges in the reward or in the loss.

    ``keys`` are theirs of the reward, of the loss and of the estimator; what the recipe does not charge is refused.
    """
    reward_key, loss_key, estimator_key = keys
    if algorithm in KL_IN_REWARD:
        translation.set("kl.coef", in_reward)
        if in_loss:
            translation.refuse(loss_key, f"`{algorithm}` charges the divergence in the reward (`kl`)")
    else:
        translation.set("loss.kl_coef", in_loss)
        if in_reward:
            translation.refuse(reward_key, f"`{algorithm}` charges the divergence in the loss")
        if in_loss and estimator in _KL_ESTIMATORS:
            translation.set("loss.kl_estimator", _KL_ESTIMATORS[estimator])
        elif in_loss:
            translation.refuse(estimator_key, "estimators are k1, k2 and k3; the recipe's own is kept")
    charged = translation.run.get("loss.kl_coef") or translation.run.get("kl.coef")
    if charged and translation.run.get(f"{POLICY}.compute_dtype") == "bfloat16":
        translation.set("models.reference.dtype", "bfloat16")  # as it multiplies


def set_reward_models(translation: ForeignTranslation, paths: Iterable[Any], **settings: Any) -> list[dict[str, Any]]:
    """Add reward models to the run; return their rewards."""
    rewards = []
    for number, path in enumerate(paths, start=1):
        name = "reward" if number == 1 else f"reward_{number}"
        translation.set(f"models.{name}", {"module": "fsdp", "load": str(path), "head": "reward", "frozen": True})
        rewards.append({"model": name, **settings})
    return rewards


def wrap_function(translation: ForeignTranslation, name: str) -> dict[str, Any]:
    """Return the reward that stands for a function of theirs, which a person has to wrap."""
    whose = translation.keys.name
    translation.notes.append(
        f'reward: {name} has {whose}\'s signature; wrap it as docs/writing_a_reward.md, "From another library", shows'
    )
    return {"fn": f"<a function that calls {name}>"}


def set_adapter(translation: ForeignTranslation, rank: str, alpha: str, dropout: str, target: str) -> None:
    """Set `models.trainer.lora` from the keys of theirs with these names, if there is a rank."""
    if not translation.get(rank):
        for key in (alpha, dropout, target):
            translation.get(key)  # without an adapter they mean nothing
        return
    section = f"{TRAINER}.lora"
    translation.set(f"{section}.rank", translation.get(rank))
    translation.set(f"{section}.alpha", translation.number(alpha, 16))
    translation.set(f"{section}.dropout", translation.number(dropout) or None)
    names = translation.get(target)
    if isinstance(names, str) and re.search(r"[()\[\]|\\+^$]", names):
        translation.refuse(target, "patterns are those of files here (`*.q_proj`); the run takes all-linear")
    elif names and names != "all-linear":
        translation.set(f"{section}.target", [name if "*" in name else f"*.{name}" for name in list_values(names)])


def set_trackers(
    translation: ForeignTranslation, project: str, run: str, used: Mapping[str, str] | None = None
) -> None:
    """Give the trackers of the run the project and the name of theirs; ``used`` has the keys that choose trackers."""
    if used:
        chosen = [name for name, key in used.items() if key in translation.unknown or translation.get(key)]
        translation.set("runtime.trackers", chosen or None)
    names = {"project": translation.get_text(project), "run": translation.get_text(run)}
    names = {name: value for name, value in names.items() if value}
    if names and (trackers := translation.run.get("runtime.trackers")):
        named = [name if name == "tensorboard" else {"name": name, **names} for name in trackers]
        translation.set("runtime.trackers", named)


def set_vision(translation: ForeignTranslation, tower: str, projector: str = "", language: str = "") -> None:
    """Freeze the components of a vision-language model for which these keys say so."""
    for component, key in {"tower": tower, "projector": projector, "language": language}.items():
        if key and translation.get(key) is True:
            translation.set(f"{TRAINER}.vision.{component}", "freeze")


def set_policy_parallel(translation: ForeignTranslation) -> None:
    """Keep the trainer from inheriting how the policy is cut over devices, and options of vLLM from other engines."""
    for degree in ("tensor_parallel", "pipeline_parallel"):
        if translation.run.get(f"{POLICY}.{degree}", 1) != 1:
            translation.run.setdefault(f"{TRAINER}.{degree}", 1)
    if translation.run.get(f"{POLICY}.module") != "vllm":
        translation.drop(f"{POLICY}.vllm.")
