"""What `coalign check` sends through a flow has the columns of what training sends."""

import pytest

from coalign.cluster.dry import STANDINS
from coalign.data.kinds import KINDS
from tests.data.reading import batch

ROW = {
    "prompt": "a", "answer": "b", "chosen": "b", "rejected": "c", "label": True,
    "steps": ["b", "c"], "labels": [True, False], "text": "abc",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_columns_and_their_types(kind):
    assert set(STANDINS) == set(KINDS)
    real, standin = batch(kind, ROW, ROW), STANDINS[kind]()
    types = lambda b: {n: getattr(c, "dtype", list) for n, c in {**b.token, **b.sequence}.items()}  # noqa: E731
    assert types(real) == types(standin)
    assert set(real.token) == set(standin.token)
    assert {n: c.shape[1:] for n, c in real.token.items()} == {n: c.shape[1:] for n, c in standin.token.items()}
