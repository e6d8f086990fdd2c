"""Does asynchronous training end at the same reward? GRPO on sums with several seeds and values of `max_staleness`.

    python examples/arithmetic.py       # the model that it begins with: about a minute
    python benchmarks/staleness.py      # nine runs of 75 steps; curves in runs/staleness/curves.png
    python benchmarks/staleness.py --staleness 1 4 --set loss.is_level=token --folder runs/weighted

Prints the accuracy on held-out sums at the end, its mean over the seeds with the standard error, and how old the tokens
were that steps trained on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import coalign

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic_grpo.yaml"
ACCURACY = "eval/mean@1"


def train(folder: Path, staleness: int, seed: int, steps: int, others: Sequence[str]) -> coalign.TrainResult:
    """Return the result of one run with ``others`` (KEY=VALUE) set, too; it goes on if it was interrupted."""
    settings: dict[str, object] = dict(each.split("=", 1) for each in others)
    settings |= {
        "seed": seed,
        "output": str(folder / f"staleness_{staleness}_seed_{seed}"),
        "runtime.max_staleness": staleness,
        "runtime.steps": steps,
        "runtime.eval_every": steps // 5,
        "runtime.plots": False,
    }
    return coalign.train(CONFIG, settings, quiet=True)


def draw(path: Path, curves: dict[int, list[list[tuple[int, float]]]]) -> None:
    """Draw the mean accuracy by step for each staleness, and the range of its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for staleness, runs in curves.items():
        steps = [step for step, _ in runs[0]]
        values = [[value for _, value in run] for run in runs]
        columns = list(zip(*values, strict=True))
        [line] = axes.plot(steps, [mean(column) for column in columns], label=f"max_staleness {staleness}")
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="accuracy on held-out sums")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(staleness: int, accuracies: Sequence[float], ages: Sequence[float]) -> None:
    error = stdev(accuracies) / len(accuracies) ** 0.5 if len(accuracies) > 1 else float("nan")
    each = ", ".join(f"{value:.1%}" for value in accuracies)
    print(f"max_staleness {staleness}: {mean(accuracies):.1%} ± {error:.1%} ({each}); tokens {mean(ages):.2f} old")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"))
    options = parser.parse_args()
    os.environ["SUMS"] = os.environ.get("SUMS", str(Path("runs/sums").absolute()))
    curves: dict[int, list[list[tuple[int, float]]]] = {}
    for staleness in options.staleness:
        accuracies, ages = [], []
        for seed in options.seeds:
            lines = train(options.folder, staleness, seed, options.steps, options.set).metrics
            curve = [(line["step"], line[ACCURACY]) for line in lines if ACCURACY in line]
            curves.setdefault(staleness, []).append(curve)
            accuracies.append(curve[-1][1])
            ages += [line["samples/staleness"] for line in lines if "samples/staleness" in line]
        report(staleness, accuracies, ages)
    draw(options.folder / "curves.png", curves)


if __name__ == "__main__":
    main()
