"""Predicted against published: how far the planner is off on public tables, and how often its direction is right.

    python benchmarks/plan_validation.py [TABLE.csv ...] [--rows] [--fit] [--constants FILE]

Without tables: those of data/planner. Prints for each table the median and worst error with the constants as shipped,
and with constants fitted on tables of other sources only; and in how many pairs of rows (the same work in two ways that
differ by 5 % and more) the faster one is predicted to be so. ``--fit`` finds these constants again and writes them to
data/planner/fits.json. ``--rows`` prints every row. A table of one's own needs the columns of one of
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

import numpy as np
from plan_tables import DATA, PublicTable, PublishedFigure, read_table

from coalign_plan.constants import Constants

TIE = 1.05  # rows whose published figures are nearer than this are no pair
FITS = DATA / "fits.json"
# What a person would assume before any fit, and how sure that is (standard deviation of the logarithm).
PRIORS = Constants(
    matmul=0.92, narrow_matmul=0.8, attention=0.58, memory=0.8, traffic=2.0, tile=100.0, expert_launches=2.5,
    link=0.7, network=0.6, overlap=0.5, layer=40e-6, eager_layer=450e-6, sequence=10e-6, decode_step=2e-3,
    sync_tensor=0.6e-3, sample=1.5e-3,
)  # fmt: skip
PRIOR_WIDTHS = {
    "matmul": 0.1, "narrow_matmul": 0.15, "attention": 0.2, "memory": 0.1, "traffic": 0.3, "tile": 0.4,
    "expert_launches": 0.4, "link": 0.2, "network": 0.3, "overlap": 0.3, "layer": 0.5, "eager_layer": 0.5,
    "sequence": 0.5, "decode_step": 0.5, "sync_tensor": 0.5, "sample": 0.7,
}  # fmt: skip
SHARES = ("matmul", "narrow_matmul", "memory", "link", "network", "overlap")  # cannot be above 1
HUBER = 0.25  # a residual beyond which a row pulls no harder
CAUTION = 0.02  # weight of the priors against a table
STEP = 0.05


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


class ConstantsFit:
    """Fits the logarithms of constants to tables by Gauss-Newton steps with Huber's weights, near physical priors.

    The derivatives of all rows are taken once at the priors and once at the fit to all tables. A fit without some
    tables is the same least squares without their rows.
    """

    def __init__(self, tables: Sequence[PublicTable], rows: int = 24) -> None:
        self.figures = []
        self.weights = []
        for table in tables:
            counted = [figure for figure in table.figures if figure.is_counted]
            counted = counted[:: 1 + len(counted) // rows]
            self.figures += counted
            self.weights += [1 / len(counted) for _ in counted]
        self.widths = np.array(list(PRIOR_WIDTHS.values()))
        self.at, self.logs, self.slopes = self._differentiate(np.zeros(len(PRIOR_WIDTHS)))
        self.at, self.logs, self.slopes = self._differentiate(self.solve())

    def solve(self, without: str | None = None) -> np.ndarray:
        """Return the fit to all tables but those whose names begin with ``without``, as logarithms over the priors."""
        kept = np.array([without is None or not figure.table.startswith(without) for figure in self.figures])
        logs, slopes = self.logs[kept], self.slopes[kept]
        even = np.array(self.weights)[kept]
        moved = self.at.copy()
        for _ in range(20):
            residuals = logs + slopes @ (moved - self.at)
            weights = even * np.minimum(1, HUBER / np.maximum(np.abs(residuals), 1e-9))
            left = slopes.T @ (weights[:, None] * slopes) + np.diag(CAUTION / self.widths**2)
            right = slopes.T @ (weights * (slopes @ self.at - logs))
            moved = np.minimum(np.linalg.solve(left, right), _highest())
        return moved

    def _differentiate(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logs = self._predict(at)
        slopes = []
        for index in range(len(at)):
            step = np.zeros(len(at))
            step[index] = STEP
            slopes.append((self._predict(at + step) - logs) / STEP)
        return at, logs, np.stack(slopes, axis=1)

    def _predict(self, at: np.ndarray) -> np.ndarray:
        constants = move_constants(at)
        return np.array([math.log(figure.predict(constants) / figure.published) for figure in self.figures])


def find_source(name: str, names: Sequence[str]) -> str:
    """Return the shortest name that a table's begins with: other tables of its source begin with it, too."""
    return min((other for other in names if name.startswith(other)), key=len)


def move_constants(logs: np.ndarray) -> Constants:
    """Return the priors, moved by these logarithms."""
    names = zip(PRIOR_WIDTHS, logs, strict=True)
    return replace(PRIORS, **{name: float(f"{getattr(PRIORS, name) * math.exp(log):.3g}") for name, log in names})


def _highest() -> np.ndarray:
    return np.array([-math.log(getattr(PRIORS, name)) if name in SHARES else math.inf for name in PRIOR_WIDTHS])


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
        search = ConstantsFit(tables)
        fits = {"all": move_constants(search.solve())}
        print("fitted to all:", {name: getattr(fits["all"], name) for name in PRIOR_WIDTHS})
        names = [table.name for table in tables]
        for name in names:
            fits[name] = move_constants(search.solve(find_source(name, names)))
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
                off = value / figure.published - 1
                print(f"    {off:+7.0%} {figure.published:10.2f} s{value:10.2f} s  {figure.name}{mark}")
            for line in result.wrong:
                print(f"    wrong direction: {line}")
        for line in table.refused:
            print(f"    not read: {line}")
    share = totals["right"] / max(1, totals["pairs"])
    print(f"direction right in {totals['right']} of {totals['pairs']} pairs ({share:.0%})")
    print(f"rows not read: {totals['refused']}")


if __name__ == "__main__":
    main()
