"""How weights travel from the models that learn to those that generate."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from coalign.config.schema.base import ResultNeutral, Section


class SyncConfig(Section):
    """How weights travel from a model that learns to those that compute with them."""

    shorthand = "transport"

    transport: ResultNeutral[Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "object_store", "disk"]] = "auto"
    """`auto` takes what the placement allows: the live tensors within one process, the GPUs' own memory (`cuda_ipc`) or
    the host's (`shared_memory`) on one host, groups of torch.distributed between hosts (`broadcast`), Ray's object
    store where the two models take turns on their devices. `disk`: files in `directory`."""
    adapters: Literal["merged", "apart"] = "merged"
    """Of a trainer with `lora`: `merged` into the weights; `apart`: after the first sync the adapters alone travel, and
    the policy's engine (`vllm`) adds what they compute to what its weights do."""
    verify: ResultNeutral[Literal["all", "rotating"]] = "rotating"
    """What is looked at, on both sides, of every tensor in memory that processes of one host share: `all` bytes, or,
    after the first time, another eighth of it each time. What leaves such memory is always verified whole."""
    every: PositiveInt = 1
    """Training steps from one sync to the next; more than one needs `runtime.max_staleness` of `every` - 1 at least."""
    timeout: ResultNeutral[PositiveFloat] = 600.0
    """Seconds without any progress after which a sync fails, with the rank and the tensor that it waited for."""
    bucket_mib: ResultNeutral[PositiveInt] = 64
    """MiB that travel at once by `broadcast`, `object_store` and `disk` (a larger tensor travels on its own)."""
    directory: ResultNeutral[str | None] = None
    """Of `disk`: a directory that all hosts see; None: `sync` in the run folder."""
