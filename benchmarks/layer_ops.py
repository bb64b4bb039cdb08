"""Times the layer's small operations on one GPU: router and SwiGLU, by kernel and by the PyTorch formula beside it.

    python benchmarks/layer_ops.py [--iterations 30]

Microseconds on the GPU between two events, median, with the L2 cache emptied and the host far ahead before each call;
behind it the host's own time to put the call on the stream. GB/s are the bytes that a call cannot avoid, inputs once
and outputs once, over its time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from moe_ep import _native
from moe_ep.config import MoEConfig, RouterConfig
from moe_ep.layers import routing_kernel, swiglu
from moe_ep.layers.activations import activate
from moe_ep.layers.router import TopKRouter

FLUSH_BYTES = 256 * 2**20
PAUSE_CYCLES = 5_000_000  # about 2.7 ms, in which the host runs ahead
WARMUP = 5

ROUTERS: dict[str, tuple[int, int, dict[str, Any]]] = {  # tokens, hidden size, settings
    "router, Qwen3-30B: T=16384 E=128 K=8 H=2048, softmax, normalised, aux loss": (
        16384,
        2048,
        {"num_experts": 128, "topk": 8, "normalize": True, "aux_loss_coef": 1e-3},
    ),
    "router, DeepSeek-V3: T=4096 E=64 K=8 H=7168, sigmoid, normalised, 8 groups, bias": (
        4096,
        7168,
        {
            "num_experts": 64,
            "topk": 8,
            "normalize": True,
            "score_function": "sigmoid",
            "num_groups": 8,
            "group_topk": 4,
            "expert_bias": True,
        },
    ),
    "router, DeepSeek-V3: T=4096 E=256 K=8 H=7168, sigmoid, normalised, 8 groups, bias": (
        4096,
        7168,
        {
            "num_experts": 256,
            "topk": 8,
            "normalize": True,
            "score_function": "sigmoid",
            "num_groups": 8,
            "group_topk": 4,
            "expert_bias": True,
        },
    ),
}
ROWS = [(32768, 2048), (131072, 768)]  # rows, ffn width


@contextmanager
def by_formula() -> Iterator[None]:
    """Switches the kernels off."""
    with mock.patch.object(routing_kernel, "serves", return_value=False):
        with mock.patch.object(swiglu, "serves", return_value=False):
            yield


def measure(call: Callable[[], Any], iterations: int) -> tuple[float, float]:
    """Median microseconds on the GPU and on the host."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    on_gpu, on_host = [], []
    for iteration in range(WARMUP + iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE_CYCLES)
        flush.zero_()
        begin.record()
        began = time.perf_counter()
        call()
        took = time.perf_counter() - began
        end.record()
        torch.cuda.synchronize()
        if iteration >= WARMUP:
            on_gpu.append(begin.elapsed_time(end) * 1e3)
            on_host.append(took * 1e6)
    return statistics.median(on_gpu), statistics.median(on_host)


def compare(title: str, make_call: Callable[[], Callable[[], Any]], num_bytes: int | None, iterations: int) -> None:
    """Two lines: by kernel and by formula. `make_call` runs where the one or the other holds."""
    for name, context in (("kernel", nullcontext()), ("formula", by_formula())):
        with context:
            gpu, host = measure(make_call(), iterations)
        rate = "" if num_bytes is None else f"{num_bytes / gpu / 1e3:7.0f} GB/s"
        print(f"{title:92} {name:8} {gpu:9.1f} us  host {host:7.1f} us  {rate}", flush=True)


def gradient_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], Any]:
    """A call that runs the backward of one kept forward again and again."""
    out = forward()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def time_router(title: str, num_tokens: int, hidden: int, settings: dict[str, Any], iterations: int) -> None:
    options = dict(settings)
    num_experts = options.pop("num_experts")
    config = MoEConfig(hidden_size=hidden, ffn_hidden_size=64, num_experts=num_experts, router=RouterConfig(**options))
    router = TopKRouter(config).to(device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    pull = torch.randn(num_tokens, config.router.topk, device="cuda")
    leaves = [x, router.weight]
    compare(f"{title}: forward", lambda: lambda: router(x), None, iterations)
    compare(f"{title}: both", lambda: lambda: torch.autograd.grad(router(x)[1], leaves, pull), None, iterations)
    logits = torch.randn(num_tokens, num_experts, device="cuda", requires_grad=True)

    def choose() -> Tensor:
        return router._route(logits, None, needs_probs=False).topk_weights

    slot_bytes = 12 * config.router.topk  # an id and a weight, or its gradient
    forward_bytes, backward_bytes = (num_tokens * (n * 4 * num_experts + slot_bytes) for n in (1, 2))
    compare("    logits to weights, forward", lambda: choose, forward_bytes, iterations)
    compare("    logits to weights, backward", lambda: gradient_of(choose, [logits]), backward_bytes, iterations)


def time_swiglu(num_rows: int, ffn: int, iterations: int) -> None:
    projected = torch.randn(num_rows, 2 * ffn, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    element_bytes = projected.element_size() * num_rows * ffn

    def forward() -> Tensor:
        return activate(projected, "swiglu")

    title = f"SwiGLU, bfloat16, R={num_rows} F={ffn}"
    compare(f"{title}: forward", lambda: forward, 3 * element_bytes, iterations)
    compare(f"{title}: backward", lambda: gradient_of(forward, [projected]), 5 * element_bytes, iterations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30, help="measured repetitions of each call, at least 1")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/layer_ops.py needs a CUDA GPU, and PyTorch finds none.")
    print(f"{records.hardware()}, {records.versions()}, {records.commit()}, moe_ep {_native.describe()}")
    for title, (num_tokens, hidden, settings) in ROUTERS.items():
        time_router(title, num_tokens, hidden, settings, args.iterations)
    for num_rows, ffn in ROWS:
        time_swiglu(num_rows, ffn, args.iterations)


if __name__ == "__main__":
    main()
