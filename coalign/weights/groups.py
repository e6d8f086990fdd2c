"""torch.distributed groups between two models: one for each sender, with all readers in it.

They stand beside whatever groups a model has itself (made without torch.distributed's registry, which knows one world).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coalign.weights.places import identity, own_address

Meeting = tuple[str, int] | None


@dataclass
class Link:
    """A rank's part: the group that it sends in, or those that it reads from, with ``device`` memory."""

    device: torch.device
    groups: list[Any] = field(default_factory=list)
    server: dist.TCPStore | None = None
    buffers: deque[Tensor] = field(default_factory=deque)

    def buffer(self, size: int) -> Tensor:
        """u8[size], one of two in turn: the other one is under way. Kept, since new memory costs as much as a copy."""
        oldest = self.buffers.popleft() if len(self.buffers) == 2 else None
        if oldest is None or len(oldest) < size:
            oldest = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.buffers.append(oldest)
        return oldest[:size]


def listen(module: Any, store: Any, link: str, kind: str) -> Meeting:
    """Where readers meet this rank; None if it does not send. ``kind``: of memory, that all ranks have."""
    own = module.links[link] = Link(torch.device(module.context.device if kind == "cuda" else kind))
    if not module.exports:
        return None
    own.server = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return own_address(), own.server.port


def enter(module: Any, store: Any, link: str, readers: Sequence[Any], timeout: float) -> None:
    """A sender's way into its group, in which it is rank 0. RuntimeError if not all come within ``timeout`` s."""
    own: Link = module.links[link]
    if own.server is not None:
        own.groups = [_group(own.server, 0, 1 + len(readers), own.device, timeout)]


def enter_all(
    module: Any, store: Any, link: str, kind: str, meetings: list[Meeting], readers: Sequence[Any], timeout: float
) -> None:
    """A reader's way into the group of every sender. RuntimeError if not all come within ``timeout`` s."""
    own = module.links[link] = Link(torch.device(module.context.device if kind == "cuda" else kind))
    rank = 1 + readers.index(identity())
    for address, port in filter(None, meetings):
        server = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
        own.groups.append(_group(server, rank, 1 + len(readers), own.device, timeout))


def leave(module: Any, store: Any, link: str) -> None:
    """End the groups: after a failure their ranks would not agree on what comes next."""
    for group in module.links.pop(link, Link(torch.device("cpu"))).groups:
        group.shutdown()


def broadcast(group: Any, tensor: Tensor) -> Any:
    """Begin to send (as rank 0) or to receive ``tensor``: something to ``wait`` for."""
    return group.broadcast([tensor], dist.BroadcastOptions())


def _group(server: dist.TCPStore, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    limit = timedelta(seconds=timeout)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(server, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    torch.cuda.set_device(device)
    return dist.ProcessGroupNCCL(server, rank, size, options)
