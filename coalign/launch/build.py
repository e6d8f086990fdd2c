"""From a configuration to an engine with its models on a cluster.

Where the models of a run live: what its configuration asks for, and what its cluster found for them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from coalign.algorithms.traits import per
from coalign.cluster.base import planned
from coalign.cluster.placement.nodes import Node, ProcessPlacement
from coalign.cluster.placement.slots import Footprint, Slot, distinct
from coalign.config import check_names, locate_problems
from coalign.config.errors import suggest
from coalign.config.functions import resolve, resolve_class
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.kinds import KINDS
from coalign.data.loader import Loader, build_loader
from coalign.engine.buffer import Buffer
from coalign.engine.engine import Engine, Evaluator, Trainer
from coalign.engine.environment import Environment
from coalign.engine.filters import check_control, control
from coalign.engine.reference import BaseWeights, shared_bases
from coalign.engine.reward import Reward, reward_models, reward_names, reward_parts
from coalign.launch.validate import (
    adapter_ranks,
    check_adapters,
    check_environment,
    check_functions_are_imported,
    check_guards,
    check_it_learns,
    check_loss,
    check_recording,
    check_room,
    check_sections,
    check_tokens_fit,
    check_transport,
    is_trained_by_loss,
    token_budgets,
    tokenizer_directory,
)
from coalign.roles import Context, Rollout, Scorer, Trainable
from coalign.weights.sync.sync import WeightSync


def models_with_processes(
    cls: type[Engine], models: Mapping[str, ModelConfig], config: RunConfig
) -> dict[str, ModelConfig]:
    """The models that get processes of their own: not those that lie beneath another one's adapters."""
    shared = shared_bases(models, roles_of(cls, config))
    return {name: model for name, model in models.items() if name not in shared}


def requested_layout(models: Mapping[str, ModelConfig], config: RunConfig) -> Table:
    """What each model needs and with whom it shares. Raises ConfigError for numbers that do not divide."""
    slots = planned(models, config.runtime.colocation)
    needed = sum(slot.devices for slot in distinct(slots))
    devices = f"{needed} devices ({config.runtime.accelerator})" if needed else "no devices"
    table = Table(box=None, pad_edge=False, title=f"placement: {devices}", title_justify="left")
    for column in ("model", "processes", "shares of a batch", "on", "in turn with"):
        table.add_column(column)
    for name, slot in slots.items():
        needs = slot.footprints[name]
        table.add_row(
            name,
            _processes(needs),
            str(needs.parts),
            _places(slot, name),
            ", ".join(models_sharing_devices(slots, name)),
        )
    return table


def assigned_layout(
    slots: Mapping[str, Slot], seats: Mapping[str, Sequence[ProcessPlacement]], nodes: Sequence[Node]
) -> list[str]:
    """A line for each model: where its processes are, by rank."""
    lines = []
    for name, ranks in seats.items():
        where = []
        for node, neighbours in groupby(ranks, key=lambda seat: seat.node):
            there = [",".join(seat.devices) for seat in neighbours]
            where.append(f"{nodes[node].name} " + ("".join(f"[{d}]" for d in there) if there[0] else f"× {len(there)}"))
        turn = f"; in turn with {', '.join(others)}" if (others := models_sharing_devices(slots, name)) else ""
        lines.append(f"{name}: {_processes(slots[name].footprints[name])} on {', '.join(where)}{turn}")
    return lines


def models_sharing_devices(slots: Mapping[str, Slot], name: str) -> list[str]:
    """The models that wait while this one computes."""
    slot = slots[name]
    held = {other: {place for places in ranks for place in places} for other, ranks in slot.places.items()}
    return [other for other in held if other != name and not held[name].isdisjoint(held[other])]


def _processes(needs: Footprint) -> str:
    return f"{needs.processes}" + (f" × {needs.devices}" if needs.devices > 1 else "")


def _places(slot: Slot, name: str) -> str:
    """`CPU`, or the devices of the slot, which one process has in brackets."""
    if not slot.footprints[name].devices:
        return "CPU"
    own = slot.places[name]
    whole = f"{own[0][0]}–{own[-1][-1]}" if len(own[0]) == 1 and len(own) > 1 else ""
    devices = whole or " ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in own)
    return f"{slot.name}: {devices}"


