"""Whether models and tokenizers speak of the same tokens, seen from their files.

Whether the transport of weights that a configuration names can work where it places the models.

What a run is refused for before anything loads: settings that cannot work, and settings that would have no effect.

Each function raises ValueError (ImportError for a package) with the key, its value and what would be right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coalign.algorithms.traits import check_aggregation, required_inputs, value_unit
from coalign.cluster.base import planned
from coalign.cluster.start import kind
from coalign.cluster.worker import module_class
from coalign.config.functions import bind, is_bound_to_process, resolve, resolve_class
from coalign.config.schema import LossConfig, ModelConfig, RunConfig
from coalign.engine.engine import Engine
from coalign.environments.conversation import find_environment as environment_of
from coalign.roles import Rollout, Trainable

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


def tokenizer_directory(config: RunConfig) -> str:
    """Where the run's tokenizer lies: that of the policy, else of the first model that has one."""
    named = [config.models[n] for n in ("policy", "trainer") if n in config.models]
    for model in [*named, *config.models.values()]:
        if directory := model.tokenizer or model.load:
            return directory
    raise ValueError("models: none of them has `load` (a Hugging Face model directory), so there is no tokenizer")


def check_same_vocabulary(one: ModelConfig, other: ModelConfig, names: tuple[str, str]) -> None:
    """ValueError with the first difference of their tokenizer.json files; nothing where one has none."""
    here, there = (_tokens(Path(model.tokenizer or model.load or ".")) for model in (one, other))
    if here is None or there is None or here == there:
        return
    differing = sorted({*here.items()} ^ {*there.items()}, key=lambda pair: pair[1])
    token, number = differing[0]
    raise ValueError(
        f"models.{names[1]}.load: its tokenizer is another one than that of models.{names[0]} "
        f"({len(there)} and {len(here)} tokens, {len(differing)} entries differ, first {token!r} = {number}); "
        "log-probs of tokens can only be compared over one vocabulary"
    )


def check_tokens_fit(key: str, model: ModelConfig, *, highest: int) -> None:
    """ValueError, naming ``key``, if the tokenizer's ``highest`` id has no row in the embedding of ``model``; -1: there
    are no ids at all."""
    file = Path(model.load or ".") / "config.json"
    if not file.is_file():
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    rows = content.get("vocab_size") or content.get("text_config", {}).get("vocab_size")
    if highest < 0:
        raise ValueError(f"{key}: the run's tokenizer has no tokens at all; its vocabulary file seems to be missing")
    if rows is not None and highest >= rows:
        raise ValueError(
            f"{key}: the run's tokenizer has ids up to {highest}, but {file} says vocab_size {rows}; "
            "`coalign extend-vocab` adds rows for new tokens"
        )


def reads_alike(model: ModelConfig, other: str) -> bool:
    """Whether the tokenizer of ``model`` makes of a conversation the tokens that the one in the directory ``other``
    makes: the same vocabulary, and no other chat template. A model without a tokenizer of its own reads any tokens."""
    own = Path(model.tokenizer or model.load or other)
    if own.resolve() == Path(other).resolve() or not any((own / name).is_file() for name in TOKENIZER_FILES):
        return True
    if (own / "tokenizer.json").is_file() and (Path(other) / "tokenizer.json").is_file():
        same = _tokens(own) == _tokens(Path(other))
    else:
        same = all(_bytes(own / name) == _bytes(Path(other) / name) for name in TOKENIZER_FILES)
    templates = {template for template in (_chat_template(own), _chat_template(Path(other))) if template}
    return same and len(templates) < 2


def _chat_template(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    file = directory / "tokenizer_config.json"
    template = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
    return json.dumps(template) if isinstance(template, list) else template  # several by name


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _tokens(directory: Path) -> dict[str, int] | None:
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model: [piece, score] by number
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in content.get("added_tokens", ())}


