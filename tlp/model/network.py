"""The network of TLP with one head per device (MTL-TLP), arXiv 2211.03578 §4.3 and §5.

Notation

    B  programs in a batch
    L  rows of a program (primitives), padding included
    E  columns of a row
    T  rows in use in the whole batch, T ≤ B·L
    C  width of the attention, 256
    H  heads = devices

    x (B, L, E)
      → Linear E→64, + token and loop tables, ReLU, →128→256→C, ReLU each      every row alone
      → multi-head attention over the rows of one program, + skip              the only place where rows meet
      → 2 × (Linear C→C, ReLU, + skip)                                         every row alone
      → per device: C→128→64→1                                                 every row alone
      → sum over the rows in use                                               (B, H)

What is done per row is done on the T rows in use only. Differences from the paper, each switched by `TLPConfig`:
padding is masked (the paper adds its rows to the sum), tokens are looked up (the paper feeds their numbers in).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tlp.errors import InvalidInputError
from tlp.language import encoder as layout
from tlp.language.vocabulary import UNKNOWN
from tlp.model.config import TLPConfig


class _Residual(nn.Module):
    """ReLU(Linear(x)) + x."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (T, C) → (T, C)
        out: Tensor = self.dropout(F.relu(self.linear(x))) + x
        return out


def _head(width: int, dims: tuple[int, ...]) -> nn.Sequential:
    """C → dims → 1."""
    layers: list[nn.Module] = []
    for dim in dims:
        layers += [nn.Linear(width, dim), nn.ReLU()]
        width = dim
    layers.append(nn.Linear(width, 1))
    return nn.Sequential(*layers)


class MTLTLP(nn.Module):
    """Shared trunk, one head per device.

    Args:
        config: sizes and head names.
    """

    def __init__(self, config: TLPConfig) -> None:
        super().__init__()
        self.config = config
        first, *rest = config.dims
        channels = config.dims[-1]
        if config.token_table:
            inputs = layout.KIND_SLOTS + layout.NUMBERS.stop - layout.NUMBERS.start
            self.words = nn.Embedding(config.words, first, padding_idx=0)
            self.loops = nn.Embedding(layout.LOOP_SLOTS, first, padding_idx=0)
        else:
            inputs = config.width
        self.input = nn.Linear(inputs, first)
        self.embed = nn.ModuleList(nn.Linear(a, b) for a, b in zip(config.dims, rest, strict=False))
        self.attention_in = nn.Linear(channels, 3 * channels)
        self.attention_out = nn.Linear(channels, channels)
        self.residuals = nn.ModuleList(_Residual(channels, config.dropout) for _ in range(config.residual_blocks))
        self.dropout = nn.Dropout(config.dropout)
        self.heads = nn.ModuleList(_head(channels, config.head_dims) for _ in config.heads)

    @property
    def head_names(self) -> tuple[str, ...]:
        """Devices, in the order of the output's columns."""
        return self.config.heads

    def add_head(self, name: str, from_head: str | None = None) -> None:
        """A head for one more device, new or a copy of another device's.

        Raises:
            InvalidInputError: the device has a head, or `from_head` has none.
        """
        if name in self.config.heads:
            raise InvalidInputError(f"the model has a head for {name!r} already: {', '.join(self.config.heads)}")
        head = _head(self.config.dims[-1], self.config.head_dims)
        if from_head is not None:
            if from_head not in self.config.heads:
                raise InvalidInputError(f"the model has no head {from_head!r}, only {', '.join(self.config.heads)}")
            head.load_state_dict(self.heads[self.config.heads.index(from_head)].state_dict())
        self.heads.append(head)
        self.config = self.config.with_heads((*self.config.heads, name))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores, higher = faster.

        Args:
            x: `(B, L, E)` float32 from the encoder.
            mask: `(B, L)` bool, True for rows in use; derived from the kind columns if None.

        Returns:
            `(B, H)` float32, columns in the order of `head_names`.
        """
        B, L, _ = x.shape
        if not self.config.mask_padding:
            mask = torch.ones(B, L, dtype=torch.bool, device=x.device)
        else:
            mask = x[..., layout.KIND].any(dim=-1) if mask is None else mask
            L = max(int(mask.sum(dim=1).max()), 1) if B else L  # rows in use stand first: crop the common padding
            x, mask = x[:, :L], mask[:, :L]
        rows = self._rows(x[mask])  # (T, C)
        rows = rows + self._attend(rows, mask)
        for block in self.residuals:
            rows = block(rows)
        scores = torch.cat([head(rows) for head in self.heads], dim=-1)  # (T, H)
        program = torch.arange(B, device=x.device).repeat_interleave(mask.sum(dim=1))  # (T,)
        return torch.zeros(B, len(self.heads), device=x.device, dtype=scores.dtype).index_add(0, program, scores)

    def _rows(self, x: Tensor) -> Tensor:
        """Embed each row: `(T, E)` → `(T, C)`."""
        if self.config.token_table:
            words = x[:, layout.WORDS].long()  # (T, 3)
            words = torch.where(words < self.config.words, words, UNKNOWN)
            loops = x[:, layout.LOOP].long()  # (T,)
            h = self.input(torch.cat([x[:, layout.KIND], x[:, layout.NUMBERS]], dim=-1))
            h = h + self.words(words).sum(dim=1) + self.loops(loops)
        else:
            h = self.input(x)
        for layer in self.embed:
            h = layer(F.relu(h))
        out: Tensor = self.dropout(F.relu(h))
        return out

    def _attend(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Attention among the rows of each program: `(T, C)` → `(T, C)`."""
        B, L = mask.shape
        C, A = self.config.dims[-1], self.config.attention_heads
        packed = rows.new_zeros(B, L, 3 * C)
        packed[mask] = self.attention_in(rows)
        q, k, v = packed.view(B, L, 3, A, C // A).permute(2, 0, 3, 1, 4)  # each (B, A, L, C/A)
        bias = torch.zeros(B, 1, 1, L, device=rows.device, dtype=rows.dtype)
        bias = bias.masked_fill(~mask[:, None, None, :], torch.finfo(rows.dtype).min)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # (B, A, L, C/A)
        h = h.transpose(1, 2).reshape(B, L, C)[mask]  # (T, C)
        out: Tensor = self.attention_out(h)
        return out
