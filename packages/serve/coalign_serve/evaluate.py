"""`coalign eval`: measures a run's model on its evaluation set, without training."""

from __future__ import annotations

from pathlib import Path

from coalign.cluster.choice import start_cluster
from coalign.cluster.placement.nodes import find_accelerator
from coalign.config.errors import located_at
from coalign.config.schema import RunConfig
from coalign.engine.hooks.run_folder import flatten_stats
from coalign.launch.data_load import load_data
from coalign.launch.fetch import fetch_sources
from coalign.launch.plan import find_recipe, prepare
from coalign.report.display import Display
from coalign_serve.run_model import choose_dtype, find_model


def evaluate(config: RunConfig, model: Path | None, display: Display, dtype: str = "auto") -> dict[str, float]:
    """Return the metrics on a run's evaluation set, with ``model`` in place of the directory that training starts from.

    ``dtype`` is that of ``model``; for `auto` a model of 16 bits is computed in bfloat16 where `choose_dtype` says so,
    and another as the run says. ``display`` shows a bar meanwhile. The reference and other frozen models stay those of
    the run. Raises ValueError without evaluation data.
    """
    names = find_recipe(config.algorithm).evaluates
    if not config.data.eval:
        raise ValueError("data.eval: there is nothing to evaluate on; name a file")
    if model is not None:
        with located_at("--model"):
            directory = find_model(str(model))
        changes = {"load": directory, "init": "load", "head_init": "load", "lora": None}
        main = config.models[names[0]].model_copy(update=changes)
        config = config.model_copy(update={"models": {**config.models, names[0]: main}})
    config = fetch_sources(config)
    if model is not None:
        config = _set_dtype(config, names[0], dtype)
        main = config.models[names[0]]
        display.note(f"{model}: {main.compute_dtype or main.dtype}")
    plan = prepare(config)
    plan = plan.restrict([*names, *(name for name in plan.roles if name not in plan.recipe.models)])
    with start_cluster(plan.config, plan.started) as cluster:
        engine = plan.recipe(plan, cluster, load_data(plan))
        assert engine.evaluator is not None  # the configuration has evaluation data
        stats, _ = engine.evaluator.evaluate(display)
    return flatten_stats(stats)


def _set_dtype(config: RunConfig, name: str, dtype: str) -> RunConfig:
    main = config.models[name]
    device = find_accelerator(config.runtime.accelerator).device if main.devices else "cpu"
    chosen = choose_dtype(dtype, str(main.load), device)
    if dtype == "auto" and chosen == "float32":
        return config
    main = main.model_copy(update={"dtype": chosen, "compute_dtype": None})
    return config.model_copy(update={"models": {**config.models, name: main}})
