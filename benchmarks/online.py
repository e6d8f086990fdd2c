"""Algorithms × seeds on the sums of examples/arithmetic.py, from one SFT model, in steps of 128 prompts × 8 samples.

`python benchmarks/online.py [NAME …] [--seeds 0 1 2] [--steps 150] [--folder runs/online]` trains what is missing, one
cell after the other, and prints the table. A finished cell is kept (`result.json`), one that was cut goes on from its
last checkpoint: run the same command again.
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

from coalign import load_config  # noqa: E402
from coalign.launch.run import train  # noqa: E402
from coalign.report.display import Display  # noqa: E402

ALGORITHMS = ["grpo", "dapo", "gspo", "rloo", "reinforce_pp", "ppo", "online_dpo"]


def prepare(folder: Path) -> None:
    """Model, data and the SFT model that every cell begins with."""
    os.environ["SUMS"] = str(folder)
    if not (folder / "model").exists():
        make_model(folder / "model")
        make_data(folder / "data")
    if not (folder / "sft" / "model").exists():
        learn("sft")


def learn(name: str, *overrides: str) -> Path:
    """Train examples/arithmetic_<name>.yaml with these settings; the run folder."""
    source = EXAMPLES / f"arithmetic_{name}.yaml"
    config = load_config(source, overrides)
    if code := train(config, Display(quiet=True)):
        sys.exit(code)  # Ctrl-C: the cell is saved and goes on next time
    return Path(config.output)


def cell(name: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """What one run came to; trains it if that is not known yet."""
    output = folder / name / f"{steps}_steps" / f"seed_{seed}"
    result = output / "result.json"
    if not result.exists():
        settings = {"steps": steps, "save_every": 25, "keep": 1, "plots": "false"}
        overrides = [f"runtime.{key}={value}" for key, value in settings.items()]
        run = learn(name, f"seed={seed}", f"output={output}", *overrides)
        result.write_text(json.dumps(measured(run)))
    return json.loads(result.read_text())


def measured(run: Path) -> dict[str, Any]:
    """From a run's metrics: greedy accuracy before and after, and what it took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    accuracy = [line["eval/mean@1"] for line in lines if "eval/mean@1" in line]
    total = {
        what: sum(line.get(what, 0) for line in lines) for what in ("tokens/generated", "tokens/trained", "time/step")
    }
    return {"before": accuracy[0], "after": accuracy[-1], **total}


def table(cells: dict[str, list[dict[str, Any]]]) -> str:
    """Means over the seeds; ± is their sample standard deviation. Tokens are those of one run."""

    def spread(values: list[float]) -> str:
        around = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{100 * statistics.fmean(values):.1f}{around}"

    def mean(results: list[dict[str, Any]], what: str) -> str:
        return f"{statistics.fmean(result[what] for result in results):,.0f}"

    rows = [
        "| | seeds | before % | after % | gain, points | least gain | tokens generated | trained | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in cells.items():
        gains = [result["after"] - result["before"] for result in results]
        taken = [mean(results, what) for what in ("tokens/generated", "tokens/trained", "time/step")]
        before, after = (spread([result[when] for result in results]) for when in ("before", "after"))
        columns = [name, len(results), before, after, spread(gains), f"{100 * min(gains):.1f}", *taken]
        rows.append("| " + " | ".join(str(column) for column in columns) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=ALGORITHMS, metavar="NAME", help="of examples/arithmetic_NAME.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=Path("runs/online"))
    given = parser.parse_args()
    prepare(given.folder)
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in given.names}
    for seed in given.seeds:  # a first seed of every algorithm before a second of any
        for name in given.names:
            begun = time.perf_counter()
            cells[name].append(cell(name, seed, given.steps, given.folder))
            found = cells[name][-1]
            print(f"{name}, seed {seed}: {found['after']:.1%} ({time.perf_counter() - begun:.0f} s)", flush=True)
    print("\n" + table(cells))


if __name__ == "__main__":
    main()
