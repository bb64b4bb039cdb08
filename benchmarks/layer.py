"""Times forward and backward of `moe_ep.MoELayer`, and says where the time goes.

    python benchmarks/layer.py --device cuda [--shapes qwen3-30b deepseek-v3-e64] [--worlds 1 2]
    python benchmarks/layer.py --device cuda --shapes deepseek-v3-e64 --worlds 2 --fp8 blockwise
    python benchmarks/layer.py --device cpu --shapes tiny --iterations 3

bf16 on CUDA, float32 on CPU; the input and every parameter get a gradient. With --fp8 the experts of a second layer run
in FP8; both are timed in turn. Its weights are cast once and kept, as over the micro-batches of a step;
layer_fwd_bwd_first is a micro-batch that casts them. The split comes from a profile of a few
steps (benchmarks/breakdown.py); the row with the time is measured without a profiler.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moe_ep
from benchmarks import ceiling, records
from benchmarks.align import Aligner
from benchmarks.breakdown import Breakdown, break_down, longest
from benchmarks.processes import World, run, under_torchrun
from benchmarks.routing import Shape, measure_traffic
from benchmarks.systems import DTYPES
from benchmarks.timing import Call, Clock, CudaClock, Times, device_spans
from moe_ep.config import EPConfig, FP8Config, MoEConfig, RouterConfig

PROFILED_STEPS = 5
CROSSINGS = 4  # of the link by the rows: dispatch and combine, forward and backward


@dataclass(frozen=True)
class LayerShape:
    tokens: int
    hidden: int
    ffn: int
    num_experts: int
    topk: int
    shared_ffn: int | None = None

    @property
    def tflop(self) -> float:
        """Of forward and backward on a GPU: three matrices an expert, three products each, a multiply and an add."""
        width = self.topk * self.ffn + (self.shared_ffn or 0)
        return 2 * 3 * 3 * self.tokens * self.hidden * width / 1e12


SHAPES = {
    "qwen3-30b": LayerShape(16384, 2048, 768, 128, 8),
    "deepseek-v3-e64": LayerShape(4096, 7168, 2048, 64, 8),
    "deepseek-v3-e32": LayerShape(4096, 7168, 2048, 32, 8),  # on one GPU: what each of two has to do of the shape above
    "deepseek-v3-e64-shared": LayerShape(4096, 7168, 2048, 64, 8, shared_ffn=2048),
    "tiny": LayerShape(256, 64, 32, 8, 2),
    "tiny-shared": LayerShape(256, 64, 32, 8, 2, shared_ffn=32),
}


@dataclass(frozen=True)
class Settings:
    shapes: tuple[str, ...]
    backend: str
    comm_sms: int | None
    iterations: int
    fp8: str | None
    fp8_gemm: str
    out: Path | None
    append: bool


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> Call:
    leaves = [x, *layer.parameters()]

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        y: Tensor = layer(x)
        y.backward(dy)
        assert x.grad is not None
        return x.grad

    return step


def measure(world: World, settings: Settings) -> None:
    """Every shape. Collective."""
    top = ceiling.gpu_ceiling(world)
    align = Aligner(world, settings.backend) if world.device.type == "cuda" else None
    clock = Clock(world, settings.iterations)
    if align is not None:
        clock = CudaClock(world, settings.iterations, align.wait)
    append = settings.append
    for name in settings.shapes:
        rows = _measure_shape(world, name, settings, clock, top)
        if world.rank == 0 and settings.out is not None:
            records.write(settings.out, rows, append)
            append = True
    if align is not None:
        align.close()


@dataclass(frozen=True)
class Variant:
    """A layer with its inputs. `dtype` and `system` are those of the record: "fp8" for experts in FP8, and what
    multiplies them where that is not Transformer Engine."""

    dtype: str
    system: str
    layer: moe_ep.MoELayer
    x: Tensor
    step: Call

    def first_step(self) -> object:
        """A step that casts the weights."""
        assert self.layer.experts.fp8 is not None
        self.layer.experts.fp8.forget_weights()
        return self.step()


def _make_variant(world: World, shape: LayerShape, settings: Settings, fp8: str | None) -> Variant:
    config = MoEConfig(
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_experts=shape.num_experts,
        shared_ffn_hidden_size=shape.shared_ffn,
        router=RouterConfig(topk=shape.topk, normalize=True),
        ep=EPConfig(backend=settings.backend, comm_sms=settings.comm_sms),  # type: ignore[arg-type]
        fp8=FP8Config.model_validate(
            {"recipe": fp8 or "none", "gemm": settings.fp8_gemm if world.device.type == "cuda" else "plain"}
        ),
    )
    dtype = DTYPES[_dtype_name(world)]
    torch.manual_seed(5)
    with world.device:
        layer = moe_ep.MoELayer(config, world.group).to(dtype)
        g = torch.Generator(device=world.device).manual_seed(100 + world.rank)
        x = torch.randn(shape.tokens, shape.hidden, generator=g, dtype=dtype).requires_grad_()
        dy = torch.randn(shape.tokens, shape.hidden, generator=g, dtype=dtype)
    system = "moe_ep" if fp8 is None or settings.fp8_gemm == "te" else f"moe_ep, gemm {settings.fp8_gemm}"
    return Variant(_dtype_name(world) if fp8 is None else "fp8", system, layer, x, _step(layer, x, dy))


def _measure_shape(
    world: World, name: str, settings: Settings, clock: Clock, top: float | None
) -> list[records.Record]:
    shape = SHAPES[name]
    kinds = [None, settings.fp8] if settings.fp8 else [None]
    variants = [_make_variant(world, shape, settings, fp8) for fp8 in kinds]
    calls = [(variant, "layer_fwd_bwd", variant.step) for variant in variants]
    if settings.fp8:
        calls.append((variants[-1], "layer_fwd_bwd_first", variants[-1].first_step))
    for _, _, call in calls:
        call()
    times = clock.measure([call for _, _, call in calls])
    rows = []
    medians = {}
    for (variant, op, call), figure in zip(calls, times, strict=True):
        rows += _report(world, name, variant, op, call, figure, top)
        medians[variant.dtype, op] = figure.median
    if settings.fp8 and world.rank == 0:
        whole = medians[variants[0].dtype, "layer_fwd_bwd"]
        ratios = [whole / medians["fp8", op] for op in ("layer_fwd_bwd", "layer_fwd_bwd_first")]
        print(f"{name}, W={world.size}: FP8 ({settings.fp8}) is {ratios[0]:.2f}x {variants[0].dtype}", end="")
        print(f", {ratios[1]:.2f}x in the micro-batch that casts the weights", flush=True)
    for variant in variants:
        variant.layer.buffer.close()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _report(
    world: World, name: str, variant: Variant, op: str, call: Call, times: Times, top: float | None
) -> list[records.Record]:
    """Records of one call, with the parts of its time where they can be told apart; prints them on rank 0."""
    shape, layer = SHAPES[name], variant.layer
    spans = device_spans(call, PROFILED_STEPS) if world.gpus == world.size else []
    split = break_down(spans, PROFILED_STEPS)
    with torch.no_grad():
        idx_TK = layer.router(variant.x.detach())[0].cpu()
    routed = Shape(shape.tokens, shape.hidden, shape.num_experts, shape.topk, "router")
    traffic = measure_traffic(world, routed, idx_TK)
    forward = variant.dtype  # of the dispatch; the other crossings have the dtype of the layer
    remote = traffic.remote_bytes("dispatch", forward, shape.hidden)
    remote += (CROSSINGS - 1) * traffic.remote_bytes("combine", _dtype_name(world), shape.hidden)
    num_sms = None if layer.buffer.backend_name == "torch" else layer.buffer.num_sms
    figures = {op: times}
    if split is not None:  # a part is the mean of the profiled steps
        for part in ("gemm", "exchange", "other", "gaps"):
            mean = getattr(split, part)
            figures[f"{op.replace('_fwd_bwd', '')}_{part}"] = Times(mean, mean, mean, None, None)
    exchange = Exchange(shape.shared_ffn is None, layer.buffer.backend_name, num_sms, remote, top)
    origin = records.Origin.here()
    rows = [_record(world, routed, key, variant, figure, exchange, origin) for key, figure in figures.items()]
    if world.rank == 0:
        print(f"{variant.dtype}, {op}: {_text(name, shape, world, times, split)}", flush=True)
        for kernel, each, launches in longest(spans, PROFILED_STEPS, 12):
            print(f"    {each:9.1f} us {launches:6.1f} x  {kernel[:110]}")
    return rows


@dataclass(frozen=True)
class Exchange:
    """How the rows travelled, and the bytes of all crossings of a step.

    `is_marked`: of a shape without shared expert, as the marks are.
    """

    is_marked: bool
    backend: str
    num_sms: int | None
    remote_bytes: int
    ceiling_gbps: float | None


def _record(
    world: World, shape: Shape, op: str, variant: Variant, times: Times, exchange: Exchange, origin: records.Origin
) -> records.Record:
    moves = op.startswith("layer_fwd_bwd") or op.endswith("_exchange")
    return records.filled(
        world,
        shape,
        times,
        exchange.remote_bytes if moves else 0,
        exchange.ceiling_gbps,
        origin,
        op=op if exchange.is_marked else op.replace("layer", "layer_shared", 1),
        system=variant.system,
        backend=exchange.backend,
        transport="collectives" if exchange.backend == "torch" else "sm",
        layout="expert_major",
        dtype=variant.dtype,
        num_sms=exchange.num_sms,
        registered=False,
    )


def _dtype_name(world: World) -> str:
    return "bfloat16" if world.device.type == "cuda" else "float32"


def _text(name: str, shape: LayerShape, world: World, times: Times, split: Breakdown | None) -> str:
    rate = shape.tflop / times.median * 1e6
    line = (
        f"{name}, W={world.size}: {times.median / 1e3:.2f} ms (p10 {times.p10 / 1e3:.2f}, p90 {times.p90 / 1e3:.2f}), "
        f"{shape.tflop:.2f} TFLOP a rank, {rate:.1f} TFLOP/s"
    )
    if split is None:
        return line + "; no split: it needs a profile of CUDA kernels, one GPU a rank"
    return line + (
        f"; profiled {split.total / 1e3:.2f} ms = GEMM {split.gemm / 1e3:.2f} + exchange {split.exchange / 1e3:.2f} + "
        f"permutation and element-wise {split.other / 1e3:.2f} + gaps {split.gaps / 1e3:.2f}, "
        f"{split.num_kernels:.0f} launches; {split.hidden / 1e3:.2f} ms of exchange behind GEMMs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=["qwen3-30b", "deepseek-v3-e64"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of ranks, one after the other")
    parser.add_argument("--backend", default=None, help="of the layer (default: torch on cpu, intranode on cuda)")
    parser.add_argument("--comm-sms", type=int, default=None, help="SM budget of the exchange")
    parser.add_argument("--fp8", choices=["blockwise", "current", "delayed"], help="a second layer with this recipe")
    parser.add_argument("--fp8-gemm", choices=["te", "cublas"], default="te", help="what multiplies in it, on cuda")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write one JSON line a row to this file")
    parser.add_argument("--append", action="store_true", help="keep what the file already holds")
    args = parser.parse_args()
    backend = args.backend or ("intranode" if args.device == "cuda" else "torch")
    append = args.append
    # New processes for each shape: a profiler may slow down what is launched after it. torchrun's are there already.
    together = [(0, tuple(args.shapes))]
    for size, shapes in (
        together if under_torchrun() else [(w, (name,)) for w, name in product(args.worlds, args.shapes)]
    ):
        settings = Settings(shapes, backend, args.comm_sms, args.iterations, args.fp8, args.fp8_gemm, args.out, append)
        run(measure, size, args.device, settings)
        append = True


if __name__ == "__main__":
    main()
