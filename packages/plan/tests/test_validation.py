"""Predictions against the public tables: the bounds that the planner promises.

The constants of each table were fitted without any of its source (``python benchmarks/plan_validation.py --fit``).
"""

import csv
import importlib
import sys

import pytest

from coalign_plan.constants import Constants
from packages.plan.tests.shapes import BENCHMARKS

MEDIAN, DIRECTION = 0.25, 0.9


@pytest.fixture(scope="module")
def validation():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("plan_validation")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def tables(validation):
    return validation.read_tables(sorted((BENCHMARKS / "data/planner").glob("*.csv")))


def test_every_row_is_read(tables):
    assert not [line for table in tables for line in table.refused]
    assert sum(len(table.figures) for table in tables) > 500


def test_medians_of_tables_that_their_constants_have_not_seen(validation, tables):
    fits = validation.load_fits()
    for table in tables:
        if table.name.endswith("_phases") or not any(figure.is_counted for figure in table.figures):
            continue
        assert validation.judge_table(table, fits[table.name]).median <= MEDIAN, table.name


def test_directions(validation, tables):
    results = [validation.judge_table(table, Constants()) for table in tables]
    pairs, right = sum(result.pairs for result in results), sum(result.right for result in results)
    assert pairs > 100
    assert right >= DIRECTION * pairs, [line for result in results for line in result.wrong]


def test_shipped_constants_are_those_fitted_to_all_tables(validation):
    fitted = validation.load_fits()["all"]
    for name in validation.PRIOR_WIDTHS:
        assert getattr(Constants(), name) == pytest.approx(getattr(fitted, name), rel=0.06), name


def test_tables_of_ones_own_are_recognised_and_refused_by_row(validation, tmp_path):
    file = tmp_path / "mine.csv"
    columns = ["gpu", "model", "n_gpus", "precision", "gbs", "mbs", "seq_len", "tokens_s_gpu"]
    with open(file, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerows([columns, ["H100", "Llama-3.1-8B", 8, "bf16", 128, 1, 8192, 9000]])
        writer.writerows([["H900", "Llama-3.1-8B", 8, "bf16", 128, 1, 8192, 9000]])
        writer.writerows([["H100", "Unheard-of-7B", 8, "bf16", 128, 1, 8192, 9000]])
    (table,) = validation.read_tables([file])
    assert len(table.figures) == 1
    assert "line 3: GPU 'H900' is not known" in table.refused[0]
    assert "line 4: model 'Unheard-of-7B' is not in models.json" in table.refused[1]
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns of no kind"):
        validation.read_tables([file])
