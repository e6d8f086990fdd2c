"""What is refused before anything loads: settings that cannot work, and settings that would have no effect.

Each function raises ValueError (ImportError for a package that is missing) with the key, its value and what would be
right. ``prepare`` in plan.py calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from coalign.checkpoint.manifest import find_step
from coalign.cluster.cluster import choose_cluster, plan_slots
from coalign.config.errors import ConfigError, ConfigProblem, located_at, suggest
from coalign.config.functions import is_bound_to_process
from coalign.config.schema import ModelConfig, RewardConfig, RunConfig
from coalign.data.kinds import KINDS
from coalign.data.templates import read_arguments, read_template, reads_tools
from coalign.engine.vocabulary import find_chat_template, find_tokenizer_name
from coalign.files import read_model_config
from coalign.hub import find_directory
from coalign.roles import Rollout, Trainable
from coalign.weights.model_files import check_adapter_files, has_weights

if TYPE_CHECKING:
    from coalign.algorithms.objective import Objective
    from coalign.data.loader import Loader
    from coalign.engine.engine import Engine
    from coalign.environments.loop import EnvironmentFunction
    from coalign.launch.plan import PlannedModel


def check_loads(models: Iterable[PlannedModel]) -> None:
    """Refuse models of Coalign's own modules without weights to load; a module of somebody else may need none."""
    missing = [model.name for model in models if model.config.load is None and ":" not in model.config.module]
    if missing:
        message = "missing: a Hugging Face model directory, or a name of the hub"
        raise ConfigError([ConfigProblem(("models", name, "load"), message) for name in missing])


def check_directories(models: Iterable[PlannedModel]) -> None:
    """Refuse directories in which there is no model, or one of another format or of an unknown architecture."""
    from coalign.backends.known_models import find_known_model
    from coalign.backends.pretrained import check_architecture

    for model in models:
        if model.config.load:
            with located_at("models", model.name, "load"):
                directory = find_directory(model.config.load)
                read_model_config(directory)
                if find_known_model(model.config) is None:
                    check_architecture(directory)


def check_weights(models: Iterable[PlannedModel], *, simulated: bool = False) -> None:
    """Refuse weights that no model of this architecture and head has. Their headers are read, and no values.

    Those that are not fetched yet are not compared, nor those of a run on another cluster (``simulated``) that are not
    here.
    """
    from coalign.backends import pretrained

    seen = set()
    for model in models:
        config = model.config
        if not config.load or config.init == "random" or ":" in config.module:
            continue
        is_local = Path(config.load).is_dir() and not simulated
        with located_at("models", model.name, "load"):
            if is_local or has_weights(find_directory(config.load)):
                subject = (config.load, config.head, config.head_init, config.frozen, config.vision is None)
                if subject not in seen:
                    pretrained.check_weights(config)
                seen.add(subject)
        if config.lora and config.lora.load and (is_local or Path(config.lora.load).is_dir()):
            with located_at("models", model.name, "lora", "load"):
                check_adapter_files(find_directory(config.lora.load))


def check_folders(config: RunConfig) -> None:
    """Refuse folders in which nothing can be written: the run's, and the cache of its data."""
    for key, name in {("output",): config.output, ("data", "cache"): config.data.cache}.items():
        folder = Path(name or ".").absolute()
        while not folder.exists():
            folder = folder.parent
        with located_at(*key):
            try:
                TemporaryFile(dir=folder).close()
            except OSError as error:
                raise ValueError(f"nothing can be written in '{folder}': {error.strerror}") from error


def check_copies(config: RunConfig) -> None:
    """Refuse a URL that nothing can be copied to. ImportError if its package is missing."""
    if url := config.runtime.save_copies_to:
        from coalign.checkpoint.remote import check_url  # fsspec's, for runs with copies

        with located_at("runtime", "save_copies_to"):
            check_url(url, config.output)


def check_resume(config: RunConfig) -> None:
    """Refuse to resume from a directory that is not there, or from a URL that is no checkpoint's."""
    resume = config.runtime.resume
    if "://" in resume:
        from coalign.checkpoint.remote import check_url

        with located_at("runtime", "resume"):
            check_url(resume, config.output)
            if find_step(Path(resume)) < 0:
                raise ValueError("expected the URL of a checkpoint, such as s3://bucket/run/step_100")
    elif resume not in ("auto", "never") and not Path(resume).is_dir():
        message = (
            f"is '{resume}', and there is no such directory; expected auto | never | a checkpoint, "
            "such as RUN/checkpoints/step_100 or s3://bucket/run/step_100"
        )
        raise ConfigError([ConfigProblem(("runtime", "resume"), message)])


