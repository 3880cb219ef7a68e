"""BERT encoders (Devlin et al. 2018; the tiny size is from Turc et al. 2019): token ids → last hidden state."""

from __future__ import annotations

import torch
from torch import nn

from tlp.programs.zoo import SEQUENCE, VOCABULARY


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with a residual and LayerNorm after it: (1, S, H) → (1, S, H)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)
        self.norm_attention = nn.LayerNorm(hidden, eps=1e-12)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm_output = nn.LayerNorm(hidden, eps=1e-12)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        return x.reshape(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        # Written out, not scaled_dot_product_attention: both products and the softmax become tasks of their own.
        scores = torch.matmul(query, key.transpose(-1, -2)) / (query.shape[-1] ** 0.5)
        context = torch.matmul(torch.softmax(scores, -1), value).transpose(1, 2).reshape(x.shape)
        x = self.norm_attention(x + self.output(context))
        out: torch.Tensor = self.norm_output(x + self.down(nn.functional.gelu(self.up(x))))
        return out


class Bert(nn.Module):
    """Token ids (1, S) int64 → last hidden state (1, S, hidden) float32."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, hidden))
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.Sequential(*(EncoderLayer(hidden, heads) for _ in range(layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See the class."""
        out: torch.Tensor = self.layers(self.norm(self.tokens(ids) + self.positions))
        return out


def bert_tiny() -> nn.Module:
    """2 layers, hidden size 128, 2 heads."""
    return Bert(2, 128, 2)


def bert_base() -> nn.Module:
    """12 layers, hidden size 768, 12 heads."""
    return Bert(12, 768, 12)
