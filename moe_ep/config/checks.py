"""Settings that are fine one by one and impossible together: one function a section, one sentence a finding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moe_ep.config.problems import Problem, dotted

if TYPE_CHECKING:
    from moe_ep.config.schema import Config, EPConfig, ModelConfig, MoEConfig, RouterConfig, TrainConfig

FP8_STEP = 16  # elements
MAX_DIVISORS = 16  # that a sentence lists


def router_problems(router: RouterConfig) -> list[Problem]:
    """Group settings: both or neither, no more groups kept than there are, a group score that looks at an expert."""
    path = router.section
    topk, num_groups, group_topk = router.topk, router.num_groups, router.group_topk
    if num_groups is None and group_topk is None:
        return []
    if num_groups is None or group_topk is None:
        given, absent = ("num_groups", "group_topk") if group_topk is None else ("group_topk", "num_groups")
        text = (
            f"{dotted((*path, given))} is {getattr(router, given)} but {dotted((*path, absent))} is null; groups need "
            f"both. Give {absent} too, or remove {given}."
        )
        return [Problem((*path, given), text)]
    problems = []
    if group_topk > num_groups:
        text = (
            f"moe.router.group_topk is {group_topk}, but there are only {num_groups} groups (moe.router.num_groups). "
            f"Set it from 1 to {num_groups}."
        )
        problems.append(Problem((*path, "group_topk"), text))
    if router.group_score == "megatron" and topk < group_topk:
        text = (
            f"moe.router.group_score is megatron, which scores a group by its best topk // group_topk experts, but "
            f"topk is {topk} and group_topk is {group_topk}, so that is 0. Set group_topk to at most {topk}, or "
            f"group_score to top2 or max."
        )
        problems.append(Problem((*path, "group_score"), text))
    return problems


def ep_problems(ep: EPConfig) -> list[Problem]:
    """Only one backend knows nodes."""
    if ep.backend == "internode":
        return []
    return [
        Problem(
            (*ep.section, name),
            f"{dotted((*ep.section, name))} is {getattr(ep, name)}, but moe.ep.backend is {ep.backend}, which knows no "
            f"nodes. Set the backend to internode, or {name} to {spelled}.",
        )
        for name, default, spelled in (("ranks_per_node", None, "null"), ("hop", "auto", "auto"))
        if getattr(ep, name) != default
    ]


def moe_problems(moe: MoEConfig, max_topk: int) -> list[Problem]:
    """The router can choose as many experts as it shall; the sizes are those that FP8 products take."""
    return [*_choice_problems(moe, max_topk), *_fp8_problems(moe)]


def _fp8_problems(moe: MoEConfig) -> list[Problem]:
    """Tensor cores read FP8 in steps of 16 bytes."""
    if moe.fp8.recipe == "none" or moe.fp8.gemm == "plain":
        return []
    return [
        Problem(
            ("moe", name),
            f"moe.{name} is {size}, which is no multiple of {FP8_STEP}, but moe.fp8.recipe is {moe.fp8.recipe}, whose "
            f"products need that. Set it to {size + -size % FP8_STEP}, or moe.fp8.recipe to none.",
        )
        for name, size in (("hidden_size", moe.hidden_size), ("ffn_hidden_size", moe.ffn_hidden_size))
        if size % FP8_STEP
    ]


def _choice_problems(moe: MoEConfig, max_topk: int) -> list[Problem]:
    """The router can choose `topk` different experts from those that exist and that its groups leave."""
    path, router, num_experts = moe.router.section, moe.router, moe.num_experts
    if router.topk > num_experts:
        text = (
            f"moe.router.topk is {router.topk}, but the number of experts (moe.num_experts) is {num_experts}. "
            f"Set topk from 1 to {min(num_experts, max_topk)}, or use more experts."
        )
        return [Problem((*path, "topk"), text)]
    if router.num_groups is None or router.group_topk is None:
        return []
    if num_experts % router.num_groups != 0:
        text = (
            f"moe.router.num_groups is {router.num_groups}, which does not divide moe.num_experts = {num_experts}. "
            f"Set num_groups to one of {divisors(num_experts)}."
        )
        return [Problem((*path, "num_groups"), text)]
    available = router.group_topk * (num_experts // router.num_groups)
    if router.topk > available:
        text = (
            f"moe.router.topk is {router.topk}, but {router.group_topk} of {router.num_groups} groups hold only "
            f"{available} of the {num_experts} experts. Set topk to at most {available}, or raise group_topk."
        )
        return [Problem((*path, "topk"), text)]
    return []


def model_problems(model: ModelConfig) -> list[Problem]:
    """Heads of an even width (rotary positions turn pairs of numbers); no more dense layers than layers."""
    problems = []
    if model.hidden_size % (2 * model.num_heads) != 0:
        text = (
            f"model.num_heads is {model.num_heads}, which does not split model.hidden_size = {model.hidden_size} into "
            f"heads of an even width. Choose num_heads so that hidden_size is a multiple of 2 * num_heads."
        )
        problems.append(Problem(("model", "num_heads"), text))
    if model.num_dense_layers > model.num_layers:
        text = (
            f"model.num_dense_layers is {model.num_dense_layers}, but model.num_layers is {model.num_layers}. "
            f"Set num_dense_layers from 0 to {model.num_layers}."
        )
        problems.append(Problem(("model", "num_dense_layers"), text))
    return problems


def train_problems(train: TrainConfig) -> list[Problem]:
    """No longer warm-up than the run; no larger micro batch than the batch."""
    problems = []
    if train.warmup_steps > train.steps:
        text = (
            f"train.warmup_steps is {train.warmup_steps}, but train.steps is {train.steps}. "
            f"Set warmup_steps from 0 to {train.steps}."
        )
        problems.append(Problem(("train", "warmup_steps"), text))
    if train.micro_batch_size is not None and train.micro_batch_size > train.global_batch_size:
        text = (
            f"train.micro_batch_size is {train.micro_batch_size}, but train.global_batch_size is "
            f"{train.global_batch_size}. Set micro_batch_size from 1 to {train.global_batch_size}."
        )
        problems.append(Problem(("train", "micro_batch_size"), text))
    return problems


def config_problems(config: Config) -> list[Problem]:
    """The sections of one file fit each other."""
    problems = []
    model, train = config.model, config.train
    if model is not None and model.hidden_size != config.moe.hidden_size:
        text = (
            f"model.hidden_size is {model.hidden_size}, but moe.hidden_size is {config.moe.hidden_size}. "
            f"The layers share one token width: make the two equal."
        )
        problems.append(Problem(("model", "hidden_size"), text))
    if model is not None and train is not None and train.seq_len > model.max_seq_len:
        text = (
            f"train.seq_len is {train.seq_len}, but model.max_seq_len is {model.max_seq_len}. "
            f"Set seq_len to at most {model.max_seq_len}, or raise max_seq_len."
        )
        problems.append(Problem(("train", "seq_len"), text))
    return problems


def world_size_problems(config: Config, world_size: int) -> list[Problem]:
    """The EP size divides the number of ranks, so that every rank is in a full EP group."""
    size = config.moe.ep.size
    if size == "auto" or world_size % size == 0:
        return []
    text = (
        f"moe.ep.size is {size}, which does not divide the world size {world_size} (the number of ranks). "
        f"Set it to auto or to one of {divisors(world_size)}, or start another number of ranks."
    )
    return [Problem(("moe", "ep", "size"), text)]


def divisors(number: int) -> str:
    """The divisors of an integer from 1 to 2^31 - 1, ascending: 10 -> "1, 2, 5, 10"; of many only the first ones."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    names = [str(d) for d in sorted({*small, *(number // d for d in small)})]
    left_out = len(names) - MAX_DIVISORS
    return ", ".join(names) if left_out <= 0 else f"{', '.join(names[:MAX_DIVISORS])} ({left_out} larger ones left out)"