def check_stream(config: RunConfig) -> None:
    """Refuse a stream without an end, and shares of sources whose sizes nobody knows."""
    if not config.data.stream:
        return
    if config.runtime.steps is None and config.runtime.tokens is None:
        message = "is true, and nobody knows how many rows a stream has: set runtime.steps or runtime.tokens"
        raise ConfigError([ConfigProblem(("data", "stream"), message)])
    if config.data.mixing != "weight":
        message = f"is {config.data.mixing}, and nobody knows how many rows a stream has; use weight"
        raise ConfigError([ConfigProblem(("data", "mixing"), message)])


def check_context(models: Iterable[PlannedModel]) -> None:
    """Refuse responses that are longer than all that a policy reads, prompt included."""
    from coalign.backends.pretrained import find_context_length

    for model in models:
        longest = model.config.sampling.max_new_tokens
        if model.role is not Rollout or not model.config.load:
            continue
        limit = find_context_length(model.config)
        if limit is not None and longest >= limit:
            message = f"is {longest}, and the model reads {limit} tokens at once, prompt included (config.json)"
            raise ConfigError([ConfigProblem(("models", model.name, "sampling", "max_new_tokens"), message)])


def check_transport(syncs: Sequence[tuple[str, str]], models: Mapping[str, ModelConfig], config: RunConfig) -> None:
    """Refuse a transport that cannot connect two models where they are placed. ValueError names both.

    The first sync refuses what depends on hosts: only a running cluster knows them.
    """
    name = config.sync.transport
    if name not in ("broadcast", "cuda_ipc"):
        return
    if choose_cluster(config) == "local":
        raise ValueError(
            f"sync.transport: `{name}` is for models in processes of their own, and here all of them run in this one; "
            "leave it out, or set runtime.cluster: ray"
        )
    slots = plan_slots(models, config.runtime.colocation)
    for source, target in syncs:
        gpus = [slots[model].footprints[model].total for model in (source, target)]
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


def check_staleness(syncs: Sequence[tuple[str, str]], models: Mapping[str, PlannedModel], config: RunConfig) -> None:
    """Refuse (ValueError) `runtime.max_staleness` where a policy cannot generate while its trainer trains."""
    if not config.runtime.max_staleness:
        return
    for key, unset in (("round_tokens", None), ("oversample", 1.0)):
        if getattr(config.rollout, key) != unset:
            raise ValueError(
                f"rollout.{key}: is for synchronous training; with runtime.max_staleness > 0 responses go on while the "
                "trainer trains, and no step waits for the longest one: leave one of the two out"
            )
    slots = plan_slots({name: model.config for name, model in models.items()}, config.runtime.colocation)
    for source, target in syncs:
        if models[target].role is not Rollout:
            continue
        if slots[source] is slots[target]:
            raise ValueError(
                f"runtime.max_staleness: models.{source} and models.{target} take turns (runtime.colocation)"
                ", so neither computes while the other does; give each its own, or set it to 0"
            )
        if not hasattr(models[target].module, "roll"):
            raise ValueError(
                f"runtime.max_staleness: models.{target}.module `{models[target].config.module}` has no method `roll`, "
                "so it cannot generate while its trainer trains; derive it from RolloutModule, or set it to 0"
            )
        if models[target].config.pipeline_parallel > 1:
            raise ValueError(
                f"runtime.max_staleness: models.{target}.pipeline_parallel is {models[target].config.pipeline_parallel}"
                ", and a pipeline takes no weights while it computes; set it to 1, or max_staleness to 0"
            )


def check_autoscale(models: Mapping[str, PlannedModel], config: RunConfig) -> None:
    """Refuse (ConfigError) `runtime.autoscale` for what is no model that samples or scores, or not by Ray."""
    if not config.runtime.autoscale:
        return
    slots = plan_slots({name: model.config for name, model in models.items()}, config.runtime.colocation)
    able = [name for name, model in models.items() if model.role is not Trainable and model.base_of is None]
    for name in config.runtime.autoscale:
        message = None
        if name not in able:
            message = f"is no model that samples or scores{suggest(name, able)}"
        elif len(slots[name].positions) > 1:
            message = "shares its devices (runtime.colocation), so its number of processes cannot change"
        elif choose_cluster(config) != "ray":
            message = "has processes that come and go only on Ray: set runtime.cluster to ray"
        if message:
            raise ConfigError([ConfigProblem(("runtime", "autoscale", name), message)])


SAMPLING = ("curriculum", "filter", "replay", "rollout")  # sections that choose the samples


def list_unread(recipe: type[Engine]) -> tuple[str, ...]:
    """List the sections that the recipe does not read."""
    return (*(() if recipe.source == "prompts" else SAMPLING), *recipe.unread)


def check_sections(config: RunConfig, recipe: type[Engine]) -> None:
    """Refuse sections that the recipe does not read."""
    why = "does not read it" if recipe.source == "prompts" else "learns from data, not from samples of a policy"
    for name in list_unread(recipe):
        if getattr(config, name) != RunConfig.model_fields[name].default:
            raise ValueError(f"{name}: `{config.algorithm}` {why}; leave it out")


