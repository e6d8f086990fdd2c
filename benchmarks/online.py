"""Algorithms × seeds on the sums of `make demo`, from one SFT model, each within the same budget of trained tokens.

`python benchmarks/online.py [NAME …] [--seeds 0 1 2] [--tokens 500000] [--folder runs/online]` trains what is missing,
one cell after the other, and prints the table of what there is. A finished cell is kept (`result.json`), one that was
cut goes on from its last checkpoint: run the same command again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from arithmetic import make_data, make_model  # noqa: E402

from coalign.config import load  # noqa: E402
from coalign.runtime.build import recipe  # noqa: E402
from coalign.runtime.display import Display  # noqa: E402
from coalign.runtime.run import train  # noqa: E402

ALGORITHMS = ["grpo", "dapo", "gspo", "rloo", "reinforce_pp", "ppo", "online_dpo"]
MOST_STEPS = 100_000  # the budget of tokens ends a run


def prepare(folder: Path, *overrides: str) -> None:
    """Model, data and the SFT model that every cell begins with."""
    os.environ["DEMO"] = str(folder)
    if not (folder / "model").exists():
        make_model(folder / "model")
        make_data(folder / "data")
    if not (folder / "sft" / "model").exists():
        learn("sft", *overrides)


def learn(name: str, *overrides: str) -> Path:
    """Train examples/arithmetic_<name>.yaml with these settings; the run folder."""
    source = EXAMPLES / f"arithmetic_{name}.yaml"
    config = load(source, list(overrides), defaults=lambda algorithm: recipe(algorithm).defaults)
    if code := train(config, Display(quiet=True)):
        sys.exit(code)  # Ctrl-C: the cell is saved and goes on next time
    return Path(config.output)


def cell(name: str, seed: int, tokens: int, folder: Path) -> dict[str, Any]:
    """What one run came to; trains it if that is not known yet."""
    output = folder / name / f"{tokens}" / f"seed_{seed}"
    result = output / "result.json"
    if not result.exists():
        schedule = "models.trainer.optimizer"
        run = learn(
            name,
            *(f"seed={seed}", f"output={output}", f"runtime.tokens={tokens}", f"runtime.steps={MOST_STEPS}"),
            *(f"{schedule}.unit=tokens", "runtime.save_every=25", "runtime.keep=1", "runtime.plots=false"),
        )
        result.write_text(json.dumps(measured(run)))
    return json.loads(result.read_text())


def measured(run: Path) -> dict[str, Any]:
    """From a run's metrics: greedy accuracy before and after, and what it took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["eval/mean@1"] for line in lines if "eval/mean@1" in line]
    total = {
        what: sum(line.get(what, 0) for line in lines) for what in ("tokens/generated", "tokens/trained", "time/step")
    }
    return {"before": accuracy[0], "after": accuracy[-1], "steps": lines[-1]["step"], **total}


def table(cells: dict[str, list[dict[str, Any]]]) -> str:
    """Means over the seeds; ± is their sample standard deviation."""

    def spread(values: list[float]) -> str:
        around = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{100 * statistics.fmean(values):.1f}{around}"

    def mean(results: list[dict[str, Any]], what: str) -> str:
        return f"{statistics.fmean(result[what] for result in results):,.0f}"

    rows = [
        "| | seeds | before % | after % | gain, points | least gain | steps | tokens trained | generated | s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in cells.items():
        gains = [result["after"] - result["before"] for result in results]
        taken = [mean(results, what) for what in ("steps", "tokens/trained", "tokens/generated", "time/step")]
        before, after = (spread([result[when] for result in results]) for when in ("before", "after"))
        columns = [name, len(results), before, after, spread(gains), f"{100 * min(gains):.1f}", *taken]
        rows.append("| " + " | ".join(str(column) for column in columns) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=ALGORITHMS, metavar="NAME", help="of examples/arithmetic_NAME.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=500_000, help="that each run is trained on")
    parser.add_argument("--folder", type=Path, default=Path("runs/online"))
    given = parser.parse_args()
    prepare(given.folder)
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in given.names}
    for seed in given.seeds:  # a first seed of every algorithm before a second of any
        for name in given.names:
            begun = time.perf_counter()
            cells[name].append(cell(name, seed, given.tokens, given.folder))
            found = cells[name][-1]
            print(f"{name}, seed {seed}: {found['after']:.1%} ({time.perf_counter() - begun:.0f} s)", flush=True)
    print("\n" + table(cells))


if __name__ == "__main__":
    main()
