"""The shared expert: an ordinary MLP that every token passes through.

It is the same on every rank, so its parameters are ordinary data-parallel parameters and carry no mark.

Letters: T tokens, H hidden, F ffn width (`shared_ffn_hidden_size`).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from moe_ep.config import MoEConfig
from moe_ep.errors import ConfigError
from moe_ep.layers.activations import input_projection, mlp


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
        return mlp(x_TH, self._first.weight, self.down.weight, self.activation).to(x_TH.dtype)

    @property
    def _first(self) -> nn.Linear:
        return cast(nn.Linear, self.get_submodule(self.first_name))
