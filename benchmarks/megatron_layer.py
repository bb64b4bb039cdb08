"""Times forward and backward of Megatron-Core's MoE layer with its own dispatchers and with ours, in turn.

    python benchmarks/megatron_layer.py --device cuda [--shapes qwen3-30b deepseek-v3-e64] [--num-sms 32] [--out FILE]
    python benchmarks/megatron_layer.py --device cpu --shapes tiny --iterations 3

All layers have the same weights' shapes, Megatron's router and, on CUDA in bf16, Transformer Engine's grouped GEMM with
fused permutation and router; the dispatcher alone differs:

- megatron_alltoall: Megatron's own over NCCL;
- megatron_moe_ep: ours, `moe_ep.integrations.megatron`;
- megatron_flex_deep_ep: Megatron's flex dispatcher on DeepEP V1 where that is installed, and else on this package under
  its name, then called megatron_flex_moe_ep.

A figure is the median over steps taken in turn, of the slowest rank. The split comes from a profile of a few steps
afterwards: exchange and permutation together are what a dispatcher costs where no GEMM hides it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import ceiling, records
from benchmarks.align import Aligner
from benchmarks.breakdown import break_down, covered, kind, longest
from benchmarks.layer import SHAPES, LayerShape
from benchmarks.processes import World, run
from benchmarks.routing import Shape, measure_traffic
from benchmarks.timing import Call, Clock, CudaClock, Span, Times, device_spans

PROFILED_STEPS = 5
CROSSINGS = 4  # of the link by the rows: dispatch and combine, forward and backward
# Rows that move inside a GPU on behalf of a dispatcher, and the metadata that says where to.
PERMUTE = re.compile(r"permute|row_id_map|sort_chunks|multihot|index|scatter|gather|topk|cumsum|sort", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    shapes: tuple[str, ...]
    systems: tuple[str, ...]
    num_sms: int | None
    iterations: int
    out: Path | None


def has_deep_ep() -> bool:
    """Whether a DeepEP of its own is installed."""
    return importlib.util.find_spec("deep_ep") is not None


def flex_name() -> str:
    return "megatron_flex_deep_ep" if has_deep_ep() else "megatron_flex_moe_ep"


def start_megatron(world: World, flex_is_ours: bool) -> None:
    """Imports Megatron, with stand-ins for CUDA on CPU and for DeepEP where it is missing, and makes its groups."""
    warnings.simplefilter("ignore")  # Megatron has one for each package that could be installed
    on_cuda = world.device.type == "cuda"
    from examples.megatron_tiny import cpu
    from moe_ep.integrations import deep_ep

    if not on_cuda:
        cpu.stand_in_for_cuda()
    if flex_is_ours:
        deep_ep.install()
    from megatron.core import config, parallel_state, tensor_parallel

    config.ENABLE_EXPERIMENTAL = on_cuda  # Megatron's fastest path for flex
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world.size, expert_tensor_parallel_size=1)
    if on_cuda:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    else:
        cpu.mend_megatron()


def make_layer(world: World, shape: LayerShape, system: str, num_sms: int | None) -> torch.nn.Module:
    """Megatron's MoE layer with the dispatcher of a system."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_ep.integrations import megatron as ours

    on_cuda = world.device.type == "cuda"
    is_flex, dtype = system.startswith("megatron_flex"), torch.bfloat16 if on_cuda else torch.float32
    fields: dict[str, Any] = {
        "num_layers": 1, "num_attention_heads": 8, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn,
        "moe_ffn_hidden_size": shape.ffn, "num_moe_experts": shape.num_experts, "moe_router_topk": shape.topk,
        "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none", "add_bias_linear": False,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bf16": on_cuda,
        "params_dtype": dtype, "moe_token_dispatcher_type": "flex" if is_flex else "alltoall",
        "moe_flex_dispatcher_backend": "deepep", "expert_model_parallel_size": world.size,
        "moe_grouped_gemm": on_cuda, "moe_permute_fusion": on_cuda, "moe_router_fusion": on_cuda,
        "bias_activation_fusion": on_cuda, "gradient_accumulation_fusion": False,
        "use_cpu_initialization": not on_cuda, "transformer_impl": "transformer_engine" if on_cuda else "local",
    }  # fmt: skip
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if num_sms is not None:
        budget = "moe_flex_dispatcher_num_sms" if "moe_flex_dispatcher_num_sms" in known else "moe_deepep_num_sms"
        fields[budget] = num_sms
    config = TransformerConfig(**fields)
    make_spec = specs.get_gpt_layer_with_transformer_engine_spec if on_cuda else specs.get_gpt_layer_local_spec
    spec = make_spec(num_experts=shape.num_experts, moe_grouped_gemm=on_cuda)
    mlp = (ours.with_moe_ep(spec) if system == "megatron_moe_ep" else spec).submodules.mlp
    torch.manual_seed(5)
    layer: Any = build_module(mlp, config=config) if hasattr(mlp, "module") else mlp(config=config)
    layer.set_layer_number(0)
    return layer.to(world.device, dtype) if on_cuda else layer  # type: ignore[no-any-return]


