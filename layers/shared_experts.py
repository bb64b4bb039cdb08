"""The shared expert: an ordinary MLP that every token passes through.

It is the same on every rank, so its parameters are ordinary data-parallel parameters and carry no mark.

`SharedRun` cuts it in two, for work beside a dispatch and beside a combine (`moe_ep.autograd.beside`).

Letters: T tokens, H hidden, F ffn width (`shared_ffn_hidden_size`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ep.autograd import sm_margin
from moe_ep.config import MoEConfig
from moe_ep.errors import ConfigError
from moe_ep.layers.activations import activate, input_projection
from moe_ep.layers.grouped_linear import linear_per_expert, one_gemm_serves

Linear = Callable[[Tensor, Tensor], Tensor]


class SharedExperts(nn.Module):
    """MLP over all tokens.

    Attributes:
        gate_up (SwiGLU) or up (GELU): linear without bias, weight [2F, H] or [F, H].
        down: linear without bias, weight [H, F].
    """

    def __init__(self, config: MoEConfig) -> None:
        """Build the MLP from `config.shared_ffn_hidden_size`.

        Raises:
            ConfigError: `shared_ffn_hidden_size` is None.
        """
        super().__init__()
        if config.shared_ffn_hidden_size is None:
            raise ConfigError(
                "shared_ffn_hidden_size is None, which means no shared expert; set it to an integer >= 1 to have one."
            )
        self.config = config
        self.activation = config.activation
        self.first_name, first_width = input_projection(config.activation, config.shared_ffn_hidden_size)
        self.add_module(self.first_name, nn.Linear(config.hidden_size, first_width, bias=False))
        self.down = nn.Linear(config.shared_ffn_hidden_size, config.hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both weights from normal(0, init_std)."""
        for linear in (self._first, self.down):
            nn.init.normal_(linear.weight, mean=0.0, std=self.config.init_std)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Run the MLP.

        Args:
            x_TH: [T, H] in the dtype of the parameters, or any floating dtype under autocast; T may be 0.

        Returns:
            [T, H] in the dtype of x_TH, also under autocast.
        """
        return self.finish(self.begin(x_TH), x_TH.dtype)

    def begin(self, x_TH: Tensor, linear: Linear | None = None) -> Tensor:
        """The first half, [T, F] in the dtype of the GEMM; by `linear` in the place of the module where it is given."""
        projected = self._first(x_TH) if linear is None else linear(x_TH, self._first.weight)
        return activate(projected, self.activation)

    def finish(self, inner_TF: Tensor, dtype: torch.dtype, linear: Linear | None = None) -> Tensor:
        """The second half, [T, H] in `dtype`; `linear` as in `begin`."""
        y_TH: Tensor = self.down(inner_TF) if linear is None else linear(inner_TF, self.down.weight)
        return y_TH.to(dtype)

    def is_plain(self) -> bool:
        """Whether both projections are the modules that were built, with nothing around them: weights say it all."""
        linears = (self._first, self.down)
        return not any(_has_hooks(module) for module in (self, *linears)) and all(type(x) is nn.Linear for x in linears)

    @property
    def _first(self) -> nn.Linear:
        return cast(nn.Linear, self.get_submodule(self.first_name))


class SharedRun:
    """shared(x_TH) in two steps, each done once.

    All of it is one step unless it runs `apart`, beside exchanges; also where something wraps it or a projection of it,
    or has hooks on them, as with FSDP2, checkpoints and adapters.
    """

    def __init__(self, shared: nn.Module, x_TH: Tensor, apart: bool) -> None:
        self._shared, self._x_TH = shared, x_TH
        self._in_halves = apart and type(shared) is SharedExperts and shared.is_plain()
        self._inner: Tensor | None = None
        self._y_TH: Tensor | None = None

    def begin(self) -> None:
        """The first step."""
        if isinstance(self._shared, SharedExperts) and self._in_halves:
            self._inner = self._shared.begin(self._x_TH, _linear)
        else:
            self._y_TH = self._shared(self._x_TH)

    def finish(self) -> None:
        """The second step, or both."""
        if self._inner is None and self._y_TH is None:
            self.begin()
        if isinstance(self._shared, SharedExperts) and self._inner is not None:
            self._y_TH, self._inner = self._shared.finish(self._inner, self._x_TH.dtype, _linear), None

    def result(self) -> Tensor:
        """[T, H]."""
        self.finish()
        assert self._y_TH is not None
        return self._y_TH


def _has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


def _linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x_TI @ weight_OI.T, in bfloat16 by the GEMM that leaves SMs to an exchange where it is to: the grouped one."""
    shape = (1, *weight_OI.shape)
    same = x_TI.dtype == weight_OI.dtype and not torch.is_autocast_enabled(x_TI.device.type)
    if not (same and sm_margin.is_set()) or not one_gemm_serves(x_TI.device, x_TI.dtype, shape):
        return F.linear(x_TI, weight_OI)
    offsets = torch.zeros(2, dtype=torch.int32, device=x_TI.device)
    offsets[1:].fill_(x_TI.shape[0])
    return linear_per_expert(x_TI, weight_OI.unsqueeze(0), offsets, has_tail=False)
