"""Transport through the cluster's object store: senders put buckets there, every target reads them. Works wherever the
models are, also when they take turns on their devices."""

from __future__ import annotations

from typing import Any

from coalign.weights.sync.buckets import pack
from coalign.weights.sync.transport import ExportRequest, Sent, Staged, exported, installing


class ObjectStore(Staged):
    def stage(self, version: int, changing: bool) -> list[Sent]:
        sent = self.source.run(
            export_buckets, self.wanted(changing), self.config.bucket_mib * 2**20, fatal=False
        ).result()
        self.target.run(verify_buckets, _references(sent), fatal=False).result()
        return sent

    def install(self, version: int, sent: list[Sent]) -> None:
        self.target.run(install_buckets, _references(sent), version, fatal=False).result()


def _references(sent: list[Sent]) -> list[Any]:
    return [reference for part in sent for reference in part.where]


def export_buckets(module: Any, store: Any, wanted: ExportRequest, size: int) -> Sent:
    """Put this rank's weights into the store."""
    references, sizes = [], {}
    with exported(module, wanted) as weights:
        for bucket in pack(weights, size):
            references.append(store.put(bucket))
            sizes |= {packed.name: len(packed.data) for packed in bucket}
    return Sent(sizes, references)


def verify_buckets(module: Any, store: Any, references: list[Any]) -> None:
    """Raises WeightError unless everything arrived as it was sent."""
    for reference in references:
        for packed in store.get(reference):
            packed.verify()


def install_buckets(module: Any, store: Any, references: list[Any], version: int) -> None:
    """Serve these weights from now on."""
    arrived = (packed for reference in references for packed in store.get(reference))
    with installing(module, version):
        module.load_weights(((packed.name, packed.tensor()) for packed in arrived), version=version, adopt=False)