def make_step(world: World, shape: LayerShape, layer: torch.nn.Module) -> tuple[Call, Tensor]:
    """A forward and backward of the layer on tokens of this rank, and these tokens [T, 1, H]."""
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    g = torch.Generator(device=world.device).manual_seed(100 + world.rank)
    x = torch.randn(shape.tokens, 1, shape.hidden, generator=g, dtype=dtype, device=world.device).requires_grad_()
    dy = torch.randn(shape.tokens, 1, shape.hidden, generator=g, dtype=dtype, device=world.device)
    leaves = [x, *layer.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        y, _ = layer(x)
        y.backward(dy)

    return step, x


def measure(world: World, settings: Settings) -> None:
    """Every shape. Collective."""
    start_megatron(world, flex_is_ours=not has_deep_ep())
    top = ceiling.gpu_ceiling(world)
    align = Aligner(world, "intranode") if world.device.type == "cuda" else None
    clock = Clock(world, settings.iterations)
    if align is not None:
        clock = CudaClock(world, settings.iterations, align.wait)
    rows: list[records.Record] = []
    for name in settings.shapes:
        rows += _measure_shape(world, name, settings, clock, top)
    if world.rank == 0 and settings.out is not None:
        records.write(settings.out, rows)
    if align is not None:
        align.close()


def _measure_shape(
    world: World, name: str, settings: Settings, clock: Clock, top: float | None
) -> list[records.Record]:
    shape = SHAPES[name]
    layers = [make_layer(world, shape, system, settings.num_sms) for system in settings.systems]
    steps = [make_step(world, shape, layer) for layer in layers]
    figures = clock.measure([step for step, _ in steps])
    remote = _remote_bytes(world, shape, layers[0], steps[0][1])
    origin = records.Origin.here([_megatron_version()])
    rows = []
    for system, (step, _), times in zip(settings.systems, steps, figures, strict=True):
        spans = device_spans(step, PROFILED_STEPS) if world.gpus == world.size else []
        parts = {"layer_fwd_bwd": times, **_parts(spans)}
        rows += [_record(world, shape, op, system, each, settings, remote, top, origin) for op, each in parts.items()]
        if world.rank == 0:
            _print(name, system, parts, figures[0].median, spans)
    return rows


def _parts(spans: list[Span]) -> dict[str, Times]:
    """Mean microseconds of a step by kind of kernel; permutation is the part of `other` that a dispatcher causes."""
    split = break_down(spans, PROFILED_STEPS)
    if split is None:
        return {}
    permute = covered(span for span in spans if kind(span[0]) == "other" and PERMUTE.search(span[0])) / PROFILED_STEPS
    found = {"gemm": split.gemm, "exchange": split.exchange, "permute": permute, "other": split.other - permute}
    found["gaps"] = split.gaps
    return {f"layer_{part}": Times(mean, mean, mean, None, None) for part, mean in found.items()}


def _remote_bytes(world: World, shape: LayerShape, layer: Any, x: Tensor) -> int:
    from moe_ep.layers.slots_of_map import expert_slots

    with torch.no_grad():
        _, routing_map = layer.router(x.detach())
    idx_TK = expert_slots(routing_map, shape.topk).cpu()
    traffic = measure_traffic(world, _routed(shape), idx_TK)
    return CROSSINGS * traffic.remote_bytes("combine", _dtype(world), shape.hidden)


def _routed(shape: LayerShape) -> Shape:
    return Shape(shape.tokens, shape.hidden, shape.num_experts, shape.topk, "router")


def _record(
    world: World, shape: LayerShape, op: str, system: str, times: Times, settings: Settings, remote: int,
    top: float | None, origin: records.Origin,
) -> records.Record:  # fmt: skip
    on_cuda = world.device.type == "cuda"
    stock = system == "megatron_alltoall"
    return records.filled(
        world,
        _routed(shape),
        times,
        remote if op in ("layer_fwd_bwd", "layer_exchange") else 0,
        top,
        origin,
        op=op,
        system=system,
        backend=("nccl" if on_cuda else "gloo") if stock else ("intranode" if on_cuda else "torch"),
        transport="collectives" if stock or not on_cuda else "sm",
        layout="expert_major" if system == "megatron_moe_ep" else "compact",
        dtype=_dtype(world),
        num_sms=None if stock else settings.num_sms,
        registered=False,
    )


def _print(name: str, system: str, parts: dict[str, Times], first: float, spans: list[Span]) -> None:
    whole = parts["layer_fwd_bwd"]
    line = f"{name}, {system}: {whole.median / 1e3:.2f} ms (p10 {whole.p10 / 1e3:.2f}, p90 {whole.p90 / 1e3:.2f})"
    line += f", {first / whole.median:.2f}x the first"
    named = ((op.removeprefix("layer_"), each.median) for op, each in parts.items() if op != "layer_fwd_bwd")
    line += "".join(f"; {part} {mean / 1e3:.2f}" for part, mean in named)
    if spans:
        line += f"; {len(spans) / PROFILED_STEPS:.0f} launches"
    print(line, flush=True)
    for kernel, each, launches in longest(spans, PROFILED_STEPS, 14):
        print(f"    {each:9.1f} us {launches:6.1f} x  {kernel[:110]}", flush=True)


def _megatron_version() -> str:
    import megatron.core

    return f"megatron-core {megatron.core.__version__}"


def _dtype(world: World) -> str:
    return "bfloat16" if world.device.type == "cuda" else "float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=["qwen3-30b"])
    parser.add_argument("--world", type=int, default=2, help="ranks")
    systems = ["megatron_alltoall", "megatron_moe_ep", flex_name()]
    parser.add_argument("--systems", choices=systems, nargs="+", default=systems)
    parser.add_argument("--num-sms", type=int, default=None, help="SM budget of ours and of flex (default: Megatron's)")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write one JSON line a row to this file")
    args = parser.parse_args()
    settings = Settings(tuple(args.shapes), tuple(args.systems), args.num_sms, args.iterations, args.out)
    run(measure, args.world, args.device, settings)


if __name__ == "__main__":
    main()
