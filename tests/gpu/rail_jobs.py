"""What the ranks of a rail do in tests: rounds of known rows between ranks that stand for a node each."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist

from moe_ep._native import require
from moe_ep._native.rail import load_nvshmem
from moe_ep.backends.header import NUM_MATCH_WORDS, OK, OPERATIONS, Header
from moe_ep.backends.node_header import (
    DIFFERS_ELSEWHERE,
    ELSEWHERE_VALUE_WORD,
    OPENING_WORD,
    STATUS_WORD,
    elsewhere_of,
    pack,
)
from moe_ep.backends.node_memory import _DeviceBytes

HIDDEN = 512  # of float32 rows; the second kind of rows has an eighth of it
ROW_BYTES = HIDDEN * 4 + HIDDEN // 2
NUM_CALLS = 5
NUM_OPENINGS, HIDDEN_WORD = 60, 3


class RailOfTest:
    """One rank's part of a rail, with an exchange of its own to fail in its place."""

    def __init__(self, group: dist.ProcessGroup, transport: str, most_rows: int, timeout_secs: float) -> None:
        self.node, self.num_nodes = dist.get_rank(group), dist.get_world_size(group)
        self.transport = transport
        kernels: Any = require()
        self.exchange = kernels.Exchange(rank=0, size=1, timeout_secs=timeout_secs)
        self.exchange.begin_generation(1)
        self.flow_bytes = most_rows * ROW_BYTES  # of a round; the rail's are rounded up
        common = {
            "node": self.node,
            "flow_bytes": -(-self.flow_bytes // 256) * 256,
            "node_state": self.exchange.state_address,
            "record": self.exchange.record_address,
            "timeout_secs": timeout_secs,
        }
        if transport == "ipc":
            self.rounds = kernels.RailRound
            self.rail = kernels.IpcRail(num_nodes=self.num_nodes, **common)
            handles: list[Any] = [None] * self.num_nodes
            dist.all_gather_object(handles, self.rail.export_block(), group=group)
            for node, handle in enumerate(handles):
                if node != self.node:
                    self.rail.open_block(node, handle)
        else:
            over_network: Any = load_nvshmem()
            self.rounds = over_network.RailRound
            self.rail = over_network.NvshmemRail(pes=list(range(self.num_nodes)), **common)
        self.rail.begin_generation(7)
        raw = torch.as_tensor(_DeviceBytes(self.rail.block, self.rail.block_bytes, self.rail), device="cuda")
        self.block = raw
        torch.cuda.synchronize()
        dist.barrier(group)

    def close(self, group: dist.ProcessGroup) -> None:
        """Symmetric memory is freed by all together."""
        torch.cuda.synchronize()
        dist.barrier(group)
        if self.transport == "nvshmem":
            self.rail.release()

    def inbox(self, slot: int, node: int, num_rows: int) -> torch.Tensor:
        """[num_rows, ROW_BYTES] bytes, copied."""
        first = self.rail.inbox(slot) + node * self.flow_bytes
        return self.block[first : first + num_rows * ROW_BYTES].view(num_rows, ROW_BYTES).clone()


def plan_of(seed: int, num_nodes: int, num_rounds: int, most_rows: int) -> list[list[list[list[int]]]]:
    """tokens[source][destination][round]: ascending tokens of the round's range, few, many, or none."""
    dice = random.Random(seed)
    return [
        [
            [
                sorted(dice.sample(range(k * most_rows, (k + 1) * most_rows), dice.choice([0, 1, 3, most_rows])))
                for k in range(num_rounds)
            ]
            for _ in range(num_nodes)
        ]
        for _ in range(num_nodes)
    ]


def rows_of_rank(call: int, rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two kinds of rows, as everybody can work them out."""
    g = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(num_tokens, HIDDEN, generator=g), torch.randn(num_tokens, HIDDEN // 8, generator=g)


def rounds_arrive(group: dist.ProcessGroup, transport: str, num_rounds: int, most_rows: int) -> int:
    """Several calls of several rounds; every row that comes in is compared. The number of rows."""
    rail = RailOfTest(group, transport, most_rows, timeout_secs=30)
    num_rows = check_calls(rail, num_rounds, most_rows)
    rail.close(group)
    return num_rows


def generations_do_not_mix(group: dist.ProcessGroup, transport: str, most_rows: int) -> int:
    """Several times: full rounds that nobody takes up, then a new generation, whose rows must all be right."""
    rail = RailOfTest(group, transport, most_rows, timeout_secs=30)
    first_out = torch.arange(2 * rail.num_nodes + 1, dtype=torch.int32, device="cuda") * most_rows
    num_in = torch.full((rail.num_nodes, 2), most_rows, dtype=torch.int32, device="cuda")
    token = torch.zeros(2 * rail.num_nodes * most_rows, dtype=torch.int32, device="cuda")
    junk = torch.full((1, ROW_BYTES), 0xAB, dtype=torch.uint8, device="cuda")
    stream, num_rows = torch.cuda.current_stream(), 0
    for generation in range(8, 12):
        for k in range(2):
            this = rail.rounds(
                number=k,
                num_rounds=2,
                operation=0,
                row_bytes=ROW_BYTES,
                flow_bytes=rail.flow_bytes,
                first_out=first_out.data_ptr(),
                num_in=num_in.data_ptr(),
            )
            rail.rail.send(this, [(junk.data_ptr(), ROW_BYTES, ROW_BYTES)], token.data_ptr(), 4, stream.cuda_stream)
        stream.synchronize()
        rail.rail.settle(stream.cuda_stream)
        stream.synchronize()
        dist.barrier(group)
        rail.rail.begin_generation(generation)
        num_rows += check_calls(rail, 2, most_rows)
        dist.barrier(group)
    rail.close(group)
    return num_rows


def check_calls(rail: RailOfTest, num_rounds: int, most_rows: int) -> int:
    sending, taking = torch.cuda.Stream(), torch.cuda.Stream()
    num_rows = 0
    for call in range(NUM_CALLS):
        tokens = plan_of(call, rail.num_nodes, num_rounds, most_rows)
        mine = tokens[rail.node]
        sizes = [len(mine[node][k]) for node in range(rail.num_nodes) for k in range(num_rounds)]
        first_out = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        coming = [[len(tokens[node][rail.node][k]) for k in range(num_rounds)] for node in range(rail.num_nodes)]
        num_in = torch.tensor(coming, dtype=torch.int32, device="cuda")
        listed = [token for node in mine for round_tokens in node for token in round_tokens]
        token = torch.tensor([*listed, 0], dtype=torch.int32, device="cuda")
        x, scales = (rows.cuda() for rows in rows_of_rank(call, rail.node, num_rounds * most_rows))
        kinds = [(rows.data_ptr(), rows.stride(0) * 4, rows.shape[1] * 4) for rows in (x, scales)]
        torch.cuda.synchronize()
        time.sleep(random.Random(100 * call + rail.node).choice([0.0, 0.02]))
        rounds = [
            rail.rounds(
                number=k,
                num_rounds=num_rounds,
                operation=0,
                row_bytes=ROW_BYTES,
                flow_bytes=rail.flow_bytes,
                first_out=first_out.data_ptr(),
                num_in=num_in.data_ptr(),
            )
            for k in range(num_rounds)
        ]
        came = []
        for k, this in enumerate(rounds):
            rail.rail.send(this, kinds, token.data_ptr(), 4, sending.cuda_stream)
            rail.rail.wait(this, taking.cuda_stream)
            with torch.cuda.stream(taking):
                came.append([rail.inbox(k % 2, node, coming[node][k]) for node in range(rail.num_nodes)])
            if k == num_rounds - 1:
                taking.wait_stream(sending)
            rail.rail.take(this, taking.cuda_stream)
        torch.cuda.synchronize()
        assert rail.exchange.take_faults() == []
        for node in range(rail.num_nodes):
            theirs = rows_of_rank(call, node, num_rounds * most_rows)
            side_by_side = torch.cat([rows.view(torch.uint8) for rows in theirs], dim=1)
            for k in range(num_rounds):
                if node != rail.node:
                    assert torch.equal(came[k][node].cpu(), side_by_side[tokens[node][rail.node][k]]), (call, node, k)
                    num_rows += coming[node][k]
    return num_rows


def openings_are_heard(group: dist.ProcessGroup, transport: str) -> int:
    """Many openings, of which a node refuses some, and differs in others: what every rank tells its own node then."""
    rail, dice, num_heard = RailOfTest(group, transport, 4, timeout_secs=30), random.Random(3), 0
    nodes = range(rail.num_nodes)
    for number in range(1, NUM_OPENINGS + 1):
        refuser = dice.choice([None, None, *nodes])
        odd = dice.choice([None, None, *nodes])
        header = Header(operation=OPERATIONS.index("combine"), hidden=512 + (rail.node == odd))
        packed = pack(header, 3 if rail.node == refuser else OK, opens=True)
        stream = torch.cuda.current_stream().cuda_stream
        time.sleep(random.Random(100 * number + rail.node).choice([0.0, 0.0, 0.002]))
        rail.rail.open(rail.exchange.opening(packed, NUM_MATCH_WORDS, 0), stream)
        torch.cuda.synchronize()
        faults = rail.exchange.take_faults()
        if refuser is None and odd is None:
            assert faults == [], (number, faults)
            continue
        ((name, values),) = faults
        words = values[8:]
        assert (name, values[1], words[OPENING_WORD]) == ("refused", number - 1, number)
        heard = words[STATUS_WORD], *elsewhere_of(words), words[ELSEWHERE_VALUE_WORD]
        if refuser is not None:
            assert heard == (3, 0 if refuser == rail.node else refuser + 1, 0, 0), (number, refuser, heard)
        else:
            other = odd if odd != rail.node else (0 if odd != 0 else 1)
            value = 512 if odd == rail.node else 513
            assert heard == (DIFFERS_ELSEWHERE, other + 1, HIDDEN_WORD, value), (number, odd, heard)
        num_heard += 1
    rail.close(group)
    return num_heard


def silence_is_reported(group: dist.ProcessGroup, transport: str) -> list[tuple[str, list[int]]]:
    """Rank 1 does not send: what the others report."""
    rail = RailOfTest(group, transport, 4, timeout_secs=1)
    first_out = torch.arange(2 * rail.num_nodes + 1, dtype=torch.int32, device="cuda")
    num_in = torch.ones(rail.num_nodes, 2, dtype=torch.int32, device="cuda")
    token = torch.zeros(2 * rail.num_nodes, dtype=torch.int32, device="cuda")
    x = torch.zeros(1, ROW_BYTES, dtype=torch.uint8, device="cuda")
    this = rail.rounds(
        number=0,
        num_rounds=2,
        operation=2,
        row_bytes=ROW_BYTES,
        flow_bytes=rail.flow_bytes,
        first_out=first_out.data_ptr(),
        num_in=num_in.data_ptr(),
    )
    stream = torch.cuda.current_stream().cuda_stream
    if rail.node != 1:
        rail.rail.send(this, [(x.data_ptr(), ROW_BYTES, ROW_BYTES)], token.data_ptr(), 2, stream)
        rail.rail.wait(this, stream)
    torch.cuda.synchronize()
    dist.barrier(group)
    faults: list[tuple[str, list[int]]] = rail.exchange.take_faults()
    return faults


def start_nvshmem(group: dist.ProcessGroup) -> str:
    """Initialises NVSHMEM in this process, over the ranks of `group`, and says which version it is."""
    import nvshmem.core as nvshmem
    from cuda.core import Device

    rank, device = dist.get_rank(group), Device(torch.cuda.current_device())
    device.set_current()
    unique: list[Any] = [nvshmem.get_unique_id(empty=rank != 0) if rank == 0 else None]
    dist.broadcast_object_list(unique, src=dist.get_global_rank(group, 0), group=group)
    nvshmem.init(device=device, uid=unique[0], rank=rank, nranks=dist.get_world_size(group), initializer_method="uid")
    over_network: Any = load_nvshmem()
    over_network.register_kernels()
    return str(nvshmem.get_version())
