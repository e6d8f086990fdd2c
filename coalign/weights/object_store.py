"""Transport through the cluster's object store: the source's first rank puts buckets there, every target reads them.

Two phases: all ranks of all targets verify the checksums, then all install. So a damaged tensor leaves every replica
serving the version it had.
"""

from __future__ import annotations

from typing import Any

from coalign.weights.buckets import pack
from coalign.weights.transport import Model


def through_store(source: Model, target: Model, version: int, changing: bool) -> int:
    """Move the weights; the bytes moved to each target."""
    references, moved = source.run(export_buckets, changing).result()[0]
    target.run(verify_buckets, references, fatal=False).result()
    target.run(install_buckets, references, version).result()
    return moved


def export_buckets(module: Any, store: Any, changing: bool) -> tuple[list[Any], int]:
    """References to the buckets, and their bytes; on every rank but the first nothing is kept."""
    if module.context.rank:
        for _ in module.export_weights(changing=changing):  # collectives: all ranks gather each tensor
            pass
        return [], 0
    references, moved = [], 0
    for bucket in pack(module.export_weights(changing=changing)):
        references.append(store.put(bucket))
        moved += sum(len(packed.data) for packed in bucket)
    return references, moved


def verify_buckets(module: Any, store: Any, references: list[Any]) -> None:
    """Raises WeightError unless everything arrived as it was sent."""
    for reference in references:
        for packed in store.get(reference):
            packed.verify()


def install_buckets(module: Any, store: Any, references: list[Any], version: int) -> None:
    """Serve these weights from now on."""
    arrived = (packed for reference in references for packed in store.get(reference))
    weights = ((packed.name, packed.tensor()) for packed in arrived)
    module.load_weights(weights, version=version, adopt=False)