def check_torchrun(syncs: Sequence[tuple[str, str]], config: RunConfig) -> None:
    """Refuse a recipe with rollouts in the processes of torchrun: none of them could sample while the others train."""
    if syncs and choose_cluster(config) == "torchrun":
        raise ValueError(
            f"runtime.cluster: `{config.algorithm}` samples from a model while another learns; torchrun's processes "
            "train one model on data (sft, dpo, reward_model, …), so start it with `coalign train`, on Ray"
        )


def check_functions_are_imported(config: RunConfig) -> None:
    """Refuse functions and classes that other processes would call and cannot import."""
    if choose_cluster(config) != "local":
        bound = [(key, text) for key, text in _texts(config.model_dump(), "") if is_bound_to_process(text)]
        if bound:
            key, name = bound[0]
            raise ValueError(
                f"{key}: '{name}' is known to this process alone, and other processes call it; define it in a "
                "module that they can import, or set `runtime.cluster` to local"
            )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of all texts in a configuration."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{key}[{index}]")


def check_packages(config: RunConfig) -> None:
    """Raise ImportError for a tracker whose client is not installed, and for Ray where it is needed and missing."""
    if choose_cluster(config) == "ray":
        from coalign.cluster.ray.space import check_ray

        check_ray()
    for tracker in config.runtime.trackers:
        if find_spec(tracker.name) is None:
            raise ImportError(
                f"runtime.trackers has '{tracker.name}', which is not installed: "
                f"pip install 'coalign[{tracker.name}]', or leave it out"
            )


def check_environment(environment: EnvironmentFunction | None, config: RunConfig) -> None:
    """Refuse wrong arguments of an environment, and a number of samples per prompt that it cannot play."""
    if environment is None:
        return
    keys = ["samples_per_prompt", *(["eval_samples"] if config.data.eval else [])]
    environment.check({f"runtime.{key}": getattr(config.runtime, key) for key in keys})
    spread = [name for name, model in config.models.items() if model.spread_samples]
    if environment.grouped and spread:
        raise ValueError(
            f"models.{spread[0]}.spread_samples: `{config.rollout.fn}` plays the samples of a prompt together, so "
            "they have to be on one replica; leave it out"
        )


def check_template(environment: EnvironmentFunction | None, config: RunConfig) -> None:
    """Refuse arguments that the chat template never reads, and one without a place for the tools of an environment.

    Such an environment has the attribute ``shows_tools``.
    """
    given, arguments = config.data.chat_template, config.data.chat_template_kwargs
    shows_tools = environment is not None and getattr(environment.fn, "shows_tools", False)
    if not (arguments or shows_tools):
        return
    name, _ = find_tokenizer_name(config)
    jinja = (
        find_chat_template(find_directory(name)) if given == "auto" else "" if given == "none" else read_template(given)
    )
    if jinja is None:
        return
    if not jinja.startswith("[{"):  # a list of templates by name: the tokenizer chooses
        try:
            read_arguments(jinja, arguments)
        except ValueError as error:
            raise ValueError(f"data.{error}") from error
    if shows_tools and not reads_tools(jinja):
        which = f"that of the tokenizer in {name}" if given == "auto" else f"`{given:.40}`"
        raise ValueError(
            f"data.chat_template: `rollout.fn: {config.rollout.fn}` shows tools to the policy, and the chat template, "
            f"{which}, has no place for them (it never reads `tools`); set one that has"
        )


def check_images(config: RunConfig, recipe: type[Engine], configs: Mapping[str, ModelConfig]) -> None:
    """Refuse images where what would read them knows text alone."""
    if config.data.images is None:
        return
    if not KINDS[recipe.source].reads_images:
        raise ValueError(f"data.images: `{config.algorithm}` reads {recipe.source}, which hold no images; leave it out")
    if config.sync.adapters == "apart":
        raise ValueError("sync.adapters is `apart`, which vLLM does not do for models that see here; use `merged`")
    for name, model in configs.items():
        if model.cache:
            raise ValueError(f"models.{name}.cache: log-probs are kept by tokens alone; leave it out with data.images")


def check_reward_lengths(rewards: Sequence[RewardConfig], longest: int, limit_key: str) -> None:
    """Refuse rewards for a length that responses of up to ``longest`` tokens (the key ``limit_key``) never reach.

    Calls a function's attribute ``check_longest``, if it has one, as ``check_longest(longest, **arguments)``.
    """
    for index, reward in enumerate(rewards):
        if reward.fn is None:
            continue
        from coalign.backends.scorers.reward_functions import resolve_reward

        fn, arguments = resolve_reward(reward, f"reward.{index}")
        if hasattr(fn, "check_longest") and (problem := fn.check_longest(longest, **arguments)):
            raise ValueError(f"reward[{index}]: {problem}, and a response has at most {longest} tokens ({limit_key})")


