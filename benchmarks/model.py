"""The byte model: how long a call must take for its link, for its SMs, and for its launches and flags.

The costs are measured on H200 and in SM-microseconds for a megabyte of rows: how long one SM is busy with it. A pass
over rows on n SMs takes cost * megabytes / n. docs/performance.md says where each comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.routing import Shape, Traffic, row_bytes

LOCAL_PASS = 22.3  # read and write rows on the own GPU
PULL = 24.7  # read a row from a peer and store it once
EXTRA_STORE = 15.6  # each further local store of a row, publishing one that is read anyway too
PULL_ADD = 50.4  # read a row from a peer and add it in float32
LATENCY_US = 12.0  # launches, flags to a peer and back


@dataclass(frozen=True)
class Bound:
    """Microseconds that a call cannot go below, by what they are spent on."""

    link_us: float
    sm_us: float
    latency_us: float

    @property
    def limit(self) -> str:
        """What is largest: "link", "SMs" or "latency"."""
        named = {"link": self.link_us, "SMs": self.sm_us, "latency": self.latency_us}
        return max(named, key=lambda name: named[name])


def bound(
    op: str,
    layout: str,
    dtype: str,
    shape: Shape,
    traffic: Traffic,
    num_sms: int | None,
    registered: bool,
    ceiling_gbps: float | None,
) -> Bound | None:
    """The model's bound of one call; None for what it does not cover (an op, no SM budget, no link)."""
    if op not in ("dispatch", "cached_dispatch", "combine") or not num_sms or not ceiling_gbps:
        return None
    megabytes = row_bytes(dtype, shape.hidden) / 1e6
    remote, own = traffic.remote_rows * megabytes, traffic.own_rows * megabytes
    copies = traffic.copies_per_row if layout == "expert_major" else 1.0
    if op == "combine":
        reduce = LOCAL_PASS * (1 + copies) / 2  # reads `copies` rows, writes one
        publish = 0.0 if registered and layout == "compact" else reduce * remote
        sm_us = publish + PULL_ADD * remote + (reduce if layout == "expert_major" else LOCAL_PASS / 2) * own
    else:
        publish = 0.0 if registered else EXTRA_STORE * shape.tokens * megabytes
        more = EXTRA_STORE * (copies - 1)
        sm_us = publish + (PULL + more) * remote + (LOCAL_PASS + more) * own
    link_us = traffic.remote_rows * row_bytes(dtype, shape.hidden) / ceiling_gbps / 1e3
    return Bound(link_us, sm_us / num_sms, LATENCY_US)
