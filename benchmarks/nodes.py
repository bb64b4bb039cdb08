"""The byte model between nodes: what a dispatch of backend `internode` costs on a network, from EP16 to EP2048.

`python benchmarks/nodes.py` prints the table of docs/performance.md. Uniform routing: K of E experts, none twice.
Letters: T tokens a rank, N nodes of P ranks, W = N * P.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from math import comb
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.model import LATENCY_US, LOCAL_PASS, PULL
from moe_ep.backends.internode_kernels import STAGING_BYTES, overlapping

CHUNKS = 16  # of the rows to a node in a round: kHopChunks of csrc/internode/rail.h
NVLINK_GBPS = 325.0  # rows pulled by kernels on H200, docs/performance.md
ROUND_US = 4 * 4.0  # a send, a wait, a call in the node, an answer: launches, which the host makes one after the other


def hit(num_experts: int, topk: int, num_here: int) -> float:
    """The probability that at least one of K distinct experts is among `num_here` of E."""
    return 1 - comb(num_experts - num_here, topk) / comb(num_experts, topk)


@dataclass(frozen=True)
class Shape:
    """T, H, E, K, and N nodes of P ranks."""

    tokens: int
    hidden: int
    num_experts: int
    topk: int
    num_nodes: int
    ranks_per_node: int

    @property
    def row_bytes(self) -> int:
        """Of bfloat16."""
        return 2 * self.hidden


@dataclass(frozen=True)
class Cost:
    """One rank's part in a dispatch.

    Attributes:
        crossings: rows that it sends to other nodes, for each token.
        rounds: how often its rail goes round.
        chunk_bytes: of a put, on average; at least one row.
        puts: how many.
        network_us, nvlink_us, sm_us, rounds_us: what each part takes by itself.
    """

    crossings: float
    rounds: int
    chunk_bytes: float
    puts: float
    network_us: float
    nvlink_us: float
    sm_us: float
    rounds_us: float

    @property
    def time_us(self) -> float:
        """The longest part, the others beside it, and the way of one round before and behind it."""
        longest = max(self.network_us, self.nvlink_us, self.sm_us, self.rounds_us)
        return longest + self.network_us / self.rounds + LATENCY_US


def cost(shape: Shape, num_sms: int, card_gbps: float, staging_bytes: int = STAGING_BYTES) -> Cost:
    """Of a dispatch of bfloat16 rows to compact ones, its handle given."""
    experts, topk, num_nodes, row_bytes = shape.num_experts, shape.topk, shape.num_nodes, shape.row_bytes
    world = num_nodes * shape.ranks_per_node
    of_node = hit(experts, topk, experts // num_nodes)
    of_rank = hit(experts, topk, experts // world)
    crossings = (num_nodes - 1) * of_node
    room = staging_bytes // (4 * num_nodes) // 256 * 256 // row_bytes
    room = 1 << room.bit_length() - 1
    size = overlapping(shape.tokens)
    # A round is halved until what goes to one node fits, four deviations above the mean for the many that there are.
    while size > room and of_node * size + 4 * (of_node * size) ** 0.5 > room:
        size //= 2
    rounds = -(-shape.tokens // size)
    chunk_rows = max(1.0, of_node * size / CHUNKS)
    megabytes = shape.tokens * row_bytes / 1e6
    relayed, kept = (world - num_nodes) * of_rank, num_nodes * of_rank
    return Cost(
        crossings=crossings,
        rounds=rounds,
        chunk_bytes=chunk_rows * row_bytes,
        puts=shape.tokens * crossings / chunk_rows,
        network_us=shape.tokens * crossings * row_bytes / card_gbps / 1e3,
        nvlink_us=shape.tokens * relayed * row_bytes / NVLINK_GBPS / 1e3,
        sm_us=megabytes * (LOCAL_PASS * (crossings + kept) + PULL * relayed) / num_sms,
        rounds_us=rounds * ROUND_US,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-sms", type=int, default=24)
    parser.add_argument("--card-gbps", type=float, default=46.0, help="what a 400 Gb/s card carries")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    names = ("EP", "nodes", "E", "over the network", "rounds", "bytes a put")
    names += ("network", "NVLink", "SMs", "rounds", "time", "GB/s")
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for world in (16, 32, 64, 128, 256, 512, 1024, 2048):
        experts = max(256, world)
        shape = Shape(args.tokens, 7168, experts, 8, world // 8, 8)
        found = cost(shape, args.num_sms, args.card_gbps)
        sent = args.tokens * found.crossings * shape.row_bytes
        print(
            f"| {world} | {world // 8} | {experts} | {found.crossings:.2f} a token | {found.rounds} "
            f"| {found.chunk_bytes / 1e3:.0f} KB | {found.network_us / 1e3:.2f} ms | {found.nvlink_us / 1e3:.2f} ms "
            f"| {found.sm_us / 1e3:.2f} ms | {found.rounds_us / 1e3:.2f} ms | {found.time_us / 1e3:.2f} ms "
            f"| {sent / found.time_us / 1e3:.0f} |"
        )


if __name__ == "__main__":
    main()
