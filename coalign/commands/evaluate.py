"""Commands on a run beside training it: evaluate, inspect its data."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path

from coalign.config.schema import RunConfig
from coalign.report.display import Display


def evaluate(config: RunConfig, model: Path | None) -> dict[str, float]:
    """The metrics of a run's evaluation set, with ``model`` in place of the directory that the model learns from.

    The reference and other frozen models stay those of the run."""
    from coalign.cluster.start import start
    from coalign.engine.hooks.run_folder import flatten
    from coalign.launch.build import build, prepare, recipe

    names = recipe(config.algorithm).evaluates
    if not config.data.eval:
        raise ValueError("data.eval: there is nothing to evaluate on; name a file")
    if model is not None:
        given = {"load": str(model), "init": "load", "head_init": "load", "lora": None}
        main = config.models[names[0]].model_copy(update=given)
        config = config.model_copy(update={"models": {**config.models, names[0]: main}})
    cls, models = prepare(config)
    cluster = start(config)
    try:
        engine = build(cls, models, config, cluster, only=names)
        stats, _ = engine.evaluator.evaluate()
    finally:
        cluster.shutdown()
    return flatten(stats)


def inspect(config: RunConfig, rows: int, display: Display, *, tokens: bool = False) -> None:
    """Show the first rows of the training data as the trainer will see them."""
    from coalign.commands.inspect_data import describe, split_groups
    from coalign.launch.build import load_tokenizer, loader, recipe

    tokenizer = load_tokenizer(config)
    data = loader(config, recipe(config.algorithm), tokenizer, "train")
    drawn = list(islice((group for _ in count() for group in split_groups(data.next())), rows))
    display.show(data.report())  # a stream knows only of rows that were drawn
    for group in drawn:
        display.show(describe(group, tokenizer, tokens=tokens))
