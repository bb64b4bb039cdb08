"""What a caller of DeepEP V1 sizes a buffer with: `Config`, the recommended configs, and the byte hints.

Buffers of this package grow with need. Every number here is what a DeepEP V1 caller expects to read and may hand to
`Buffer(num_nvl_bytes=, num_rdma_bytes=)`, where it is a size to begin with and no limit.

Source of tables and formulas: github.com/deepseek-ai/DeepEP, commit dd758ca, the legacy (V1) buffer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields

import torch

# The dtype of expert ids, DeepEP's default build.
topk_idx_t = torch.int64

_RANKS_PER_NODE = 8
_ALIGNMENT_BYTES = 128
# A staged token beside its row: 8 bytes of source, then room for 128 ids (int64), weights and scales (both float32).
_TOKEN_EXTRA_BYTES = 8 + 128 * (8 + 4 + 4)
_SCALE_BLOCK = 128

# Ranks: (nvl send, nvl recv, rdma send, rdma recv), in tokens, ascending.
_DISPATCH_CHUNKS = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE_CHUNKS = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


@dataclass(frozen=True)
class Config:
    """DeepEP V1's tuning of one dispatch or combine. Only `num_sms` is honoured here.

    The chunk sizes describe DeepEP's ring buffers. This package has none: its buffers grow with need, so the chunk
    sizes are checked as DeepEP checks them, enter the two size hints, and have no other effect.

    Attributes:
        num_sms: SM budget of the call's kernels, at least 0.
        num_max_nvl_chunked_send_tokens: tokens sent at once over NVLink; no effect.
        num_max_nvl_chunked_recv_tokens: tokens of one NVLink receive ring, above the send size; no effect.
        num_max_rdma_chunked_send_tokens: tokens sent at once over RDMA; no effect.
        num_max_rdma_chunked_recv_tokens: tokens of one RDMA receive ring, at least twice the send size; rounded up to
            a multiple of it; no effect.

    Raises:
        TypeError: a value that is no whole number.
        ValueError: a value out of the limits above, or a chunk size below 1.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            minimum = 0 if field.name == "num_sms" else 1
            object.__setattr__(self, field.name, _whole(field.name, getattr(self, field.name), minimum))
        nvl_send, nvl_recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if nvl_send >= nvl_recv:
            raise ValueError(
                f"num_max_nvl_chunked_send_tokens is {nvl_send}, but it must be below num_max_nvl_chunked_recv_tokens, "
                f"which is {nvl_recv}; lower the first or raise the second."
            )
        rdma_send = self.num_max_rdma_chunked_send_tokens
        rdma_recv = _round_up(self.num_max_rdma_chunked_recv_tokens, rdma_send)
        if 2 * rdma_send > rdma_recv:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens is {rdma_send}, but it must be at most half of "
                f"num_max_rdma_chunked_recv_tokens, which is {self.num_max_rdma_chunked_recv_tokens}, rounded up to "
                f"{rdma_recv}; give at least {rdma_send + 1} receive tokens or lower the send tokens."
            )
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", rdma_recv)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of DeepEP V1's NVLink buffer, a multiple of 128.

        With C = num_sms // 2 channels, N nodes of 8 ranks (the last may be partly filled) and `recv` =
        num_max_nvl_chunked_recv_tokens: C * min(num_ranks, 8) * ((2N + 3) * 4 + recv * (hidden_bytes + 2056)), where
        2056 is a token's source, 128 ids, 128 weights and 128 scales.

        Args:
            hidden_bytes: bytes of one row.
            num_ranks: ranks of the group, any number from 1.

        Raises:
            ValueError: `hidden_bytes` or `num_ranks` is below 1.
        """
        hidden_bytes, num_ranks = _whole("hidden_bytes", hidden_bytes), _whole("num_ranks", num_ranks)
        per_peer = (2 * _num_nodes(num_ranks) + 3) * 4 + self.num_max_nvl_chunked_recv_tokens * (
            hidden_bytes + _TOKEN_EXTRA_BYTES
        )
        return _round_up(self.num_sms // 2 * min(num_ranks, _RANKS_PER_NODE) * per_peer, _ALIGNMENT_BYTES)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of DeepEP V1's RDMA buffer, a multiple of 128; 0 for up to 8 ranks, which share a node.

        With C, N as in `get_nvl_buffer_size_hint` and `recv` = num_max_rdma_chunked_recv_tokens:
        C * N * (18 * 2 * 4 + recv * 2 * (hidden_bytes + 2056 + 16)).

        Args:
            hidden_bytes: bytes of one row.
            num_ranks: ranks of the group, any number from 1.

        Raises:
            ValueError: `hidden_bytes` or `num_ranks` is below 1.
        """
        hidden_bytes, num_ranks = _whole("hidden_bytes", hidden_bytes), _whole("num_ranks", num_ranks)
        if num_ranks <= _RANKS_PER_NODE:
            return 0
        per_node = (2 * _RANKS_PER_NODE + 2) * 2 * 4 + self.num_max_rdma_chunked_recv_tokens * 2 * (
            hidden_bytes + _TOKEN_EXTRA_BYTES + 16
        )
        return _round_up(self.num_sms // 2 * _num_nodes(num_ranks) * per_node, _ALIGNMENT_BYTES)


def recommended_dispatch_config(num_ranks: int, num_sms: int) -> Config:
    """DeepEP V1's recommended `Config` of dispatch.

    DeepEP lists 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144 and 160 ranks and refuses others. Here another size gets the
    entry of the next larger listed size, and above 160 ranks that of 160.

    Args:
        num_ranks: ranks of the group, any number from 1.
        num_sms: the SM budget to write into the config.

    Raises:
        ValueError: `num_ranks` is below 1 or `num_sms` below 0.
    """
    return _recommended(_DISPATCH_CHUNKS, num_ranks, num_sms)


def recommended_combine_config(num_ranks: int, num_sms: int) -> Config:
    """DeepEP V1's recommended `Config` of combine; sizes, arguments and errors as `recommended_dispatch_config`."""
    return _recommended(_COMBINE_CHUNKS, num_ranks, num_sms)


def low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Bytes of DeepEP V1's low-latency heap, a multiple of 128.

    With M, H, E of the arguments and s = 4 * ceil(H / 128) bytes of scales, a dispatch message has
    d = 16 + max(2H, H + s) bytes and a combine message c = 2H + s; the heap is
    2 * (max(M * d, E * M * c) + E * M * max(d, c)) bytes of rows and twice 4E bytes of counts, each rounded up to 128.

    Args:
        num_max_dispatch_tokens_per_rank: M, the most tokens that a rank sends in one call.
        hidden: H, elements of one row.
        num_ranks: ranks of the group, any number from 1; the size does not depend on it.
        num_experts: E, experts over all ranks.

    Raises:
        ValueError: an argument below 1.
    """
    num_tokens = _whole("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
    hidden, num_experts = _whole("hidden", hidden), _whole("num_experts", num_experts)
    _whole("num_ranks", num_ranks)
    scale_bytes = 4 * -(-hidden // _SCALE_BLOCK)
    dispatch_bytes = 16 + max(2 * hidden, hidden + scale_bytes)
    combine_bytes = 2 * hidden + scale_bytes
    send_bytes = max(num_tokens * dispatch_bytes, num_experts * num_tokens * combine_bytes)
    recv_bytes = num_experts * num_tokens * max(dispatch_bytes, combine_bytes)
    count_bytes = _round_up(4 * num_experts, _ALIGNMENT_BYTES)
    return _round_up(2 * (send_bytes + recv_bytes) + 2 * count_bytes, _ALIGNMENT_BYTES)


def _recommended(chunks_by_ranks: dict[int, tuple[int, int, int, int]], num_ranks: int, num_sms: int) -> Config:
    num_ranks = _whole("num_ranks", num_ranks)
    listed = next((size for size in chunks_by_ranks if size >= num_ranks), max(chunks_by_ranks))
    return Config(num_sms, *chunks_by_ranks[listed])


def _num_nodes(num_ranks: int) -> int:
    return -(-num_ranks // _RANKS_PER_NODE)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _whole(name: str, value: int, minimum: int = 1) -> int:
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give a whole number of at least {minimum}.") from None
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}.")
    return value
