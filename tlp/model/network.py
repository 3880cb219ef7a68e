"""The network of TLP with one head per device (MTL-TLP), arXiv 2211.03578 §4.3 and §5.

Notation

    B  programs in a batch
    L  rows of a program (primitives), padding included
    E  columns of a row
    T  rows in use in the whole batch, T ≤ B·L
    C  width of the attention
    H  heads = devices

    K  numbers of a program's profile; Q bins of each

    x (B, L, E)
      profile rows → (B, K) → piecewise-linear (B, Q·K) → Linear, GELU, Linear → (B, first width)
      → numbers standardised, Linear E→first, + token and loop tables + profile,
        ReLU, → … → C, ReLU each                                               every row alone
      → multi-head attention over the rows of one program, + skip              the only place where rows meet
      → 2 × (Linear C→C, ReLU, + skip)                                         every row alone
      → per device: C→128→64→1                                                 every row alone
      → sum over the rows in use                                               (B, H)

What is done per row is done on the T rows in use only. Differences from the paper, each switched by `TLPConfig`:
padding is masked (the paper adds its rows to the sum), tokens are looked up (the paper feeds their numbers in), and
encoders with a profile (`tlp.language.profile`) add it to every row, each of its numbers spread over bins: between the
edges of a bin it rises from -1 to 1 (Gorishniy et al. 2022, "On embeddings for numerical features", §3.2). An MLP on
plain numbers ranks worse than trees here; on these it ranks better.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tlp.core.errors import InvalidInputError
from tlp.language import metaschedule_encoder as layout
from tlp.language.profile import PROFILE_WIDTH
from tlp.language.vocabulary import UNKNOWN
from tlp.model.config import TLPConfig

MIN_SPREAD = 0.5  # of a row's number; most rows have most numbers 0, and a rare one must not become huge


class _Residual(nn.Module):
    """ReLU(Linear(x)) + x."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (T, C) → (T, C)
        out: Tensor = self.dropout(F.relu(self.linear(x))) + x
        return out


