"""A rank on a host of its own: `python -m tests.helpers.two_hosts RANK WORLD RANKS_PER_HOST ADDRESS PORT JOB`.

What a rank finds out is printed as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

import moe_ep
from moe_ep.backends import discovery
from tests.distributed.conformance import check_routing

LIMIT_SECS = 3.0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def all_works(group: dist.ProcessGroup, ranks_per_host: int) -> dict[str, object]:
    """Nodes are found by hosts; rows and sums are those of the loops, nodes first."""
    with moe_ep.Buffer(group, backend="internode", timeout_secs=20) as buffer:
        shown = repr(buffer)
    for layout in ("compact", "expert_major"):
        for routing in ("random", "holes"):
            check_routing(
                group, "internode", layout, torch.bfloat16, routing, "ragged", 4, ranks_per_node=ranks_per_host
            )
    return {"buffer": shown}


def is_cut_off(group: dist.ProcessGroup, ranks_per_host: int) -> dict[str, object]:
    """Calls until the network is cut, which the test does behind the first."""
    x, idx = torch.ones(8, 16), torch.arange(16).view(8, 2) % dist.get_world_size(group)
    buffer = moe_ep.Buffer(group, backend="internode", timeout_secs=LIMIT_SECS)
    began = time.monotonic()
    try:
        for call in range(1000):
            began = time.monotonic()
            moe_ep.dispatch(buffer, x, idx, None, num_experts=dist.get_world_size(group), layout="compact")
            if call == 0:
                say("ready")
            time.sleep(0.05)
    except moe_ep.EPTimeoutError as error:
        return {"error": str(error), "secs": time.monotonic() - began}
    return {"error": ""}


def main() -> None:
    rank, world, ranks_per_host, port = (int(sys.argv[i]) for i in (1, 2, 3, 5))
    torch.set_num_threads(1)
    store = dist.TCPStore(sys.argv[4], port, world, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    host = f"host {rank // ranks_per_host}"  # namespaces share the kernel, whose boot number stands for a machine
    with mock.patch.object(discovery, "host_id", return_value=host):
        found = {"all_works": all_works, "is_cut_off": is_cut_off}[sys.argv[6]](group, ranks_per_host)
    say(json.dumps(found))
    # Without a farewell: the other host may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
