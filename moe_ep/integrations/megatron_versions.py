"""What differs between releases of Megatron-Core, in one place: 0.16 to 0.19.

- The MoE layer stands in a layer spec as `ModuleSpec(module, params, submodules)` up to 0.17, which gives the process
  groups to Megatron's own class only, and as `functools.partial(class, submodules=...)` from 0.18 on.
- The SM budget is `moe_deepep_num_sms` or `moe_hybridep_num_sms`; 0.19 moves both to `moe_flex_dispatcher_num_sms`.
- Without FP8, 0.16 names 16 as the alignment of an expert's rows and 0.19 names 0; neither pads then.
- The constructor of the MoE layer takes `is_mtp_layer` from 0.17 on, later `name`: passed through as they come.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

try:
    import megatron.core
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
    from megatron.core.transformer.spec_utils import ModuleSpec
except ImportError as error:
    raise ImportError(
        f"moe_ep.integrations.megatron needs megatron-core 0.16 to 0.19, which could not be imported ({error}); "
        "pip install megatron-core (0.17 and later want Python 3.12 and triton)."
    ) from error

OLDEST, FIRST_UNKNOWN = (0, 16), (0, 20)


def check_version(version: str) -> None:
    """Refuses a release whose seams are not known to this module.

    Raises:
        ImportError: `version` lies outside 0.16 to 0.19; the sentence names it.
    """
    found = tuple(int(part) for part in version.split(".")[:2])
    if OLDEST <= found < FIRST_UNKNOWN:
        return
    raise ImportError(
        f"megatron-core {version} is installed; moe_ep.integrations.megatron knows 0.16 to 0.19. Install one of those, "
        "or let Megatron's own flex dispatcher run on moe_ep.integrations.deep_ep.install()."
    )


check_version(megatron.core.__version__)


def num_sms(config: Any) -> int | None:
    """The SM budget that Megatron's configuration asks for; None where it leaves the choice to the dispatcher."""
    backend = getattr(config, "moe_flex_dispatcher_backend", "deepep")
    old = "moe_hybridep_num_sms" if backend == "hybridep" else "moe_deepep_num_sms"
    for name in ("moe_flex_dispatcher_num_sms", old):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    return None


def quantization_alignment(config: Any) -> int:
    """Rows that each expert's share must be a multiple of: 1, or what the GEMMs of FP8 or FP4 ask for."""
    fused_gemm = getattr(config, "use_transformer_engine_op_fuser", False)
    if config.fp8 or config.fp4 or config.moe_router_padding_for_quantization or fused_gemm:
        return max(1, int(get_align_size_for_quantization(config)))
    return 1


def with_moe_layer(mlp: Any, layer: type, base: type, pg_collection: Any = None, **params: Any) -> Any:
    """A copy of the `mlp` entry of a layer spec with `layer` in the place of `base`; any other entry as it is.

    Args:
        mlp: a `ModuleSpec` (0.16, 0.17) or a partial (0.18 on).
        layer: the subclass.
        base: Megatron's MoELayer.
        pg_collection: process groups other than Megatron's global ones; 0.16 and 0.17 give them to `base` alone.
        params: given to `layer` beside what Megatron gives it.
    """
    if isinstance(mlp, functools.partial) and isinstance(mlp.func, type) and issubclass(mlp.func, base):
        return functools.partial(layer, *mlp.args, **{**mlp.keywords, **params})
    if isinstance(mlp, ModuleSpec) and isinstance(mlp.module, type) and issubclass(mlp.module, base):
        groups = {} if pg_collection is None else {"pg_collection": pg_collection}
        entry = copy.copy(mlp)
        entry.module, entry.params = layer, {**mlp.params, **groups, **params}
        return entry
    return mlp


def decoder_layer_spec(config: Any, layer_number: int, vp_stage: int | None) -> Any:
    """Megatron's own spec of the `layer_number`-th layer (from 1) that this pipeline stage builds."""
    with_engine = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_engine, normalization=config.normalization, vp_stage=vp_stage
    )
    return block.layer_specs[layer_number - 1]