log = logging.getLogger(__name__)


def recipe(algorithm: str) -> type[Engine]:
    """The Engine subclass called ``algorithm`` (a recipe, or a dotted path)."""
    return resolve_class(algorithm, "coalign.recipes")


def prepare(config: RunConfig) -> tuple[type[Engine], dict[str, ModelConfig]]:
    """The recipe and the models it needs, checked. ValueError names the key that is wrong, and its place."""
    cls = recipe(config.algorithm)
    if cls.source not in KINDS:
        raise ValueError(f"{cls.__name__}.source: '{cls.source}' is no kind of data{suggest(cls.source, KINDS)}")
    with locate_problems(config):
        check_names(config, [*cls.models, *(reward.model for reward in config.reward if reward.model)])
        check_functions_are_imported(config)
        cls.check(config)
        check_sections(config, cls)
        check_recording(config)
        check_environment(config)
        check_control(config)
        roles, models = roles_of(cls, config), dict(config.models)
        if cls.roles(config).get("reward") is Scorer:
            models |= reward_models(config)
        for name, role in roles.items():
            if name not in models:
                needed = f"`{config.algorithm}` needs the model `{name}` ({role.__name__})"
                hint = "give a reward function (`reward:`) or a model" if name == "reward" else "add it"
                raise ValueError(f"models.{name}: {needed} and the configuration has none; {hint}")
        learning = [name for name, role in roles.items() if role is Trainable]
        by_loss = [name for name in learning if is_trained_by_loss(models[name])]
        for name in by_loss:
            check_loss(name, models[name], config)
        for name in learning:
            check_it_learns(name, models[name], config.runtime.steps or math.inf)
        check_room(roles, models, config)
        check_adapters(cls, models, config)
        check_transport(cls, {name: models[name] for name in roles}, config)
        if by_loss and by_loss[0] == learning[0]:
            check_guards(by_loss[0], models[by_loss[0]], config)
    return cls, {name: models[name] for name in roles}


def roles_of(cls: type[Engine], config: RunConfig) -> dict[str, type]:
    """The models that the run starts: those of the recipe, with the parts of the reward in place of `reward`."""
    roles, parts = dict(cls.roles(config)), reward_names(config)
    if parts and roles.get("reward") is Scorer:
        del roles["reward"]
        roles |= {name: Scorer for name in parts if name not in roles}
    return roles


def load_tokenizer(config: RunConfig) -> Any:
    """The run's tokenizer. ValueError names the directory if it has none."""
    from transformers import AutoTokenizer  # slow to import, and `coalign check` does without

    directory = tokenizer_directory(config)
    if not Path(directory).is_dir():
        raise ValueError(f"models: `load: {directory}` is not a directory (a Hugging Face model directory is expected)")
    trust = any(model.trust_remote_code for model in config.models.values())
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    own = {name for name, model in reward_models(config).items() if model.chat_template}  # they read text
    for name, model in config.models.items():
        if name not in own:
            check_tokens_fit(f"models.{name}.load", model, highest=highest)
    return tokenizer


def context(name: str, model: ModelConfig, config: RunConfig, steps: int) -> Context:
    """What the workers of one model are told about the run."""
    loss = model.loss or config.loss
    cls = recipe(config.algorithm)
    role = cls.roles(config).get(name)
    budgets = token_budgets(roles_of(cls, config), config.models | reward_models(config), config)
    compares = loss is not None and per(resolve(loss.fn, "coalign.algorithms.losses")) == "group"
    return Context(
        model=name,
        threads=model.threads or config.runtime.threads,
        seed=config.seed,
        steps=steps,
        tokens=config.runtime.tokens,
        samples_per_prompt=config.runtime.samples_per_prompt,
        sample_tokens=min(budgets.values(), default=None),
        whole_groups=model.share_prefix or compares or model.judge is not None,
        loss=loss.model_dump() if loss else None,
        rewards=tuple(reward.model_dump() for reward in config.reward if reward.fn),
        adapter_rank=adapter_ranks(cls, config).get(name),
        rollout=config.rollout.model_dump() if role is Rollout else None,
        tokenizer=tokenizer_directory(config),
        chat_template=config.data.chat_template,
        output=os.path.abspath(config.output),
    )


