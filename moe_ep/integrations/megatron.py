"""Megatron-Core's MoE layer on this package's exchange; router, experts, shared experts and the rest stay Megatron's.

Three ways in, for megatron-core 0.16 to 0.19:

- `pretrain_gpt.py --spec moe_ep.integrations.megatron spec` takes the layer spec below: Megatron's own layers for its
  own configuration, with `MoELayer` where it has an MoE layer. A file of yours with
  `spec = layer_spec("moe_ep.yaml")` adds the settings `moe.ep` of a YAML file.
- `with_moe_ep(spec)` does the same to any layer spec or block spec that you build yourself.
- `moe_ep.integrations.deep_ep.install()` changes nothing in Megatron: its flex dispatcher then finds this package
  under DeepEP's name. It permutes rows in a pass of its own there, which the ways above do not need.

`MoELayer` answers to every `moe_token_dispatcher_type`; the type then only decides what Megatron checks and how its
schedules treat the layer.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moe_ep.integrations.megatron_versions import decoder_layer_spec, with_moe_layer

# isort: split
# After the above, which says what is missing where Megatron-Core is.
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from moe_ep.buffer import Buffer
from moe_ep.config import EPConfig
from moe_ep.integrations.megatron_dispatcher import ExchangeManager, TokenDispatcher
from moe_ep.integrations.megatron_settings import Settings, close_buffers, transformer_fields

__all__ = [
    "ExchangeManager",
    "MoELayer",
    "MoETransformerLayer",
    "Settings",
    "TokenDispatcher",
    "close_buffers",
    "layer_spec",
    "spec",
    "transformer_fields",
    "with_moe_ep",
]

_STOCK_DISPATCHERS = ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher")


class MoELayer(moe_layer.MoELayer):
    """Megatron's MoE layer with this package's dispatcher.

    Args:
        config, submodules, layer_number, pg_collection and others: as for Megatron's MoELayer of the installed version.
        settings: this package's part: a `Settings`, a section `moe.ep`, or the path of a YAML file.

    Raises:
        ConfigError: settings that cannot work here; the sentence names Megatron's field.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        *args: Any,
        settings: Settings | EPConfig | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        with _dispatchers_replaced(Settings.of(settings)):
            super().__init__(config, submodules, *args, **kwargs)

    @property
    def buffer(self) -> Buffer:
        """The exchange, shared by the layers of one configuration; `buffer.backend_name` says what moves the rows."""
        buffer: Buffer = self.token_dispatcher._comm_manager.buffer
        return buffer


class MoETransformerLayer(TransformerLayer):
    """A transformer layer as Megatron's own spec for `config` describes it, with `MoELayer` in it.

    A layer spec that names this class needs nothing else: which layers are dense (`moe_layer_freq`), local or
    Transformer Engine modules, grouped GEMM and attention all come from `config` when the layer is built.

    Args:
        config, layer_number, vp_stage, pg_collection and others: as for Megatron's TransformerLayer.
        submodules: None for Megatron's own.
        settings: as for `MoELayer`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int = 1,
        *args: Any,
        settings: Settings | EPConfig | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if submodules is None:
            submodules = decoder_layer_spec(config, layer_number, kwargs.get("vp_stage")).submodules
        submodules = _with_moe_layer(submodules, Settings.of(settings), kwargs.get("pg_collection"))
        super().__init__(config, submodules, layer_number, *args, **kwargs)


def layer_spec(settings: Settings | EPConfig | str | os.PathLike[str] | None = None) -> Any:
    """A layer spec for `--spec`: a name of your module that holds what this returns.

    Args:
        settings: as for `MoELayer`.
    """
    return ModuleSpec(module=MoETransformerLayer, params={"settings": Settings.of(settings)})


def with_moe_ep(
    spec: Any, settings: Settings | EPConfig | str | os.PathLike[str] | None = None, pg_collection: Any = None
) -> Any:
    """A copy of a layer spec or block spec whose MoE layers run on this package; dense layers stay.

    Args:
        spec: a ModuleSpec of a transformer layer, or TransformerBlockSubmodules.
        settings: as for `MoELayer`.
        pg_collection: process groups, where they are not Megatron's global ones.
    """
    settings = Settings.of(settings)
    changed = copy.copy(spec)
    if isinstance(spec, TransformerBlockSubmodules):
        changed.layer_specs = [with_moe_ep(layer, settings, pg_collection) for layer in spec.layer_specs]
    else:
        changed.submodules = _with_moe_layer(spec.submodules, settings, pg_collection)
    return changed


def _with_moe_layer(submodules: Any, settings: Settings, pg_collection: Any) -> Any:
    changed = copy.copy(submodules)
    changed.mlp = with_moe_layer(submodules.mlp, MoELayer, moe_layer.MoELayer, pg_collection, settings=settings)
    return changed


@contextmanager
def _dispatchers_replaced(settings: Settings) -> Iterator[None]:
    """While Megatron's constructor runs, each name that it may look a dispatcher up by gives this package's.

    There is no registry, and a stock dispatcher built only to be replaced asks for packages and makes streams.
    """

    build = functools.partial(TokenDispatcher, settings=settings)
    stock = {name: getattr(moe_layer, name) for name in _STOCK_DISPATCHERS}
    try:
        for name in stock:
            setattr(moe_layer, name, build)
        yield
    finally:
        for name, dispatcher in stock.items():
            setattr(moe_layer, name, dispatcher)


spec = layer_spec()
