"""Which rank owns which expert.

The default is the balanced contiguous split: with E = 30 experts on W = 8 ranks the ranks own
4, 4, 4, 4, 4, 4, 3, 3 experts. Any other assignment is a sequence of E rank numbers. The local id of an
expert is its place among the experts of its rank in ascending global order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

MAX_EXPERTS = 2**20


def fingerprint_of(*values: object) -> int:
    """A 62-bit number made of the values; the same on every rank, unlike `hash`."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@dataclass(frozen=True)
class ExpertPlacement:
    """The owner of every expert in a group of `world_size` ranks.

    Attributes:
        owner: E group ranks; `owner[e]` is the rank that holds expert e.
        world_size: number of ranks in the group.
    """

    owner: tuple[int, ...]
    world_size: int

    def __post_init__(self) -> None:
        if not self.owner:
            raise ValueError("expert_placement is empty; give the owner rank of every expert, at least one.")
        for expert, rank in enumerate(self.owner):
            if not 0 <= rank < self.world_size:
                raise ValueError(
                    f"expert_placement gives expert {expert} to rank {rank}, but the group has the ranks "
                    f"0..{self.world_size - 1}; give each expert to one of them."
                )

    @classmethod
    def balanced(cls, num_experts: int, world_size: int) -> ExpertPlacement:
        """Contiguous blocks whose sizes differ by at most one, the larger ones first."""
        if not isinstance(num_experts, int):
            raise TypeError(f"num_experts is {num_experts!r}; give an int.")
        if num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}; at least 1 expert is needed.")
        if num_experts > MAX_EXPERTS:
            raise ValueError(
                f"num_experts is {num_experts}; every rank lists the owner of each, of at most {MAX_EXPERTS} experts. "
                "Give the number of routed experts of one layer."
            )
        base, extra = divmod(num_experts, world_size)
        owner = [rank for rank in range(world_size) for _ in range(base + (rank < extra))]
        return cls(tuple(owner), world_size)

    @classmethod
    def of(cls, owner: Sequence[int], world_size: int) -> ExpertPlacement:
        ranks = tuple(owner)
        odd = next((rank for rank in ranks if isinstance(rank, bool) or not isinstance(rank, int)), None)
        if odd is not None:
            raise TypeError(f"expert_placement holds {odd!r}; give one group rank, an int, for every expert.")
        return cls(ranks, world_size)

    @property
    def num_experts(self) -> int:
        return len(self.owner)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Global ids of the experts of `rank`, ascending; their positions are the local ids."""
        return self._experts_by_rank[rank]

    @cached_property
    def most_local(self) -> int:
        """The most experts that a rank owns."""
        return max(len(experts) for experts in self._experts_by_rank)

    @cached_property
    def _experts_by_rank(self) -> tuple[tuple[int, ...], ...]:
        experts: list[list[int]] = [[] for _ in range(self.world_size)]
        for expert, rank in enumerate(self.owner):
            experts[rank].append(expert)
        return tuple(map(tuple, experts))

    @cached_property
    def local_idx(self) -> tuple[int, ...]:
        """Local id of every expert on its owner."""
        seen = [0] * self.world_size
        local = []
        for rank in self.owner:
            local.append(seen[rank])
            seen[rank] += 1
        return tuple(local)

    @cached_property
    def fingerprint(self) -> int:
        """A 62-bit number that two ranks compare to see whether they place the experts alike."""
        return fingerprint_of(self.owner, self.world_size)

    @cached_property
    def _kernel_tables(self) -> dict[torch.device, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def kernel_tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(owner_E, local_E) int32 on `device`, made once."""
        if device not in self._kernel_tables:
            owner = torch.tensor(self.owner, dtype=torch.int32, device=device)
            local = torch.tensor(self.local_idx, dtype=torch.int32, device=device)
            self._kernel_tables[device] = owner, local
        return self._kernel_tables[device]

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(owner_E, local_E) int64 on `device`, each with one more entry of -1 that the id -1 falls on."""
        owner = torch.tensor([*self.owner, -1], dtype=torch.int64, device=device)
        local = torch.tensor([*self.local_idx, -1], dtype=torch.int64, device=device)
        return owner, local