def check_transport(cls: type[Engine], models: Mapping[str, ModelConfig], config: RunConfig) -> None:
    """Refuse a transport between models whose placement it cannot serve. ValueError names both.

    What only a running cluster knows (hosts) the first sync finds.
    """
    name = config.sync.transport
    if name not in ("broadcast", "cuda_ipc"):
        return
    if kind(config) == "local":
        raise ValueError(
            f"sync.transport: `{name}` is for models in processes of their own, and here all of them run in this one; "
            "leave it out, or set runtime.cluster: ray"
        )
    slots = planned(models, config.runtime.colocation)
    for source, target in cls.sync:
        gpus = [slots[each].footprints[each].total for each in (source, target)]
        together = slots[source] is slots[target]
        if name == "broadcast" and together:
            raise ValueError(
                f"sync.transport: `broadcast` needs models.{source} and models.{target} at once, and in one group of "
                "runtime.colocation they take turns; use shared_memory, object_store or disk"
            )
        if name == "cuda_ipc" and not (together and gpus == [1, 1]):
            raise ValueError(
                f"sync.transport: `cuda_ipc` needs models.{source} and models.{target} on one GPU; they have {gpus[0]} "
                f"and {gpus[1]}, in {'one' if together else 'no common'} group of runtime.colocation; use shared_memory"
            )


SAMPLING = ("curriculum", "filter", "replay", "rollout")  # sections that say which samples there are


def check_sections(config: RunConfig, cls: type[Engine]) -> None:
    """Refuse sections that the recipe does not read."""
    from_data = cls.source != "prompts"
    why = "learns from data, not from samples of a policy" if from_data else "does not read it"
    for name in (*(SAMPLING if from_data else ()), *cls.unread):
        if getattr(config, name) != RunConfig.model_fields[name].default:
            raise ValueError(f"{name}: `{config.algorithm}` {why}; leave it out")


def check_functions_are_imported(config: RunConfig) -> None:
    """Refuse functions and classes that only this process finds, where other processes would call them."""
    if kind(config) == "ray":
        bound = [(key, text) for key, text in _texts(config.model_dump(), "") if is_bound_to_process(text)]
        if bound:
            key, name = bound[0]
            raise ValueError(
                f"{key}: '{name}' is known to this process alone, and on Ray other processes call it; define it in a "
                "module that they can import, or set `runtime.cluster` to local"
            )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of all texts in a configuration."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{key}[{index}]")


def check_recording(config: RunConfig) -> None:
    """Raise ImportError if metrics are to go to wandb, and it is not installed."""
    if (project := config.runtime.wandb) and find_spec("wandb") is None:
        raise ImportError(
            f"runtime.wandb is '{project}', and wandb is not installed: pip install 'coalign[wandb]', or leave it out"
        )


def check_environment(config: RunConfig) -> None:
    """Refuse an environment that is not there, gets wrong arguments, or cannot do with so many samples of a prompt."""
    if (environment := environment_of(config.rollout)) is not None:
        keys = ["samples_per_prompt", *(["eval_samples"] if config.data.eval else [])]
        environment.check({f"runtime.{key}": getattr(config.runtime, key) for key in keys})
        spread = [name for name, model in config.models.items() if model.spread_samples]
        if environment.grouped and spread:
            raise ValueError(
                f"models.{spread[0]}.spread_samples: `{config.rollout.fn}` plays the samples of a prompt together, so "
                "they have to be on one replica; leave it out"
            )


def is_trained_by_loss(model: ModelConfig) -> bool:
    """Whether the model's train_step learns by the loss of the configuration. A module of one's own that brings its own
    train_step learns as that says."""
    from coalign.backends.base import TrainableModule  # recipes that only run models do without

    return ":" not in model.module or getattr(module_class(model), "train_step", None) is TrainableModule.train_step


def check_loss(name: str, model: ModelConfig, config: RunConfig) -> None:
    """Refuse a loss of a model that is not there, gets wrong arguments, or cannot be added up as it says."""
    loss, where = loss_of(name, model, config)
    fn = resolve(loss.fn, "coalign.algorithms.losses")
    bind(fn, loss.arguments, where)
    check_aggregation(fn, loss.fn, loss.aggregation, where)


def check_guards(name: str, model: ModelConfig, config: RunConfig) -> None:
    """Refuse a bound on the entropy where the loss of the main model could measure it, and is not told to."""
    least, (loss, where) = config.runtime.guards.min_entropy, loss_of(name, model, config)
    fn = resolve(loss.fn, "coalign.algorithms.losses")
    arguments = bind(fn, loss.arguments, where)
    if least is not None and "measure_entropy" in arguments and "entropy" not in required_inputs(fn, arguments):
        raise ValueError(
            f"runtime.guards.min_entropy is {least:g}, and the loss `{loss.fn}` does not measure the entropy; set "
            f"{where}.measure_entropy: true"
        )


