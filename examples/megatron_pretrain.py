"""Pretrains a small GPT-MoE of Megatron-Core's own classes on two ranks, with the dispatcher of your choice.

    python examples/megatron_pretrain.py                          # all three, and a check that their curves agree
    python examples/megatron_pretrain.py --dispatcher moe_ep      # alltoall, moe_ep or deep_ep-api alone
    ... --set train.dtype=bfloat16 --set train.steps=200          # change single settings of configs/megatron_tiny.yaml

It starts its two ranks itself: on CPU over gloo, on two GPUs over NCCL and NVLink where there are two. `alltoall` is
Megatron's own dispatcher, `moe_ep` this package's in Megatron's MoE layer, `deep_ep-api` is Megatron's flex dispatcher,
unchanged, on this package under DeepEP's name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

NUM_RANKS = 2
CONFIG = Path(__file__).parents[1] / "configs" / "megatron_tiny.yaml"
LIMIT_SECS = float(os.environ.get("MOE_EP_EXAMPLE_LIMIT_SECS", "600"))
RTOL = 1e-5  # of losses and gradient norms in float32, at every step


def main(arguments: list[str]) -> int:
    """Starts the ranks, or is one of them; 0 when the curves agree, 1 when they do not, 2 without Megatron-Core."""
    options = _parse(arguments)
    if importlib.util.find_spec("megatron") is None:
        print("This example needs Megatron-Core: pip install '.[megatron]' in the folder above.", file=sys.stderr)
        return 2
    if "RANK" not in os.environ:
        return _start_ranks(arguments)
    import torch

    on_cuda = options.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() >= NUM_RANKS
    if not on_cuda:
        from megatron_tiny import cpu

        cpu.stand_in_for_cuda()
    from moe_ep.integrations import deep_ep

    deep_ep.install()  # before Megatron looks for DeepEP
    warnings.simplefilter("ignore")  # Megatron has one for each package that could be installed
    if not on_cuda:
        cpu.mend_megatron()
    return _train(options, on_cuda)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a small GPT-MoE of Megatron-Core on two ranks.")
    parser.add_argument("--config", default=str(CONFIG), metavar="FILE", help="YAML with moe, model and train")
    parser.add_argument("--dispatcher", default="all", choices=["all", "alltoall", "moe_ep", "deep_ep-api"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu"], help="auto = two GPUs if there are two")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable")
    return parser.parse_args(arguments)


def _start_ranks(arguments: list[str]) -> int:
    """Runs this file on two ranks of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    command = [sys.executable, *launcher, str(Path(__file__)), *arguments]
    try:
        return subprocess.run(command, env=environment, timeout=LIMIT_SECS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"The run did not end within {LIMIT_SECS:g} s.", file=sys.stderr)
        return 1


def _train(options: argparse.Namespace, on_cuda: bool) -> int:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron_tiny.training import DISPATCHERS, Curve, train
    from pretraining import data

    from moe_ep import load_config

    config = load_config(options.config, dict(pair.split("=", 1) for pair in options.set))
    assert config.train is not None, f"{options.config} has no section train"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timedelta(seconds=config.moe.ep.timeout_secs))
    parallel_state.initialize_model_parallel(expert_model_parallel_size=NUM_RANKS, expert_tensor_parallel_size=1)
    rank, folder = dist.get_rank(), Path(config.train.run_dir)
    if rank == 0:
        data.write_corpus(folder / "data")
    dist.barrier()
    text = data.open_corpus(folder / "data", config.train.seq_len).train
    seed, length, size = config.train.seed, config.train.seq_len, config.train.micro_batch_size or 1

    def batch(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = data.train_starts(len(text), seed, step, config.train.global_batch_size, length)
        mine = starts[rank::NUM_RANKS]
        return data.windows(text, mine[micro_batch * size : (micro_batch + 1) * size], length)

    is_bf16 = config.train.dtype == "bfloat16"
    names = list(DISPATCHERS) if options.dispatcher == "all" else [options.dispatcher]
    curves: dict[str, Curve] = {}
    for name in [*names, *(["alltoall nudged"] if is_bf16 and options.dispatcher == "all" else [])]:
        began = time.monotonic()
        curves[name] = train(config, name.split()[0], batch, on_cuda, nudge="nudged" in name)
        curves[name].seconds = time.monotonic() - began
        if rank == 0:
            first, last = curves[name].losses[0], curves[name].losses[-1]
            print(f"{name:16} loss {first:.6f} -> {last:.6f} in {curves[name].seconds:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        (folder / "curves.json").write_text(json.dumps({name: vars(curve) for name, curve in curves.items()}) + "\n")
    return _compare(curves, rank) if options.dispatcher == "all" else 0


def _compare(curves: dict[str, object], rank: int) -> int:
    """Every curve against alltoall's, loss and gradient norm at every step; 0 when all agree."""
    import numpy as np

    def apart(name: str, what: str) -> float:
        one, other = (np.array(getattr(curves[run], what)) for run in (name, "alltoall"))
        return float(np.max(np.abs(one - other) / np.abs(other)))

    agree = True
    for what in ("losses", "grad_norms"):
        # In bfloat16, rounding alone carries curves apart: as far as the last bits of the weights do, twice.
        limit = 2 * max(apart("alltoall nudged", what), 1e-3) if "alltoall nudged" in curves else RTOL
        for name in curves:
            if name in ("alltoall", "alltoall nudged"):
                continue
            worst = apart(name, what)
            agree &= worst <= limit
            if rank == 0:
                print(f"{name:16} {what:10} at most {worst:.2e} from alltoall's (limit {limit:.2e})", flush=True)
    if rank == 0:
        print("All three agree." if agree else "They do NOT agree.", flush=True)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
