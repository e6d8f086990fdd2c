"""The plan of a run: everything that its configuration names is found, checked and bound here, once.

``plan = prepare(config)`` is what `coalign check`, training, and every command take. Nothing is looked up by name after
it: losses, advantages, filters, environments and module classes are objects in the plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from coalign.algorithms.divergence import AdaptiveKL, FixedKL
from coalign.algorithms.objective import Objective
from coalign.backends.base import Module, TrainableModule, build_objective
from coalign.checkpoint.resume import check_copies, check_resume
from coalign.cluster.choice import check_cluster
from coalign.cluster.slices import check_staleness
from coalign.cluster.worker import find_module_class
from coalign.config import check_names, locate_problems
from coalign.config.errors import ConfigError, ConfigProblem, located_at, suggest
from coalign.config.functions import bind, resolve, resolve_class
from coalign.config.introspect import has_default
from coalign.config.schema import (
    FUNCTIONS,
    BatchSettings,
    Function,
    GeneratorSettings,
    ModelConfig,
    RewardConfig,
    RunConfig,
    ScorerSettings,
    Section,
    TrainerSettings,
    VisionConfig,
)
from coalign.data.kinds import KINDS
from coalign.data.loader import check_stream
from coalign.data.templates import read_template
from coalign.engine.engine import Engine
from coalign.engine.hooks.guards import check_guards
from coalign.engine.reward import list_reward_models, list_reward_parts
from coalign.engine.rollouts.selection import check_limits
from coalign.engine.vocabulary import check_template, find_tokenizer_name, is_scored_at_end_of_text, is_tokenized_alike
from coalign.launch.device_plan import assign_devices, describe_devices
from coalign.roles import Context, Rollout, Scorer, Trainable
from coalign.weights.sync.sync import check_syncs

if TYPE_CHECKING:
    from coalign.environments.loop import Environments

ROLES = {Rollout: "sample", Scorer: "score", Trainable: "learn"}
# Settings that only models of some roles read.
READERS: Mapping[type[Section], Sequence[type]] = {
    TrainerSettings: [Trainable],
    GeneratorSettings: [Rollout],
    ScorerSettings: [Scorer],
    BatchSettings: [Trainable, Scorer],
}
REWARD_FUNCTIONS = "coalign.backends.scorers.reward_functions:RewardModule"  # a path: a dry run asks it for its columns


@dataclass(frozen=True)
class PlannedModel:
    """One model of a run: its role, its settings, and what these name.

    ``objective``: the loss that it learns by, if its role is to learn (None for one that brings its own training).
    ``base_of``: the trained model whose weights beneath the adapters it shares; it then has no processes of its own.
    """

    name: str
    role: type
    config: ModelConfig
    module: type[Module]
    context: Context
    objective: Objective | None = None
    base_of: str | None = None


@dataclass(frozen=True)
class Plan:
    """What a run consists of, bound and checked.

    ``models``: those that the flow calls, and those of the reward. ``syncs``: (source, target) of each weight sync.
    ``rewards``: those that `self.reward` sums; empty without one. ``devices``: what `num_gpu: auto` has become.
    ``turn_weight``: how much an environment's reward for a turn counts within it.
    """

    config: RunConfig
    recipe: type[Engine]
    roles: Mapping[str, type]
    models: Mapping[str, PlannedModel]
    syncs: Sequence[tuple[str, str]] = ()
    rewards: Sequence[RewardConfig] = ()
    turn_weight: float = 0.0
    devices: str = ""
    loss: Objective | None = None
    advantage: Callable[..., Any] | None = None
    covariance: Callable[..., Any] | None = None
    truncated: Callable[..., Any] | None = None
    pairs: Callable[..., Any] | None = None
    kl: Callable[[], FixedKL | AdaptiveKL] | None = None
    filter: partial[Any] | None = None
    replay: partial[Any] | None = None

    @property
    def configs(self) -> dict[str, ModelConfig]:
        """The settings of every model."""
        return {name: model.config for name, model in self.models.items()}

    @property
    def started(self) -> dict[str, ModelConfig]:
        """The settings of the models that get processes of their own."""
        return {name: model.config for name, model in self.models.items() if model.base_of is None}

    @property
    def compared(self) -> int:
        """The responses to a prompt that a loss over groups reads together."""
        return _count_compared(self.pairs, self.config)

    @property
    def learning(self) -> list[PlannedModel]:
        """The models that learn, the main one (whose weights are the run's product) first."""
        return [model for model in self.models.values() if model.role is Trainable]

    def restrict(self, names: Sequence[str]) -> Plan:
        """Return the plan with these models of the recipe alone; `reward` stands for all of its models.

        A frozen model that shares the weights of a model left out gets processes of its own.
        """
        reward_models = list_reward_models(self.rewards) if "reward" in names else []
        models = {
            name: model if model.base_of in names else replace(model, base_of=None)
            for name, model in self.models.items()
            if name in names or name in reward_models
        }
        syncs = [pair for pair in self.syncs if models.keys() >= {*pair}]
        return replace(self, models=models, syncs=syncs, rewards=self.rewards if reward_models else ())


def _count_compared(pairs: Callable[..., Any] | None, config: RunConfig) -> int:
    """Count the responses to a prompt that a loss over groups reads together; ``pairs`` may choose some of them."""
    return getattr(getattr(pairs, "func", None), "compares", config.runtime.samples_per_prompt)


def find_recipe(algorithm: str) -> type[Engine]:
    """Find the Engine subclass that a configuration's `algorithm` names: a recipe, or a dotted path."""
    return resolve_class(algorithm, "coalign.recipes")


@dataclass(frozen=True)
class _RunOutline:
    """The recipe of a run, its loss, the roles that the recipe names, and the rewards. No backend is chosen yet."""

    recipe: type[Engine]
    loss: Objective | None
    roles: Mapping[str, type]
    rewards: Sequence[RewardConfig]

    def list_models(self, config: RunConfig) -> dict[str, tuple[type, ModelConfig]]:
        """Return role and settings of every model. ValueError for one that the configuration lacks."""
        roles = _roles_of_models(self.roles, self.rewards)
        configs = _configs_of_models(roles, self.rewards, config)
        return {name: (role, configs[name]) for name, role in roles.items()}


def outline_run(config: RunConfig) -> _RunOutline:
    """Find the recipe of a run and the roles of its models. ValueError names the key that is wrong."""
    recipe = find_recipe(config.algorithm)
    if recipe.source not in KINDS:
        raise ValueError(
            f"{recipe.__name__}.source: '{recipe.source}' is no kind of data{suggest(recipe.source, KINDS)}"
        )
    with locate_problems(config):
        loss = build_objective(config.loss) if config.loss else None
        judges = (reward.model for reward in config.reward if reward.model)
        roles = dict(recipe.roles(config, loss))
        check_names(config, dict.fromkeys([*recipe.models, *roles, *judges]))
        rewards = list_reward_parts(config) if roles.get("reward") is Scorer else []
    return _RunOutline(recipe, loss, roles, rewards)


def prepare(config: RunConfig, *, join: bool = True, devices: int | None = None) -> Plan:
    """Find, bind and check everything that ``config`` names. ValueError names the key that is wrong, its file and line.

    ``join``: ask the Ray cluster of `runtime.ray_address`, if there is one, for the devices behind `num_gpu: auto`.
    ``devices``: how many they are, on a cluster that is not there.
    """
    outline = outline_run(config)
    recipe, loss, roles, rewards = outline.recipe, outline.loss, outline.roles, outline.rewards
    with locate_problems(config):
        planned_roles = _roles_of_models(roles, rewards)
        config, requested = assign_devices(config, [*planned_roles], join=join, devices=devices), config
        recipe.check(config, loss)
        _check_readers({**recipe.models, **planned_roles}, config)
        recipe.check_sections(config)
        if config.runtime.trackers:
            from coalign.report.trackers import check_trackers

            check_trackers(config.runtime.trackers)
        check_copies(config)
        check_resume(config)
        check_stream(config)
        environments = _find_environments(config)
        check_template(environments, config)
        check_limits(config)
        names = ("advantage", "covariance", "truncated", "pairs", "kl", "filter", "replay")
        functions = {name: _bind(getattr(config, name), name) for name in names}
        configs = _let_models_see(_configs_of_models(planned_roles, rewards, config), config)
        if config.data.images is not None:
            from coalign.data.images.rows import check_images  # and Pillow

            check_images(config, recipe.source, configs)
        compared = _count_compared(functions["pairs"], config)
        syncs = [pair for pair in recipe.sync if configs.keys() >= {*pair}]
        check_cluster(config, syncs)
        models = _plan_models(planned_roles, configs, config, loss, environments, compared, syncs)
        _check_models(models, config, compared)
        if any(reward.fn for reward in rewards) and not environments:
            from coalign.backends.scorers.reward_functions import check_reward_lengths

            for policy in (model for model in models.values() if model.role is Rollout):
                limit_key = f"models.{policy.name}.sampling.max_new_tokens"
                check_reward_lengths(rewards, policy.config.sampling.max_new_tokens, limit_key)
        check_syncs(syncs, models, config)
        if config.runtime.max_staleness:
            check_staleness(syncs, models, config)
        if config.runtime.autoscale:
            from coalign.engine.fleet import check_autoscale

            check_autoscale(models, config)
    return Plan(
        config=config,
        recipe=recipe,
        roles=roles,
        models=models,
        syncs=syncs,
        rewards=rewards,
        turn_weight=_find_turn_weight(config),
        devices=describe_devices(requested, config),
        loss=loss,
        **functions,
    )


def _check_readers(roles: Mapping[str, type], config: RunConfig) -> None:
    """Refuse (ConfigError) settings of a model that neither it reads, by its role, nor any model that is `like` it.

    A module of somebody else may read any setting.
    """
    readers: dict[str, set[type]] = {}
    for name, model in config.models.items():
        source: str | None = name
        while source is not None:  # the model, the one that it is `like`, and so on
            readers.setdefault(source, set()).update(ROLES if ":" in model.module else [roles.get(name, Scorer)])
            source = config.models[source].like
    problems = []
    for settings, able in READERS.items():
        for name in (name for name in config.models if readers[name].isdisjoint(able)):
            reason = (
                f"is for models that {' or '.join(ROLES[role] for role in able)}, and `{name}` does not; leave it out"
            )
            for key in (("models", name, key) for key in settings.model_fields):
                value = getattr(config.models[name], key[-1])
                if config.locations.is_written(key) and not has_default(key, value):
                    problems.append(ConfigProblem(key, reason))
    if problems:
        raise ConfigError(problems)


def _check_models(models: Mapping[str, PlannedModel], config: RunConfig, compared: int) -> None:
    """Refuse models without weights, models that would never learn, and responses that are too long for one."""
    missing = [model.name for model in models.values() if model.config.load is None and ":" not in model.config.module]
    if missing:  # a module of somebody else may need none
        message = "missing: a Hugging Face model directory, or a name of the hub"
        raise ConfigError([ConfigProblem(("models", name, "load"), message) for name in missing])
    learning = [model for model in models.values() if model.role is Trainable]
    for model in learning:
        check_it_learns(model.name, model.config, config.runtime.steps or math.inf)
    _check_token_limits(models, compared)
    if learning and learning[0].objective is not None:
        check_guards(learning[0].objective, config)


def describe_models(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return what each model is, as JSON has it; ``base_of``: the model whose weights it shares."""
    return {
        name: {
            "role": model.role.__name__,
            "module": model.config.module,
            "load": model.config.load,
            "processes": model.config.processes,
            "devices": model.config.devices,
            "base_of": model.base_of,
        }
        for name, model in plan.models.items()
    }


def _bind(section: Function | None, section_name: str) -> partial[Any] | None:
    """Bind the function that a section names to its arguments. ConfigError for wrong ones."""
    if section is None:
        return None
    with located_at(section_name, "fn"):
        fn = resolve(section.fn, section.home)
    return partial(fn, **bind(fn, section.arguments, section_name))


def _find_environments(config: RunConfig) -> Environments:
    """Find the environments that `rollout` names; none for `single_turn`, which policies do without an episode."""
    if not config.rollout.has_episodes and not config.rollout.arguments:
        return {}
    from coalign.environments.conversation import find_environments
    from coalign.environments.loop import check_environments

    environments = find_environments(config.rollout)
    check_environments(environments, config)
    return environments


def _find_turn_weight(config: RunConfig) -> float:
    """Return the weight of the reward `episode`; 0 if it is normalised or clipped.

    It is then no plain sum over turns, so it counts for the whole response.
    """
    return sum(
        reward.weight
        for reward in config.reward
        if reward.fn and reward.normalise == "none" and not reward.clip
        if getattr(resolve(reward.fn, reward.home), "sums_turns", False)
    )


def _roles_of_models(roles: Mapping[str, type], rewards: Sequence[RewardConfig]) -> dict[str, type]:
    """Return the roles of a recipe, with the models of the reward in place of `reward`."""
    if not rewards:
        return dict(roles)
    kept = {name: role for name, role in roles.items() if name != "reward"}
    return kept | {name: Scorer for name in list_reward_models(rewards) if name not in kept}


def _configs_of_models(
    roles: Mapping[str, type], rewards: Sequence[RewardConfig], config: RunConfig
) -> dict[str, ModelConfig]:
    """Return the settings of every model. ValueError for a model that the configuration lacks."""
    configs = config.models | plan_reward_models(rewards, config)
    for name, role in roles.items():
        if name not in configs:
            needed = f"`{config.algorithm}` needs the model `{name}` ({role.__name__})"
            hint = "give a reward function (`reward:`) or a model" if name == "reward" else "add it"
            raise ValueError(f"models.{name}: {needed} and the configuration has none; {hint}")
    return {name: configs[name] for name in roles}


def _let_models_see(configs: Mapping[str, ModelConfig], config: RunConfig) -> dict[str, ModelConfig]:
    """Return the settings with `vision` for every model of a run that reads images, except for functions and for judges
    that get none.

    ValueError for a model with `vision` in a run that reads text alone.
    """
    if config.data.images is not None:
        return {
            name: model
            if name == FUNCTIONS or model.vision or (model.judge is not None and not model.judge.show_images)
            else model.model_copy(update={"vision": VisionConfig()})
            for name, model in configs.items()
        }
    if blind := next((name for name, model in configs.items() if model.vision is not None), None):
        raise ValueError(f"models.{blind}.vision: the run reads text alone; set data.images: {{}} for rows with images")
    return dict(configs)


def plan_reward_models(rewards: Sequence[RewardConfig], config: RunConfig) -> dict[str, ModelConfig]:
    """Return the settings of the models that compute the rewards. ConfigError for a function's arguments.

    They are frozen. A model that cannot read the policy's tokens gets a chat template, to read text, and so does one
    whose score is read behind the last token.
    """
    configs = {}
    for i, reward in enumerate(rewards):
        if reward.fn:
            from coalign.backends.scorers.reward_functions import resolve_reward  # which brings people's functions

            with located_at("reward", i):
                resolve_reward(reward, f"reward.{i}")
            configs[FUNCTIONS] = ModelConfig(module=REWARD_FUNCTIONS, head="reward", num_gpu=0)
        elif reward.model in config.models:
            model = config.models[reward.model]
            alike = is_tokenized_alike(model, find_tokenizer_name(config)[0]) and not is_scored_at_end_of_text(model)
            template = model.chat_template or (None if alike else "auto")
            configs[reward.model] = model.model_copy(update={"frozen": True, "chat_template": template})
    return configs


def _plan_models(
    roles: Mapping[str, type],
    configs: Mapping[str, ModelConfig],
    config: RunConfig,
    loss: Objective | None,
    environments: Environments,
    compared: int,
    syncs: Sequence[tuple[str, str]],
) -> dict[str, PlannedModel]:
    models = {}
    adapters = _adapter_ranks(configs, config, syncs)
    bases = find_shared_bases(roles, configs)
    tokenizer, trust_tokenizer = find_tokenizer_name(config)
    template = config.data.chat_template  # the text of a file, which may change while the run goes on
    template = template if template in ("auto", "none") else read_template(template)
    for name, role in roles.items():
        model = configs[name]
        objective = build_objective(model.loss, f"models.{name}.loss") if model.loss else loss
        compares = objective is not None and objective.per == "group"
        if model.chat_template_kwargs and not (model.chat_template or model.judge):
            raise ValueError(
                f"models.{name}.chat_template_kwargs: this model reads tokens, no text; the arguments of the policy's "
                "template are data.chat_template_kwargs"
            )
        if model.score_at and not (model.frozen and model.head == "reward"):
            raise ValueError(f"models.{name}.score_at: only a frozen model with head `reward` has its score read")
        with located_at("models", name, "module"):
            module = find_module_class(model)
        learns_by_loss = role is Trainable and _is_trained_by_loss(model, module)
        if learns_by_loss and objective is None:
            raise ValueError(f"loss: models.{name} trains and no loss is given for it")
        context = Context(
            model=name,
            threads=model.threads or config.runtime.threads,
            seed=config.seed,
            tokens=config.runtime.tokens,
            samples_per_prompt=config.runtime.samples_per_prompt,
            keep_groups=model.share_prefix or model.judge is not None or compares,
            loss=objective,
            rewards=tuple(reward for reward in config.reward if reward.fn),
            adapter_rank=adapters.get(name),
            routing_replay=config.rollout.routing_replay and any(name in pair for pair in syncs),
            tokens_only=Rollout in roles.values(),
            recompute_kv=config.rollout.kv == "recompute",
            environments=environments if role is Rollout else {},
            tokenizer=tokenizer,
            trust_tokenizer=trust_tokenizer,
            chat_template=template,
            chat_template_kwargs=config.data.chat_template_kwargs,
            reasoning=config.data.reasoning,
            images=config.data.images,
            output=os.path.abspath(config.output),
        )
        models[name] = PlannedModel(
            name, role, model, module, context, objective if learns_by_loss else None, bases.get(name)
        )
    longest = min((limit for model in models.values() if (limit := find_token_limit(model, compared))), default=None)
    return {
        name: replace(model, context=replace(model.context, sample_tokens=longest)) for name, model in models.items()
    }


def _is_trained_by_loss(model: ModelConfig, module: type[Module]) -> bool:
    """Whether the model learns by the loss of the configuration; a custom module may have its own train_step."""
    return ":" not in model.module or getattr(module, "train_step", None) is TrainableModule.train_step


def _adapter_ranks(
    configs: Mapping[str, ModelConfig], config: RunConfig, syncs: Sequence[tuple[str, str]]
) -> dict[str, int]:
    """Return the rank of the adapters that are synced separately, for each model that sends or receives them."""
    if config.sync.adapters != "apart":
        return {}
    sources = {source: configs[source].lora for source, _ in syncs}
    return {name: lora.rank for pair in syncs for name in pair if (lora := sources.get(pair[0]))}


def find_shared_bases(roles: Mapping[str, type], configs: Mapping[str, ModelConfig]) -> dict[str, str]:
    """Find the frozen models that need not be loaded: {name: trained model with adapters over the same weights}.

    A model with a cache is left out: once filled, it costs neither memory nor time.
    """
    trained = [n for n, role in roles.items() if role is Trainable and (lora := configs[n].lora) and not lora.load]
    shared = {}
    for name, model in configs.items():
        plain = model.frozen and not model.cache and not (model.lora and model.lora.load)
        for trained_name in trained:
            if plain and _weights_of(model) == _weights_of(configs[trained_name]):
                shared[name] = trained_name
    return shared


def _weights_of(model: ModelConfig) -> tuple[Any, ...]:
    bits = model.lora.base_bits if model.lora else None
    sampled_at = model.sampling.temperature or 1.0
    return (model.module, model.load, model.init, model.head, model.dtype, model.compute_dtype, bits, sampled_at)


def _check_token_limits(models: Mapping[str, PlannedModel], compared: int) -> None:
    """Refuse responses that may be longer than what a model reading their tokens takes at once.

    ``compared`` is the number of responses that a loss over groups reads together.
    """
    for policy in (model for model in models.values() if model.role is Rollout):
        longest = policy.config.sampling.max_new_tokens
        for name, model in models.items():
            limit, tokens = find_token_limit(model, compared), model.config.max_tokens_per_micro
            if limit is not None and tokens is not None and limit <= longest:
                shared = f", {limit} for each of the {tokens // limit} that its loss compares" if limit < tokens else ""
                raise ValueError(
                    f"models.{name}.max_tokens_per_micro is {tokens}{shared}, and a response may have {longest} tokens "
                    f"(models.{policy.name}.sampling.max_new_tokens) beside its prompt. A sequence is never cut: raise "
                    "it above the longest prompt and response together"
                )


def find_token_limit(model: PlannedModel, compared: int) -> int | None:
    """Return the most tokens of one sample that a model takes; a loss over groups reads ``compared`` samples at once.

    None without a limit: policies, models that read text (they cut it), and reward functions.
    """
    config = model.config
    if model.role is Rollout or not config.load or config.chat_template or config.judge:
        return None
    if config.max_tokens_per_micro is None:
        return None
    together = compared if model.objective is not None and model.objective.per == "group" else 1
    return config.max_tokens_per_micro // together


def check_it_learns(name: str, model: ModelConfig, steps: float) -> None:
    """Refuse a model whose `learns_after` is not before the last step."""
    if model.learns_after >= steps:
        raise ValueError(
            f"models.{name}.learns_after is {model.learns_after}, and the run has {steps} steps, so the model would "
            "never learn; make it smaller, or the run longer"
        )
