"""A decode loop over the low-latency calls: two micro-batches, each one's communication under the other's computing.

    python examples/low_latency_decode.py                                              # one rank on CPU
    torchrun --standalone --nproc-per-node 2 examples/low_latency_decode.py            # two ranks on CPU
    torchrun --standalone --nproc-per-node 2 examples/low_latency_decode.py --device cuda

Every step takes a token of each sequence through a tiny model and chooses the next one. Plain: dispatch, experts,
combine, one after the other. Overlapped: a micro-batch sends, the other computes, a hook receives; nothing of the
library runs between send and hook. On CUDA a step is captured once as a graph and replayed, experts included: no step
waits on the host. Both loops must choose the same tokens; the exit code is 1 if they do not.

Letters: T sequences of a micro-batch on this rank, H hidden, E experts, L of them local, K experts a token.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from decoding.masked_experts import MaskedExperts
from torch import Tensor, nn

import moe_ep

VOCABULARY, WARM_STEPS = 512, 2
Step = Callable[[], None]


class Layer(nn.Module):
    """What stands for attention, a router, and the experts of this rank."""

    def __init__(self, args: argparse.Namespace, buffer: moe_ep.Buffer, device: torch.device, seed: int) -> None:
        super().__init__()
        alike = torch.Generator().manual_seed(seed)  # the same on every rank
        own = torch.Generator().manual_seed(1000 * (1 + buffer.rank) + seed)
        self.args, self.buffer = args, buffer
        self.num_experts = args.local_experts * buffer.group_size
        mixer = torch.randn(args.hidden, args.hidden, generator=alike) / args.hidden**0.5
        router = torch.randn(args.hidden, self.num_experts, generator=alike) / args.hidden**0.5
        self.mixer = nn.Parameter(mixer.bfloat16().to(device), requires_grad=False)
        self.router = nn.Parameter(router.to(device), requires_grad=False)
        self.experts = MaskedExperts(args.local_experts, args.hidden, args.width, own, device)

    def attend(self, h_TH: Tensor) -> Tensor:
        for _ in range(self.args.attention_gemms):
            h_TH = h_TH + torch.tanh(h_TH @ self.mixer)
        return nn.functional.rms_norm(h_TH, h_TH.shape[-1:])

    def send(self, h_TH: Tensor, hook: bool) -> tuple[Any, Tensor, Tensor]:
        """Routes and dispatches: what the dispatch returned, ids and weights."""
        weights_TK, idx_TK = torch.softmax(h_TH.float() @ self.router, dim=-1).topk(self.args.topk, dim=-1)
        sent = self.buffer.low_latency_dispatch(
            h_TH, idx_TK, self.args.tokens, self.num_experts, use_fp8=True, return_recv_hook=hook
        )
        return sent, idx_TK, weights_TK

    def compute(self, sent: Any) -> Tensor:
        received, recv_count, *_ = sent
        expected_rows = max(1, self.args.tokens * self.args.topk // self.args.local_experts)
        rows: Tensor = self.experts(received, recv_count, expected_rows)
        return rows

    def send_home(self, rows: Tensor, routed: tuple[Any, Tensor, Tensor], hook: bool) -> tuple[Tensor, Any]:
        sent, idx_TK, weights_TK = routed
        y_TH, _, receive = self.buffer.low_latency_combine(rows, idx_TK, weights_TK, sent[2], return_recv_hook=hook)
        return y_TH, receive


class Decoder:
    """Two micro-batches of sequences, of which the newest tokens [2, T] are known."""

    def __init__(self, args: argparse.Namespace, buffer: moe_ep.Buffer, device: torch.device) -> None:
        g = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(VOCABULARY, args.hidden, generator=g).bfloat16().to(device)
        self.layers = [Layer(args, buffer, device, seed) for seed in range(args.layers)]
        own = torch.Generator().manual_seed(50 + buffer.rank)
        self.first = torch.randint(0, VOCABULARY, (2, args.tokens), generator=own).to(device)
        self.tokens = self.first.clone()

    def restart(self) -> None:
        self.tokens.copy_(self.first)

    def step_plain(self) -> None:
        for batch in range(2):
            h = self.embedding[self.tokens[batch]]
            for layer in self.layers:
                h = layer.attend(h)
                routed = layer.send(h, hook=False)
                h = h + layer.send_home(layer.compute(routed[0]), routed, hook=False)[0]
            self._choose(batch, h)

    def step_overlapped(self) -> None:
        """Micro-batch 1 runs half a layer behind micro-batch 0: each computes while the other's rows travel."""
        h = [self.embedding[self.tokens[batch]] for batch in range(2)]
        y, receive = h[1], None  # of micro-batch 1, from the layer before
        for layer in self.layers:
            h[0] = layer.attend(h[0])  # beside the way home of 1
            if receive is not None:
                receive()
                h[1] = h[1] + y
            zero = layer.send(h[0], hook=True)
            h[1] = layer.attend(h[1])  # beside the dispatch of 0
            zero[0][-1]()
            one = layer.send(h[1], hook=True)
            rows = layer.compute(zero[0])  # beside the dispatch of 1
            one[0][-1]()
            y_0, receive_0 = layer.send_home(rows, zero, hook=True)
            rows = layer.compute(one[0])  # beside the way home of 0
            receive_0()
            h[0] = h[0] + y_0
            y, receive = layer.send_home(rows, one, hook=True)
        assert receive is not None
        self._choose(0, h[0])
        receive()
        self._choose(1, h[1] + y)

    def _choose(self, batch: int, h_TH: Tensor) -> None:
        self.tokens[batch] = (h_TH @ self.embedding.T).argmax(dim=-1)


