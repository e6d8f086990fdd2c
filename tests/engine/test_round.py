"""A round that waits over a restart: its batches, and its metrics as they were."""

import json

import torch

from coalign.cluster.base import LocalCluster
from coalign.config.schema import RunConfig
from coalign.data.batch import Batch
from coalign.engine.environment import Round
from coalign.types import EffectiveSize, Max, Stat, Total, merge_stats


def test_every_kind_of_metric_goes_on_to_be_merged():
    of_weights = EffectiveSize.of(torch.tensor([1.0, 3.0]))
    before = {"mean": Stat(3.0, 2.0), "most": Max(5.0), "count": Total(7.0), "share": of_weights}
    with LocalCluster(RunConfig(algorithm="none")) as cluster:
        groups = cluster.put(Batch(torch.ones(2), {}, {"group": torch.tensor([4, 4])}))
        state = Round(version=3, target=1, batches={"groups": groups}, before=before).state_dict()
        stats = json.loads(json.dumps(state["stats"]))
        restored = Round.restore(state | {"stats": stats}, cluster)
        batches, again = restored.wait()
        assert (restored.version, restored.target) == (3, 1) and batches["groups"].fetch()["group"].tolist() == [4, 4]
    assert again == before
    later = {"mean": Stat(1.0), "most": Max(6.0), "count": Total(1.0), "share": EffectiveSize.of(torch.tensor([2.0]))}
    merged = merge_stats([again, later])
    assert [merged[name].value for name in ("mean", "most", "count")] == [4 / 3, 6.0, 8.0]
    assert merged["share"].value == 36 / (3 * 14)  # of the weights 1, 3, 2 together