def check_it_learns(name: str, model: ModelConfig, steps: float) -> None:
    """Refuse a model that waits until the run is over."""
    if model.learns_after >= steps:
        raise ValueError(
            f"models.{name}.learns_after is {model.learns_after}, and the run has {steps} steps, so the model would "
            "never learn; make it smaller, or the run longer"
        )


def check_room(roles: Mapping[str, type], models: Mapping[str, ModelConfig], config: RunConfig) -> None:
    """Refuse responses that may be longer than what a model that reads their tokens takes at once: the first of them
    would end the run."""
    for policy in (name for name, role in roles.items() if role is Rollout):
        longest = models[policy].sampling.max_new_tokens
        for name, budget in token_budgets(roles, models, config).items():
            if budget <= longest:
                whole = models[name].max_tokens_per_micro
                shared = (
                    f", {budget} for each of the {whole // budget} that its loss compares" if budget < whole else ""
                )
                raise ValueError(
                    f"models.{name}.max_tokens_per_micro is {whole}{shared}, and a response may have {longest} tokens "
                    f"(models.{policy}.sampling.max_new_tokens) beside its prompt. A sequence is never cut: raise it "
                    "above the longest prompt and response together"
                )


def check_adapters(cls: type[Engine], models: Mapping[str, ModelConfig], config: RunConfig) -> None:
    """Refuse adapters that are to travel beside the weights where there are none, or where a side cannot do that."""
    if config.sync.adapters != "apart":
        return
    where, instead = "sync.adapters is `apart`", "use `merged`, which is the default"
    if not cls.sync:
        raise ValueError(f"{where}, and in `{config.algorithm}` no weights travel between models; leave it out")
    for source, target in cls.sync:
        lora = models[source].lora
        if lora is None:
            raise ValueError(f"{where}, and models.{source} has no adapters: give it `lora`, or {instead}")
        if lora.dora:
            raise ValueError(f"{where}, and the magnitudes of models.{source}.lora.dora have to be merged; {instead}")
        for name in (source, target):
            module = models[name].module
            if not resolve_class(module, "coalign.backends").adapters:
                raise ValueError(f"{where}, and models.{name}.module, `{module}`, knows merged weights only; {instead}")


def adapter_ranks(cls: type[Engine], config: RunConfig) -> dict[str, int]:
    """The ranks of the adapters that travel beside weights, by the models that send and take them."""
    if config.sync.adapters != "apart":
        return {}
    return {name: config.models[pair[0]].lora.rank for pair in cls.sync for name in pair}


def token_budgets(roles: Mapping[str, type], models: Mapping[str, ModelConfig], config: RunConfig) -> dict[str, int]:
    """The longest sample that each model takes which reads samples as tokens; what a loss compares is read at once.
    Models that read text cut it by themselves, and functions (which load nothing) read what there is."""
    budgets = {}
    for name, role in roles.items():
        model = models[name]
        reads_tokens = role is not Rollout and model.load and not (model.chat_template or model.judge)
        if reads_tokens and model.max_tokens_per_micro is not None:
            together = _compared(name, model, config) if role is Trainable else 1
            budgets[name] = model.max_tokens_per_micro // together
    return budgets


def _compared(name: str, model: ModelConfig, config: RunConfig) -> int:
    """Responses that a model's loss compares with each other, at most."""
    if not is_trained_by_loss(model):
        return 1
    if value_unit(resolve(loss_of(name, model, config)[0].fn, "coalign.algorithms.losses")) != "group":
        return 1
    pairs = config.pairs and resolve(config.pairs.fn, "coalign.algorithms.comparisons")
    return getattr(pairs, "compares", config.runtime.samples_per_prompt)


def loss_of(name: str, model: ModelConfig, config: RunConfig) -> tuple[LossConfig, str]:
    """The loss that a model learns by, and its key."""
    loss, where = (model.loss, f"models.{name}.loss") if model.loss else (config.loss, "loss")
    if loss is None:
        raise ValueError(f"loss: models.{name} trains and no loss is given for it")
    return loss, where
