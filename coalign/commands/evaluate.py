"""`coalign evaluate` and `coalign inspect-data`: measure a run's model, or show its data, without training."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path

from coalign.cluster.base import start_cluster
from coalign.commands.inspect_data import describe, split_groups
from coalign.config.schema import RunConfig
from coalign.engine.hooks.run_folder import flatten_stats
from coalign.engine.reward import list_reward_parts
from coalign.launch.build import build, load_split, load_tokenizer
from coalign.launch.plan import find_recipe, plan_reward_models, prepare
from coalign.report.display import Display


def evaluate(config: RunConfig, model: Path | None) -> dict[str, float]:
    """Return the metrics on a run's evaluation set, with ``model`` in place of the directory that training starts from.

    The reference and other frozen models stay those of the run. Raises ValueError without evaluation data.
    """
    names = find_recipe(config.algorithm).evaluates
    if not config.data.eval:
        raise ValueError("data.eval: there is nothing to evaluate on; name a file")
    if model is not None:
        changes = {"load": str(model), "init": "load", "head_init": "load", "lora": None}
        main = config.models[names[0]].model_copy(update=changes)
        config = config.model_copy(update={"models": {**config.models, names[0]: main}})
    plan = prepare(config).restrict(names)
    with start_cluster(config) as cluster:
        engine = build(plan, cluster)
        assert engine.evaluator is not None  # the configuration has evaluation data
        stats, _ = engine.evaluator.evaluate()
    return flatten_stats(stats)


def show_data(config: RunConfig, rows: int, display: Display, *, tokens: bool = False) -> None:
    """Show the first rows of the training data as the trainer sees them; with ``tokens`` every token, too."""
    tokenizer = load_tokenizer(config, plan_reward_models(list_reward_parts(config), config))
    data = load_split(config, find_recipe(config.algorithm).source, tokenizer, "train")
    drawn = list(islice((group for _ in count() for group in split_groups(data.next())), rows))
    display.show(data.report())  # after drawing: a stream knows only of rows that were drawn
    for group in drawn:
        display.show(describe(group, tokenizer, tokens=tokens))