def captured(step: Step, device: torch.device) -> Step:
    """The step as a graph on CUDA, behind a few ordinary ones; the step itself on CPU."""
    for _ in range(WARM_STEPS):
        step()
    if device.type == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def run(decoder: Decoder, step: Step, num_steps: int, device: torch.device) -> tuple[list[Tensor], float]:
    """The tokens of every step from the beginning on, and the seconds that the steps took."""
    ready = captured(step, device)
    decoder.restart()
    chosen = []
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        ready()
        chosen.append(decoder.tokens.clone())
    if device.type == "cuda":
        torch.cuda.synchronize()
    return chosen, time.perf_counter() - began


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=0, help="default: 5 on CPU, 200 on CUDA")
    parser.add_argument("--tokens", type=int, default=0, help="sequences of a micro-batch (default: 4 on CPU, else 64)")
    parser.add_argument("--hidden", type=int, default=0, help="default: 256 on CPU, 7168 on CUDA")
    parser.add_argument("--width", type=int, default=0, help="of an expert (default: 128 on CPU, 2048 on CUDA)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--local-experts", type=int, default=4)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--attention-gemms", type=int, default=2, help="what stands for attention")
    args = parser.parse_args()
    on_cuda = args.device == "cuda"
    args.steps = args.steps or (200 if on_cuda else 5)
    args.tokens = args.tokens or (64 if on_cuda else 4)
    args.hidden = args.hidden or (7168 if on_cuda else 256)
    args.width = args.width or (2048 if on_cuda else 128)
    return args


@torch.no_grad()
def main() -> int:
    args = _arguments()
    group, device = None, torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        group = dist.group.WORLD
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "intranode" if args.device == "cuda" else "torch"
    with moe_ep.Buffer(group, backend=backend, timeout_secs=60) as buffer:
        decoder = Decoder(args, buffer, device)
        plain, plain_secs = run(decoder, decoder.step_plain, args.steps, device)
        overlapped, overlapped_secs = run(decoder, decoder.step_overlapped, args.steps, device)
        buffer.check()
        same = all(torch.equal(a, b) for a, b in zip(plain, overlapped, strict=True))
        if buffer.rank == 0:
            num_tokens = 2 * args.tokens * buffer.group_size * args.steps
            with_gemm = "DeepGEMM" if decoder.layers[0].experts.uses_deep_gemm else "PyTorch"
            print(
                f"{buffer.group_size} ranks, {args.steps} steps, backend {buffer.backend_name}, experts by {with_gemm}"
            )
            print(f"plain:      {num_tokens / plain_secs:12,.0f} tokens/s")
            print(f"overlapped: {num_tokens / overlapped_secs:12,.0f} tokens/s")
            print("Both chose the same tokens." if same else "The loops chose different tokens.")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
