"""Times of collectives on a cluster whose nodes have fast links inside and a network between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec


@dataclass(frozen=True)
class ClusterNetwork:
    """Prices collectives. A group has ``size`` ranks, ``stride`` apart: ranks beside each other share a node."""

    cluster: ClusterSpec
    constants: Constants

    def members_per_domain(self, size: int, stride: int = 1) -> int:
        """Return how many ranks of a group the links join."""
        return max(1, min(size, self.cluster.domain // stride))

    def rate(self, size: int, stride: int = 1) -> float:
        """Return the bytes per second of one rank in a ring over the group.

        Between nodes, the members of a group in one node use their network cards together.
        """
        members = self.members_per_domain(size, stride)
        link = self.cluster.gpu.link_gb_s * 1e9 * self.constants.link
        network = self.cluster.network_gb_s * 1e9 * self.constants.network
        if members >= size:
            return link
        return min(link, members * network) if members > 1 else network

    def latency(self, size: int, stride: int = 1) -> float:
        """Return the seconds that a collective takes however small it is."""
        if size <= 1:
            return 0.0
        members = self.members_per_domain(size, stride)
        steps = math.log2(members) + (3 * math.log2(size / members) if size > members else 0.0)
        return self.constants.collective_latency * max(1.0, steps)

    def gather(self, total_bytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of ``total_bytes`` (all ranks' together)."""
        if size <= 1:
            return 0.0
        return total_bytes * (size - 1) / size / self.rate(size, stride) + self.latency(size, stride)

    def reduce(self, total_bytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all-reduce of ``total_bytes``: a reduce-scatter and an all-gather."""
        if size <= 1:
            return 0.0
        return 2 * total_bytes * (size - 1) / size / self.rate(size, stride) + self.latency(size, stride)

    def exchange(self, tokens: float, copies: int, token_bytes: float, size: int) -> float:
        """Return the seconds in which each rank sends its tokens to ``copies`` experts on ``size`` ranks.

        Over the network a token goes once to each node that holds some of its experts (as DeepEP does).
        """
        if size <= 1:
            return 0.0
        domain = self.members_per_domain(size)
        nodes = size / domain
        inside = tokens * min(copies, domain) * token_bytes * (domain - 1) / domain
        seconds = inside / (self.cluster.gpu.link_gb_s * 1e9 * self.constants.link) if domain > 1 else 0.0
        if nodes > 1:
            reached = nodes * (1 - (1 - 1 / nodes) ** copies) * (nodes - 1) / nodes
            network = self.cluster.network_gb_s * 1e9 * self.constants.network
            seconds = max(seconds, tokens * reached * token_bytes / network)
        return seconds + self.latency(size)