def loader(config: RunConfig, cls: type[Engine], tokenizer: Any, split: str) -> Loader:
    """The training or evaluation data of a run."""
    return build_loader(
        config.data,
        tokenizer,
        kind=cls.source,
        split=split,
        batch_size=config.runtime.prompts_per_step,
        batch_tokens=config.runtime.tokens_per_step,
        seed=config.seed,
    )


def ptx_loader(config: RunConfig, tokenizer: Any) -> Loader | None:
    """The rows of the section `ptx`, read as `data` says but for its phases."""
    if config.ptx is None:
        return None
    return build_loader(
        config.data.model_copy(update={"train": config.ptx.data, "phases": {}, "phase": None}),
        tokenizer,
        kind=config.ptx.kind,
        split="train",
        batch_size=config.ptx.rows_per_step,
        seed=config.seed,
    )


def length(config: RunConfig, data: Loader) -> int:
    """Steps of the run at most. A stream that ends by tokens has no other end; each step trains on one at least."""
    runtime = config.runtime
    if runtime.steps is None and runtime.tokens and config.data.stream:
        return runtime.tokens
    return runtime.steps or data.steps(runtime.epochs)


def spawn(engine: Engine, models: Mapping[str, ModelConfig], contexts: Mapping[str, Context]) -> None:
    """Start the models and make them the engine's attributes; one that only shares another's base is not started."""
    config = engine.config
    shared = shared_bases(models, roles_of(type(engine), config))
    started = {n: engine.cluster.spawn(n, models[n], contexts[n]) for n in models if n not in shared}
    running = started | {name: BaseWeights(started[owner]) for name, owner in shared.items()}
    if engine.roles(config).get("reward") is Scorer:
        engine.rewards = Reward(engine.cluster, reward_parts(config), running)
        running = {**running, "reward": engine.rewards}
    engine.attach(running)
    engine.models_running = started


def sync_between(engine: Engine, source: str, target: str) -> WeightSync:
    """How the weights of one model of the run reach another one."""
    config = engine.config
    directory = config.sync.directory or str(Path(config.output) / "sync")
    settings = config.sync.model_copy(update={"directory": str(Path(directory, f"{source}-{target}").absolute())})
    models = engine.models_running
    return WeightSync(models[source], models[target], settings, overlap=config.runtime.max_staleness > 0)


def build(
    cls: type[Engine],
    models: Mapping[str, ModelConfig],
    config: RunConfig,
    cluster: Any,
    only: Sequence[str] | None = None,
) -> Engine:
    """Data, models and engine of what `prepare` gave, ready to ``learn``; with ``only`` these models alone, ready to be
    evaluated."""
    if only is not None:
        only = [*only, *(reward_names(config) if "reward" in only else [])]
        models = {name: model for name, model in models.items() if name in only}
    tokenizer = load_tokenizer(config)
    data = loader(config, cls, tokenizer, "train")
    steps = length(config, data)
    engine = cls(config, cluster)
    for name in engine.learning:
        if name in models:
            check_it_learns(name, models[name], steps)
    engine.tokenizer = tokenizer
    engine.last = steps
    engine.ptx_loader = ptx_loader(config, tokenizer)
    spawn(engine, models, {name: context(name, model, config, steps) for name, model in models.items()})
    if cls.source == "prompts":  # their flows join and filter
        cluster.expect_functions()
    buffer = Buffer(config.runtime.max_staleness, steps)
    decided = control(config, cluster, data)
    engine.environment = Environment(cluster, engine.env_flow, data, buffer, engine.ledger, decided)
    pairs = [(a, b) for a, b in cls.sync if a in models and b in models]
    syncs = [sync_between(engine, *pair) for pair in pairs]
    engine.trainers = Trainer(cluster, engine.train_flow, syncs, next(iter(engine.learning), None))
    if config.data.eval:
        held_out = loader(config, cls, tokenizer, "eval")
        engine.evaluator = Evaluator(cluster, engine.eval_flow, held_out, config.runtime.eval_prompts)
    return engine
