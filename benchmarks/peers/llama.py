"""Llama in plain PyTorch, as small as it can be: what the peers' benchmarks train.

Attention is `scaled_dot_product_attention` (cuDNN or FlashAttention), norms and SwiGLU are left to `torch.compile`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 128_256
    rope_theta: float = 500_000.0
    tied: bool = False

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward, causal attention counted once: 6 a weight of a matrix and 6 · layers · heads · head_dim · sequence."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        matrices = self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab
        return 6.0 * matrices + 6.0 * self.layers * self.heads * self.head_dim * sequence


SHAPES = {
    "llama3-8b": Shape(4096, 14336, 32, 32, 8, 128),
    "llama3.2-1b": Shape(2048, 8192, 16, 32, 8, 64, tied=True),
    "tiny": Shape(128, 256, 2, 4, 2, 32, vocab=512),
}


def rotary(sequence: int, shape: Shape, device) -> torch.Tensor:
    """Cosines and sines, [2, sequence, head_dim]."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(sequence, device=device, dtype=torch.float64), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x: [batch, sequence, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    cos, sin = angles[0, :, None], angles[1, :, None]
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        heads = lambda y: y.view(batch, sequence, -1, self.shape.head_dim)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, sequence, -1))


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), angles)
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.output.weight = self.embed.weight

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, tokens: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.output(self.norm(x))
