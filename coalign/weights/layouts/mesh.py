"""The ranks of a parallel model: sizes of each kind of parallelism, and each rank's coordinates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's (index, size) in each kind of parallelism."""

    tensor: tuple[int, int]
    pipeline: tuple[int, int]
    expert: tuple[int, int]
    expert_tensor: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of each kind of parallelism. Raises ValueError if they do not fit each other.

    Ranks count tensor-parallel first, then data-parallel, then pipeline stages. The experts of a stage are spread over
    all of its ranks, tensor-parallel ranks within an expert first.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def __post_init__(self) -> None:
        if self.tensor * self.data % (self.expert * self.expert_tensor):
            raise ValueError(
                f"expert {self.expert} × expert_tensor {self.expert_tensor} does not divide the {self.tensor} × "
                f"{self.data} ranks (tensor × data) of a stage"
            )

    @property
    def size(self) -> int:
        return self.tensor * self.data * self.pipeline

    def at(self, rank: int) -> Coordinates:
        stage, within = divmod(rank, self.tensor * self.data)
        return Coordinates(
            (within % self.tensor, self.tensor),
            (stage, self.pipeline),
            (within // self.expert_tensor % self.expert, self.expert),
            (within % self.expert_tensor, self.expert_tensor),
        )