class _Profile(nn.Module):
    """Numbers of a whole program, over bins, as one vector: `(B, K)` → `(B, width)`.

    The bins' edges are quantiles of the training programs (`calibrate`); a bin of no width is left out. Until then
    they are even steps of 32 / Q.
    """

    low: Tensor  # (Q, K)
    span: Tensor  # (Q, K), 0: left out

    def __init__(self, numbers: int, bins: int, width: int, dropout: float) -> None:
        super().__init__()
        step = 32.0 / bins
        self.register_buffer("low", (torch.arange(bins) * step)[:, None].repeat(1, numbers))
        self.register_buffer("span", torch.full((bins, numbers), step))
        self.layers = nn.Sequential(
            nn.Linear(bins * numbers, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width)
        )

    def calibrate(self, numbers: Tensor) -> None:
        """Set the edges of the first K' numbers from `(M, K')` of training programs; the others keep even steps."""
        levels = torch.linspace(0, 1, len(self.low) + 1, dtype=numbers.dtype)
        edges = torch.quantile(numbers, levels, dim=0)  # (Q + 1, K)
        self.low[:, : numbers.shape[1]] = edges[:-1]
        self.span[:, : numbers.shape[1]] = torch.where(edges[1:] - edges[:-1] > 1e-6, edges[1:] - edges[:-1], 0.0)

    def spread(self, numbers: Tensor) -> Tensor:
        """Each number over its bins: `(B, K)` → `(B, Q·K)` in -1 … 1."""
        used = self.span > 0
        part = (numbers[:, None, :] - self.low) / torch.where(used, self.span, 1.0)  # (B, Q, K)
        return ((part.clamp(0.0, 1.0) * 2.0 - 1.0) * used).flatten(1)

    def forward(self, numbers: Tensor) -> Tensor:
        out: Tensor = self.layers(self.spread(numbers))
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
    """Shared trunk, one head per device."""

    mean: Tensor  # of a row's numbers, (E - first number's column,)
    scale: Tensor

    def __init__(self, config: TLPConfig) -> None:
        super().__init__()
        self.config = config
        first, *rest = config.dims
        channels = config.dims[-1]
        self.profile_rows, self.profile_width = config.profile_rows, config.profile_width
        if self.profile_rows:
            self.profile = _Profile(config.profile_width, config.profile_bins, first, config.dropout)
        if config.token_table:
            numbers = config.width - layout.SCALARS.start
            self.register_buffer("mean", torch.zeros(numbers))
            self.register_buffer("scale", torch.ones(numbers))
            inputs = layout.KIND_SLOTS + numbers
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

    def keep_head(self, name: str) -> None:
        """Drop all heads but one: what scoring for one device needs. Raises InvalidInputError (no such head)."""
        if name not in self.config.heads:
            raise InvalidInputError(f"the model has no head {name!r}, only {', '.join(self.config.heads)}")
        self.heads = nn.ModuleList([self.heads[self.config.heads.index(name)]])
        self.config = self.config.with_heads((name,))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores, higher = faster.

        Args:
            x: `(B, L, E)` float32 from the encoder.
            mask: `(B, L - profile rows)` bool, True for primitives in use; derived from the kind columns if None.

        Returns:
            `(B, H)` float32, columns in the order of `config.heads`.
        """
        profile = None
        if self.profile_rows:
            profile = self.profile(self._numbers(x))  # (B, first)
            x = x[:, self.profile_rows :]
        B, L, _ = x.shape
        if not self.config.mask_padding:
            mask = torch.ones(B, L, dtype=torch.bool, device=x.device)
        else:
            mask = x[..., layout.KIND].any(dim=-1) if mask is None else mask
            L = max(int(mask.sum(dim=1).max()), 1) if B else L  # rows in use stand first: crop the common padding
            x, mask = x[:, :L], mask[:, :L]
        counts = mask.sum(dim=1)
        program = torch.arange(B, device=x.device).repeat_interleave(counts)  # (T,)
        added = None if profile is None else profile[program]  # (T, first)
        rows = self._rows(x[mask], added)  # (T, C)
        rows = rows + self._attend(rows, mask)
        for block in self.residuals:
            rows = block(rows)
        scores = torch.cat([head(rows) for head in self.heads], dim=-1)  # (T, H)
        return torch.zeros(B, len(self.heads), device=x.device, dtype=scores.dtype).index_add(0, program, scores)

    def calibrate(self, x: Tensor) -> None:
        """Set what depends on the ranges of the training data: `(M, L, E)` encoded programs. Before training only."""
        if self.profile_rows:
            self.profile.calibrate(self._numbers(x)[:, :PROFILE_WIDTH])  # cores: few devices say nothing of others
        if self.config.token_table:
            rows = x[:, self.profile_rows :].flatten(0, 1)
            numbers = rows[rows[:, layout.KIND].any(dim=-1)][:, layout.SCALARS.start :]
            if len(numbers) > 1:
                self.mean.copy_(numbers.mean(dim=0))
                self.scale.copy_(1.0 / numbers.std(dim=0).clamp_min(MIN_SPREAD))

    def _numbers(self, x: Tensor) -> Tensor:
        """The profile of `(B, L, E)` encoded programs: `(B, K)`."""
        return x[:, : self.profile_rows].flatten(1)[:, : self.profile_width]

    def _rows(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Embed each row: `(T, E)` and `(T, first)` → `(T, C)`."""
        if self.config.token_table:
            words = x[:, layout.WORDS].long()  # (T, 3)
            words = torch.where(words < self.config.words, words, UNKNOWN)
            loops = x[:, layout.LOOP].long()  # (T,)
            numbers = (x[:, layout.SCALARS.start :] - self.mean) * self.scale
            h = self.input(torch.cat([x[:, layout.KIND], numbers], dim=-1))
            h = h + self.words(words).sum(dim=1) + self.loops(loops)
        else:
            h = self.input(x)
        if added is not None:
            h = h + added
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
