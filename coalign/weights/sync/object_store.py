"""Transport through the cluster's object store: senders put buckets there, and every target rank reads them.

It works wherever the models are, also when they take turns on their devices.
"""

from __future__ import annotations

from typing import Any

from coalign.cluster.future import Store
from coalign.weights.sync.buckets import pack
from coalign.weights.sync.transport import (
    ExportRequest,
    SentWeights,
    SourceModule,
    StagedTransport,
    TargetModule,
    guard_installation,
    open_export,
)


class ObjectStoreTransport(StagedTransport):
    def stage(self, version: int, changing: bool) -> list[SentWeights]:
        sent = self.source.run(export_buckets, self.request(changing), self.bucket_bytes, fatal=False).result()
        self.target.run(verify_buckets, _references(sent), fatal=False).result()
        return sent

    def install(self, version: int, sent: list[SentWeights]) -> None:
        self.target.run(install_buckets, _references(sent), version, fatal=False).result()


def _references(sent: list[SentWeights]) -> list[Any]:
    return [reference for part in sent for reference in part.where]


def export_buckets(module: SourceModule, store: Store, request: ExportRequest, size: int) -> SentWeights:
    references, sizes = [], {}
    with open_export(module, request) as weights:
        for bucket in pack(weights, size):
            references.append(store.put(bucket))
            sizes |= {packed.name: len(packed.data) for packed in bucket}
    return SentWeights(sizes, references)


def verify_buckets(module: TargetModule, store: Store, references: list[Any]) -> None:
    """Raise WeightError unless everything arrived as it was sent."""
    for reference in references:
        for packed in store.get(reference):
            packed.verify()


def install_buckets(module: TargetModule, store: Store, references: list[Any], version: int) -> None:
    arrived = (packed for reference in references for packed in store.get(reference))
    with guard_installation(module, version):
        module.load_weights(((packed.name, packed.tensor()) for packed in arrived), version=version, adopt=False)
