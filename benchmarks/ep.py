"""Times dispatch and combine: one row of figures a call, beside whatever else can do the same.

    python benchmarks/ep.py --device cpu                       round trip with backward on two gloo ranks, beside a
                                                               plain implementation
    python benchmarks/ep.py --device cuda --suite marks        the rows behind the marks table
    python benchmarks/ep.py --device cuda --tokens 4096 8192 --num-sms 16 24 --cases cached_dispatch combine
    torchrun --nproc-per-node 2 benchmarks/ep.py --device cuda ...

benchmarks/timing.py says how a call is timed, benchmarks/records.py what the columns of the JSON lines are.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import suites
from benchmarks.measure import Settings, measure
from benchmarks.peers import PEERS
from benchmarks.processes import run
from benchmarks.routing import ROUTINGS, Shape
from benchmarks.suites import Job
from benchmarks.systems import CASES
from moe_ep.topology import HopChoice


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run")
    parser.add_argument("--backend", default=None, help="of moe_ep.Buffer (default: torch on cpu, intranode on cuda)")
    parser.add_argument("--ranks-per-node", type=int, help="for internode: ranks that stand for a node")
    parser.add_argument("--hop", choices=get_args(HopChoice), default="auto", help="for internode")
    parser.add_argument("--world", type=int, default=2, help="ranks, one process each; they share GPUs if need be")
    parser.add_argument("--suite", choices=["marks"], help="a list of jobs, instead of the sizes below")
    parser.add_argument("--tokens", type=int, nargs="+", default=[], help="tokens a rank")
    parser.add_argument("--hidden", type=int, nargs="+", default=[])
    parser.add_argument("--num-experts", type=int, default=None)
    parser.add_argument("--topk", type=int, nargs="+", default=[])
    parser.add_argument("--routing", choices=ROUTINGS, nargs="+", default=["uniform"])
    parser.add_argument("--dtypes", choices=["float32", "bfloat16", "fp8"], nargs="+", default=[])
    parser.add_argument("--num-sms", type=int, nargs="+", default=[], help="SM budgets (default: the buffer's)")
    parser.add_argument("--registered", choices=["no", "yes", "both"], default="no", help="input from buffer.empty()")
    parser.add_argument("--cases", choices=list(CASES), nargs="+", default=[])
    parser.add_argument("--peers", choices=list(PEERS), nargs="*", default=None)
    parser.add_argument("--iterations", type=int, default=30, help="measured repetitions of each call")
    parser.add_argument("--kernels", action="store_true", help="profile each call too, for kernel_us")
    parser.add_argument("--budget-secs", type=float, help="begin no further job after this time")
    parser.add_argument("--out", type=Path, help="write one JSON line a row to this file")
    parser.add_argument("--append", action="store_true", help="keep what the file already holds")
    args = parser.parse_args()
    if args.iterations < 2:
        parser.error(f"--iterations is {args.iterations}; a median with tenths needs at least 2.")
    args.backend = args.backend or ("intranode" if args.device == "cuda" else "torch")
    return args


def _jobs(args: argparse.Namespace) -> list[Job]:
    if args.suite:
        return list(suites.marks())
    on_cpu = args.device == "cpu"
    base = Shape(2048, 1024, 32, 4, "uniform") if on_cpu else suites.DEEPSEEK_V3
    experts = args.num_experts or base.num_experts
    peers = (("plain",) if on_cpu else ()) if args.peers is None else args.peers
    registered = {"no": (False,), "yes": (True,), "both": suites.BOTH}[args.registered]
    return [
        Job(
            Shape(tokens, hidden, experts, topk, routing),
            tuple(args.dtypes) or (("float32",) if on_cpu else ("bfloat16",)),
            tuple(args.num_sms) or (None,),
            registered,
            tuple(args.cases) or (("dispatch_combine_fwd_bwd",) if on_cpu else suites.SINGLE),
            tuple(peers),
            args.kernels,
        )
        for tokens, hidden, topk, routing in product(
            args.tokens or [base.tokens], args.hidden or [base.hidden], args.topk or [base.topk], args.routing
        )
    ]


def main() -> None:
    args = _arguments()
    settings = Settings(
        backend=args.backend,
        ranks_per_node=args.ranks_per_node,
        hop=args.hop,
        iterations=args.iterations,
        budget_secs=args.budget_secs,
        out=args.out,
        append=args.append,
    )
    run(measure, args.world, args.device, _jobs(args), settings)


if __name__ == "__main__":
    main()
