"""DeepEP V1's `deep_ep.Buffer` inside a node, if the package is installed, at 24 SMs and its best chunk size.

Chunk sizes are tuned as its own benchmark does, over the same ranges. `DeepEPWithTE` adds Transformer Engine's
permutation (mask map, fused), which stands behind DeepEP wherever rows are needed by expert.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.processes import World
from benchmarks.systems import Case, Inputs, Rows, System
from benchmarks.timing import Call

NUM_SMS = 24
NVL_BYTES = 2 * 10**9
RECV_TOKENS = 256  # length of its queues
DISPATCH_CHUNKS = range(4, 33, 4)
COMBINE_CHUNKS = range(1, 17, 2)
TUNE_CALLS = 8
RANKS_THAT_IT_HAS = (2, 4, 8)


def missing(world: World) -> str | None:
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep not installed"
    if world.device.type != "cuda" or world.gpus < world.size:
        return "deep_ep needs CUDA and a GPU for each rank"
    if world.size not in RANKS_THAT_IT_HAS:
        return f"deep_ep has no inside-a-node mode for {world.size} ranks"
    return None


def missing_te(world: World) -> str | None:
    said = missing(world)
    if said is None and importlib.util.find_spec("transformer_engine") is None:
        return "deep_ep+te: transformer_engine not installed"
    return said


class DeepEP(System):
    """Calls as in its own intranode test; `cached_dispatch` is what that test times."""

    name = "deep_ep"
    backend = "v1"
    transport = "nvlink"
    num_sms = NUM_SMS

    def __init__(self, inputs: Inputs) -> None:
        import deep_ep

        self.inputs, self.deep_ep = inputs, deep_ep
        self.buffer = deep_ep.Buffer(inputs.world.group, NVL_BYTES, 0, explicitly_destroy=True)
        self._configs: dict[tuple[str, str], Any] = {}

    def call(self, case: Case, dtype: str, registered: bool) -> Call | None:
        op, layout = case
        if registered or layout != "compact" or (dtype == "fp8" and op == "combine"):
            return None
        x = self.inputs.rows(dtype)
        if op == "combine":
            received, _, _, _, handle, _ = self._first(x, dtype)
            return self._combine(received, handle)
        if op == "dispatch":
            self._config(x, dtype)
            return lambda: self._first(x, dtype)[0]
        return self._cached(x, dtype)

    def close(self) -> None:
        self.buffer.destroy()

    def _first(self, x: Rows, dtype: str) -> tuple[Any, ...]:
        inputs = self.inputs
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            inputs.idx_TK.to(self.deep_ep.topk_idx_t), inputs.shape.num_experts
        )
        made: tuple[Any, ...] = self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=inputs.idx_TK.to(self.deep_ep.topk_idx_t),
            topk_weights=inputs.weights_TK,
            config=self._configs.get(("dispatch", dtype), self.deep_ep.Config(NUM_SMS, 8, RECV_TOKENS)),
        )
        return made

    def _cached(self, x: Rows, dtype: str) -> Call:
        config = self._config(x, dtype)
        handle = self._first(x, dtype)[4]
        return lambda: self.buffer.dispatch(x, handle=handle, config=config)[0]

    def _config(self, x: Rows, dtype: str) -> Any:
        """Of dispatch, tuned once a dtype. Collective."""
        if ("dispatch", dtype) not in self._configs:
            handle = self._first(x, dtype)[4]
            self._configs["dispatch", dtype] = self._tuned(
                DISPATCH_CHUNKS, lambda config: self.buffer.dispatch(x, handle=handle, config=config)
            )
        return self._configs["dispatch", dtype]

    def _combine(self, rows: Tensor, handle: Any) -> Call:
        if ("combine", "") not in self._configs:
            self._configs["combine", ""] = self._tuned(
                COMBINE_CHUNKS, lambda config: self.buffer.combine(rows, handle, config=config)
            )
        config = self._configs["combine", ""]
        return lambda: self.buffer.combine(rows, handle, config=config)[0]

    def _tuned(self, chunks: Iterable[int], call: Callable[[Any], Any]) -> Any:
        """The config with the least median on the slowest rank. Collective."""
        configs = [self.deep_ep.Config(NUM_SMS, chunk, RECV_TOKENS) for chunk in chunks]
        medians = []
        for config in configs:
            call(config)
            times = []
            for _ in range(TUNE_CALLS):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call(config)
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end))
            medians.append(statistics.median(times))
        slowest = self.inputs.world.slowest(medians)
        return configs[slowest.index(min(slowest))]


class DeepEPWithTE(DeepEP):
    """dispatch, then `moe_permute_with_probs`; `moe_unpermute` with probabilities, then combine.

    The routing map and the probabilities as a matrix are made outside the timed region, in the peer's favour.
    """

    name = "deep_ep+te"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        import transformer_engine.pytorch as te

        self.te = te

    def call(self, case: Case, dtype: str, registered: bool) -> Call | None:
        op, layout = case
        if registered or layout != "expert_major" or dtype != "bfloat16" or op == "dispatch_combine_fwd_bwd":
            return None
        x = self.inputs.rows(dtype)
        cached = self._cached(x, dtype)
        received, recv_idx, recv_weights, counts, handle, _ = self._first(x, dtype)
        map_SL, probs_SL = _by_expert(recv_idx, recv_weights, len(counts))
        num_rows = int(map_SL.sum())

        def permute(rows: Tensor) -> tuple[Tensor, Tensor]:
            made = self.te.moe_permute_with_probs(rows, probs_SL, map_SL, num_out_tokens=num_rows)
            return made[0], made[2]

        if op == "dispatch":
            return lambda: permute(self._first(x, dtype)[0])[0]
        if op == "cached_dispatch":
            return lambda: permute(cached())[0]
        by_expert, row_id_map = permute(received)
        combine = self._combine(received, handle)
        del combine  # it tuned the chunk size; the rows to send are made anew in each call
        config = self._configs["combine", ""]

        def unpermute_and_combine() -> Tensor:
            rows = self.te.moe_unpermute(
                by_expert, row_id_map, merging_probs=probs_SL, restore_shape=received.shape, map_type="mask"
            )
            y: Tensor = self.buffer.combine(rows, handle, config=config)[0]
            return y

        return unpermute_and_combine


def _by_expert(idx_SK: Tensor, weights_SK: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
    """[S, L] which local experts a row goes to, int32 as Transformer Engine takes it, and with which weight."""
    map_SL = torch.zeros(idx_SK.shape[0], num_local + 1, dtype=torch.int32, device=idx_SK.device)
    probs_SL = torch.zeros(map_SL.shape, dtype=torch.float32, device=idx_SK.device)
    column_SK = torch.where(idx_SK >= 0, idx_SK, num_local).long()
    map_SL.scatter_(1, column_SK, 1)
    probs_SL.scatter_(1, column_SK, weights_SK)
    return map_SL[:, :num_local].contiguous(), probs_SL[:, :num_local].contiguous()
