"""Megatron-Core's own test of its token dispatchers, run against ours: its file is given, not part of this project.

    torchrun --nproc-per-node 2 scripts/megatron_container.py PATH/test_token_dispatcher.py --dispatcher moe_ep

PATH is tests/unit_tests/transformer/moe of Megatron-LM at the tag of the installed megatron-core (core_v0.16.1 ...).
Its cases for eight GPUs are run at the sizes that fit the ranks started, on CPU over gloo or with a GPU a rank. Every
case says PASS or the first line of what failed; a rank that fails alone costs the case its time limit, not the run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.megatron_tiny import cpu  # noqa: E402
from moe_ep.integrations import deep_ep  # noqa: E402

CASE_SECS = 60
CAPACITY = {"moe_token_drop_policy": "probs", "moe_expert_capacity_factor": 0.5}


class Utils:
    """What the container asks of Megatron's test helpers."""

    @staticmethod
    def initialize_model_parallel(**sizes: int) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes)

    @staticmethod
    def destroy_model_parallel() -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


def set_random_seed(seed_: int, data_parallel_random_init: bool = False, *args: Any) -> None:
    torch.manual_seed(seed_)
    if os.environ["MEGATRON_DEVICE"] == "cuda":
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(seed_)


def stub(name: str, **names: Any) -> None:
    """A module of Megatron-LM's repository that the wheel does not have."""
    module = ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = []
    sys.modules[name] = module


def claim_transformer_engine() -> None:
    """Where it is missing: Megatron then takes the fields of FP8, which here only ask for padding."""
    from megatron.core import utils
    from megatron.core.transformer import transformer_config

    if importlib.util.find_spec("transformer_engine") is None:
        for module in (utils, transformer_config):
            module.is_te_min_version = lambda *args, **kwargs: True


def load(path: str) -> ModuleType:
    for name in ("megatron.training", "tests", "tests.unit_tests"):
        stub(name)
    stub("megatron.training.initialize", _set_random_seed=set_random_seed)
    stub("tests.unit_tests.test_utilities", Utils=Utils)
    spec = importlib.util.spec_from_file_location("container", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(world: int) -> list[tuple[str, dict[str, Any]]]:
    """(method of the container, its arguments) for so many ranks."""
    sizes = {2: [(1, 2), (2, 1)], 4: [(1, 4), (4, 1), (2, 2)]}[world]
    expert_tp = {2: [(1, 1, 2)], 4: [(1, 1, 4), (1, 2, 2), (2, 2, 2)]}[world]
    found: list[tuple[str, dict[str, Any]]] = []
    for tp, ep in sizes:
        at: dict[str, Any] = {"tp_size": tp, "ep_size": ep, "num_moe_experts": 8, "moe_router_topk": 2}
        pad = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
        found += [
            ("dispatcher_dropless_test", at),
            ("dispatcher_capacity_test", {**at, **CAPACITY}),
            ("dispatcher_drop_and_pad_test", {**at, **pad}),
            ("dispatcher_router_padding_for_fp8_test", {**at, "num_moe_experts": 32, "moe_router_topk": 4}),
        ]
    for tp, ep, etp in expert_tp:
        at = {"tp_size": tp, "ep_size": ep, "moe_tp_size": etp, "num_moe_experts": 8, "moe_router_topk": 2}
        found.append(("dispatcher_dropless_test", at))
    return found


def run_case(container: ModuleType, method: str, arguments: dict[str, Any], kind: dict[str, Any]) -> str:
    """PASS, or why not."""

    def too_late(*_: Any) -> None:
        raise TimeoutError(f"not done within {CASE_SECS} s")

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(CASE_SECS)
    try:
        getattr(container.MoEModelTestContainer(pp_size=1, **arguments, **kind), method)()
    except BaseException as error:  # whatever a case does, the next one runs
        if os.environ.get("MEGATRON_TRACEBACKS"):
            traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        signal.alarm(0)
    return "PASS"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--dispatcher", default="moe_ep", choices=["alltoall", "moe_ep", "deep_ep-api"])
    options = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    os.environ["MEGATRON_DEVICE"] = "cuda" if on_cuda else "cpu"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        cpu.stand_in_for_cuda()
    deep_ep.install()
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timedelta(seconds=CASE_SECS))
    claim_transformer_engine()
    container = load(options.path)
    if not on_cuda:
        cpu.mend_megatron()
    if options.dispatcher == "moe_ep":
        from moe_ep.integrations.megatron import MoELayer

        container.MoELayer = MoELayer  # type: ignore[attr-defined]
    kind = {"moe_token_dispatcher_type": "flex" if options.dispatcher == "deep_ep-api" else "alltoall"}
    if options.dispatcher == "deep_ep-api":
        kind["moe_flex_dispatcher_backend"] = "deepep"
    failed = 0
    for method, arguments in cases(dist.get_world_size()):
        if options.dispatcher == "deep_ep-api" and "moe_pad_expert_input_to_capacity" in arguments:
            continue  # Megatron refuses that with DeepEP
        outcome = run_case(container, method, arguments, kind)
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        worst = next((text for text in outcomes if text != "PASS"), "PASS")
        failed += worst != "PASS"
        if dist.get_rank() == 0:
            shown = " ".join(f"{name}={value}" for name, value in arguments.items())
            print(f"{worst:8} {method} {shown}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
