"""Numbers that follow from a configuration: how many parameters a layer has and how many of them a token uses."""

from typing import NamedTuple

from moe_ep.config.schema import MoEConfig


class LayerParameters(NamedTuple):
    """Parameter counts of one MoE layer over all ranks (no biases; the expert bias is a buffer).

    `active` is what one token uses: the router, its K experts and the shared expert.
    """

    router: int
    per_expert: int
    shared: int
    total: int
    active: int


def count_parameters(moe: MoEConfig) -> LayerParameters:
    """Count the parameters of one layer: 3 matrices H x F an expert with SwiGLU, 2 with GELU; router E x H."""
    num_matrices = 3 if moe.activation == "swiglu" else 2
    router = moe.num_experts * moe.hidden_size
    per_expert = num_matrices * moe.hidden_size * moe.ffn_hidden_size
    shared = num_matrices * moe.hidden_size * (moe.shared_ffn_hidden_size or 0)
    return LayerParameters(
        router=router,
        per_expert=per_expert,
        shared=shared,
        total=router + moe.num_experts * per_expert + shared,
        active=router + moe.router.topk * per_expert + shared,
    )


def experts_per_rank(num_experts: int, num_ranks: int) -> tuple[int, int]:
    """The largest and the smallest number of experts on a rank; the split is contiguous and balanced."""
    return -(-num_experts // num_ranks), num_experts // num_ranks