def check_reward_sources(rewards: Sequence[RewardConfig], train: Loader, held_out: Loader | None) -> None:
    """Refuse rewards for sources that have no rows, and sources of training rows that get no reward.

    Nothing is refused for a stream, whose rows are not known yet.
    """
    if not any(reward.sources for reward in rewards) or not train.is_known:
        return
    sources = {*train.sources, *(held_out.sources if held_out else ())}
    for index, reward in enumerate(rewards):
        for name in reward.sources:
            if name not in sources:
                raise ValueError(f"reward[{index}].sources: no row is of the source '{name}'{suggest(name, sources)}")
    for name in train.sources:
        if not any(reward.weight and (not reward.sources or name in reward.sources) for reward in rewards):
            raise ValueError(
                f"reward: no part with weight is for rows of '{name}' (data.train); add one, or leave it out"
            )


def check_guards(objective: Objective, config: RunConfig) -> None:
    """Refuse a bound on the entropy where the main model's loss can measure it and is not set to."""
    least = config.runtime.guards.min_entropy
    if least is not None and hasattr(objective.loss, "measure_entropy") and "entropy" not in objective.needs:
        raise ValueError(
            f"runtime.guards.min_entropy is {least:g}, and the loss `{objective.name}` does not measure the entropy; "
            f"set {objective.section}.measure_entropy: true"
        )


def check_it_learns(name: str, model: ModelConfig, steps: float) -> None:
    """Refuse a model whose `learns_after` is not before the last step."""
    if model.learns_after >= steps:
        raise ValueError(
            f"models.{name}.learns_after is {model.learns_after}, and the run has {steps} steps, so the model would "
            "never learn; make it smaller, or the run longer"
        )


def check_token_limits(models: Mapping[str, PlannedModel], compared: int) -> None:
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


def check_repetition_penalty(syncs: Sequence[tuple[str, str]], models: Mapping[str, PlannedModel]) -> None:
    """Refuse to train a policy on samples of a penalised distribution, whose log-probs no trainer computes."""
    for source, target in syncs:
        penalty = models[target].config.sampling.repetition_penalty
        if models[target].role is Rollout and penalty != 1:
            raise ValueError(
                f"models.{target}.sampling.repetition_penalty is {penalty:g}: it samples from another distribution "
                f"than that of the log-probs from which models.{source} learns; set it to 1 (for evaluation there is "
                "runtime.eval_sampling.repetition_penalty)"
            )


def check_routing_replay(syncs: Sequence[tuple[str, str]], config: RunConfig) -> None:
    """Refuse to replay experts where no model learns from a policy's samples; models refuse it themselves."""
    if config.rollout.routing_replay and not syncs:
        raise ValueError(f"rollout.routing_replay is true, and in `{config.algorithm}` no policy samples; leave it out")


def check_rope(models: Iterable[PlannedModel], config: RunConfig, source: str) -> None:
    """Refuse data whose sequences may be too long for rotary embeddings that change with a row's longest sequence.

    Where prompts are continued, the engine ends sequences in time.
    """
    from coalign.backends.pretrained import find_rope_limit

    for model in models:
        if source == "prompts" or model.role is not Trainable or not model.config.load:
            continue
        limit = find_rope_limit(model.config)
        if limit and (config.data.max_tokens is None or config.data.max_tokens > limit[1]):
            raise ValueError(
                f"data.max_tokens is {config.data.max_tokens}: rotary embeddings of models.{model.name} (type "
                f"`{limit[0]}`) change above {limit[1]} tokens with the longest sequence of a row, so the others would "
                f"be computed wrongly; set it to {limit[1]} or less"
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


def check_adapters(syncs: Sequence[tuple[str, str]], models: Mapping[str, PlannedModel], config: RunConfig) -> None:
    """Refuse to sync adapters separately where there are none, or where a model cannot send or receive them."""
    if config.sync.adapters != "apart":
        return
    setting, instead = "sync.adapters is `apart`", "use `merged`, which is the default"
    if not syncs:
        raise ValueError(f"{setting}, and in `{config.algorithm}` no weights travel between models; leave it out")
    for source, target in syncs:
        lora = models[source].config.lora
        if lora is None:
            raise ValueError(f"{setting}, and models.{source} has no adapters: give it `lora`, or {instead}")
        if lora.dora:
            raise ValueError(f"{setting}, and the magnitudes of models.{source}.lora.dora have to be merged; {instead}")
        for model in (models[source], models[target]):
            if not model.module.adapters:
                named = f"models.{model.name}.module, `{model.config.module}`"
                raise ValueError(f"{setting}, and {named}, knows merged weights only; {instead}")
