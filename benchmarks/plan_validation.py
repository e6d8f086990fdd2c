"""Predicted against published: how far the planner is off on public tables, and how often its direction is right.

    python benchmarks/plan_validation.py [TABLE.csv ...] [--rows] [--fit] [--constants FILE]

Without tables: those of data/planner. Prints for each table the median and worst error with the constants as shipped,
and with constants fitted on the other tables only; and in how many pairs of rows (the same work in two ways that
differ by 5 % and more) the faster one is predicted to be so. ``--fit`` finds these constants again and writes them to
data/planner/fits.json (some minutes). ``--rows`` prints every row. A table of one's own needs the columns of one of
these kinds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

from plan_tables import DATA, PublicTable, PublishedFigure, read_table

from coalign.planner.constants import Constants

TIE = 1.05  # rows whose published figures are nearer than this are no pair
FITS = DATA / "fits.json"
# Constants that fits may change, and how sure their physical defaults are (standard deviation of the logarithm).
FITTED = {
    "matmul": 0.1, "narrow_matmul": 0.15, "attention": 0.2, "memory": 0.1, "traffic": 0.3, "link": 0.2, "network": 0.3,
    "overlap": 0.3, "tile": 0.4, "expert_launches": 0.4, "layer": 0.5, "eager_layer": 0.5, "sequence": 0.5, "decode_step": 0.7,
    "sync_tensor": 0.7, "sample": 0.7,
}  # fmt: skip


@dataclass(frozen=True)
class TableResult:
    """Errors of one table's counted rows; how many pairs it has, and those whose direction is predicted wrongly."""

    name: str
    errors: tuple[float, ...]
    worst: str
    pairs: int
    wrong: tuple[str, ...]

    @property
    def right(self) -> int:
        return self.pairs - len(self.wrong)

    @property
    def median(self) -> float:
        return statistics.median(self.errors) if self.errors else math.nan


def read_tables(paths: Sequence[Path]) -> list[PublicTable]:
    """Read tables; phases of a step are a table of their own."""
    tables = []
    for path in paths:
        table = read_table(path)
        names = list(dict.fromkeys(figure.table for figure in table.figures)) or [table.name]
        for name in names:
            own = [figure for figure in table.figures if figure.table == name]
            tables.append(PublicTable(name, own, table.refused if name == table.name else []))
    return tables


def judge_table(table: PublicTable, constants: Constants) -> TableResult:
    """Compare a table's figures with predictions."""
    predicted = [figure.predict(constants) for figure in table.figures]
    errors = [
        (abs(value / figure.published - 1), figure.name)
        for figure, value in zip(table.figures, predicted, strict=True)
        if figure.is_counted
    ]
    worst = max(errors, default=(math.nan, ""))
    pairs, wrong = 0, []
    for (a, x), (b, y) in combinations(zip(table.figures, predicted, strict=True), 2):
        if is_pair(a, b):
            pairs += 1
            if (a.published < b.published) != (x < y):
                wrong.append(f"{a.name} {x / y:.2f} of {b.name}, published {a.published / b.published:.2f}")
    return TableResult(table.name, tuple(error for error, _ in errors), worst[1], pairs, tuple(wrong))


def is_pair(a: PublishedFigure, b: PublishedFigure) -> bool:
    """Whether two rows do the same work in different ways with clearly different published results."""
    if not a.workload or a.workload != b.workload or a.layout == b.layout:
        return False
    return max(a.published, b.published) >= TIE * min(a.published, b.published)


def loss(tables: Sequence[PublicTable], constants: Constants, defaults: Constants) -> float:
    """Mean over tables of the mean absolute logarithm of predicted over published, and the distance from the defaults."""
    total = 0.0
    for table in tables:
        logs = [abs(math.log(f.predict(constants) / f.published)) for f in table.figures if f.is_counted]
        if logs:
            logs.sort()
            logs = logs[: max(1, math.ceil(0.9 * len(logs)))]  # without the tenth that fits worst
            total += sum(logs) / len(logs)
    total /= max(1, len(tables))
    distance = sum(
        (math.log(getattr(constants, name) / getattr(defaults, name)) / width) ** 2 for name, width in FITTED.items()
    )
    return total + 0.004 * distance


def fit(tables: Sequence[PublicTable], start: Constants, defaults: Constants, rounds: int = 2) -> Constants:
    """Fit constants to tables, one after another, near physical defaults."""
    best, value = start, loss(tables, start, defaults)
    for step in [1.25, 1.1, 1.05][:rounds]:
        for name in FITTED:
            for factor in (step, 1 / step):
                while True:
                    moved = getattr(best, name) * factor
                    if name in ("overlap", "memory", "matmul", "link", "network") and moved > 1:
                        break
                    trial = replace(best, **{name: moved})
                    if (trial_value := loss(tables, trial, defaults)) >= value:
                        break
                    best, value = trial, trial_value
    return best


def load_fits() -> dict[str, Constants]:
    """Return the constants that were fitted without each table."""
    content = json.loads(FITS.read_text(encoding="utf-8"))
    return {name: Constants(**values) for name, values in content.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--fit", action="store_true", help="fit the constants of each table on the others again")
    parser.add_argument("--only", help="tables whose names contain this")
    args = parser.parse_args()
    paths = args.tables or sorted(DATA.glob("*.csv"))
    tables = [table for table in read_tables(paths) if not args.only or args.only in table.name]
    shipped = Constants()
    if args.fit:
        fits = {}
        for table in tables:
            kin = table.name.removesuffix("_phases")
            others = [other for other in tables if other.name.removesuffix("_phases") != kin]
            fits[table.name] = fit(others, shipped, shipped)
            print(f"fitted without {table.name}", flush=True)
        FITS.write_text(json.dumps({n: asdict(c) for n, c in fits.items()}, indent=1) + "\n", encoding="utf-8")
    fits = load_fits() if FITS.exists() else {}
    print(f"{'table':34}{'rows':>5}{'median':>8}{'worst':>8}{'others':>8}{'pairs right':>13}  worst row")
    totals: dict[str, int] = defaultdict(int)
    for table in tables:
        result = judge_table(table, shipped)
        other = judge_table(table, fits[table.name]).median if table.name in fits and not args.tables else math.nan
        print(
            f"{table.name:34}{len(result.errors):5}{result.median:8.0%}{max(result.errors, default=math.nan):8.0%}"
            f"{other:8.0%}{f'{result.right} of {result.pairs}':>13}  {result.worst}"
        )
        totals["right"] += result.right
        totals["pairs"] += result.pairs
        totals["refused"] += len(table.refused)
        if args.rows:
            for figure in table.figures:
                value = figure.predict(shipped)
                mark = "" if figure.is_counted else "  (direction only)"
                print(f"    {value / figure.published - 1:+7.0%} {figure.published:10.2f} s{value:10.2f} s  {figure.name}{mark}")
            for line in result.wrong:
                print(f"    wrong direction: {line}")
        for line in table.refused:
            print(f"    not read: {line}")
    share = totals["right"] / max(1, totals["pairs"])
    print(f"direction right in {totals['right']} of {totals['pairs']} pairs ({share:.0%}); rows not read: {totals['refused']}")


if __name__ == "__main__":
    main()
