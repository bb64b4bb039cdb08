"""A small transformer shaped like DeepSeek-V3: dense layers first, then layers with experts.

Pre-norm with RMSNorm, causal attention with rotary positions, SwiGLU. All MoE layers share one `moe_ep.Buffer`.

Letters: B sequences, S positions, H hidden, N heads, D width of a head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_ep import Buffer, MoELayer
from moe_ep.config import ModelConfig, MoEConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (arXiv:1910.07467, eq. 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions (arXiv:2104.09864)."""

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = linear(config.hidden_size, 3 * config.hidden_size, config.init_std)
        self.out = linear(config.hidden_size, config.hidden_size, config.init_std)
        head_size = config.hidden_size // config.num_heads
        frequencies = config.rope_theta ** (-torch.arange(0, head_size, 2).float() / head_size)
        angles_SD = torch.outer(torch.arange(config.max_seq_len).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos_SD", angles_SD.cos(), persistent=False)
        self.register_buffer("sin_SD", angles_SD.sin(), persistent=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        batch, seq_len, hidden = x_BSH.shape
        qkv = self.qkv(x_BSH).view(batch, seq_len, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, N, S, D]
        y_BNSD = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.out(y_BNSD.transpose(1, 2).reshape(batch, seq_len, hidden))

    def _rotate(self, x_BNSD: Tensor) -> Tensor:
        """Turns the pair (i, i + D/2) of every head by position * frequency_i."""
        seq_len = x_BNSD.shape[-2]
        x = x_BNSD.float()
        first, second = x.chunk(2, dim=-1)
        turned = x * self.cos_SD[:seq_len] + torch.cat((-second, first), dim=-1) * self.sin_SD[:seq_len]
        return turned.to(x_BNSD.dtype)


class DenseMLP(nn.Module):
    """The SwiGLU feed-forward of a layer without experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = linear(config.hidden_size, 2 * config.dense_ffn_hidden_size, config.init_std)
        self.down = linear(config.dense_ffn_hidden_size, config.hidden_size, config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        return x_BSH + self.feed_forward(self.feed_forward_norm(x_BSH))


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out.

    Built under the same `torch.manual_seed` on every rank, it has the same weights whatever the EP size.

    Args:
        config: sizes of the model.
        moe: the MoE layers.
        ep_group: the ranks that share the experts; None for one rank with all of them.
        recompute: recompute the activations of each block in the backward pass.

    Attributes:
        buffer: the exchange of all MoE layers.
    """

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, ep_group: dist.ProcessGroup | None, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.buffer = Buffer(
            ep_group, backend=moe.ep.backend, num_sms=moe.ep.comm_sms, timeout_secs=moe.ep.timeout_secs
        )
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embedding.weight)  # of size 1, like what RMSNorm hands on: tokens differ from the start
        self.blocks = nn.ModuleList()
        for layer in range(config.num_layers):
            dense = layer < config.num_dense_layers
            feed_forward = DenseMLP(config) if dense else MoELayer(moe, ep_group, buffer=self.buffer)
            self.blocks.append(Block(config, feed_forward))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = linear(config.hidden_size, config.vocab_size, config.init_std)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] int64 -> logits [B, S, vocabulary]."""
        x_BSH = self.embedding(tokens_BS)
        device_type = x_BSH.device.type
        if torch.is_autocast_enabled(device_type):  # rows then travel in this dtype too
            x_BSH = x_BSH.to(torch.get_autocast_dtype(device_type))
        for block in self.blocks:
            if self.recompute and self.training:
                x_BSH = checkpoint(block, x_BSH, use_reentrant=False)
            else:
                x_BSH = block(x_BSH)
        return self.head(self.norm(x_BSH))

    def moe_layers(self) -> list[MoELayer]:
        """The layers with experts, first one first."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]


def linear(in_features: int, out_features: int, std: float) -> nn.Linear:
    """A linear map without bias, its weight drawn from normal(0, std)."""
    layer = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer
