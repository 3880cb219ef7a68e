"""Scoring many programs of one sketch with one head, as fast as a CPU allows.

A search scores thousands of programs of one sketch. They use the same rows, so nothing is masked, gathered or
scattered: what `MTLTLP.forward` does on the rows in use becomes dense. With bfloat16 the matrix products and the
attention are computed in half the bits (accumulated in float32 by the CPU's instructions); the profile's bins, the
standardised numbers and the final sum stay float32, because quantile bins are finer than bfloat16.

    score = w · Σ_rows h + L·b,    h (L, D): what the head's last layer reads                  (`Pooled`)

The sum over rows comes before the last layer here, so that a program is one vector `(D,)` for whoever adapts that
layer (`tlp.search.adaptation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tlp.errors import InvalidInputError
from tlp.language import encoder as layout
from tlp.language.vocabulary import UNKNOWN
from tlp.model.network import MTLTLP

FloatArray = npt.NDArray[np.float32]


class Precision(StrEnum):
    """Of the matrix products. AUTO: bfloat16 if the CPU has instructions for it (AVX512-BF16, AMX), else float32."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def dtype(self) -> torch.dtype:
        """What it means on this machine."""
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        half = self is Precision.BFLOAT16 or (self is Precision.AUTO and native)
        return torch.bfloat16 if half else torch.float32


@dataclass(frozen=True)
class Pooled:
    """Programs as the head's last layer sees them.

    Attributes:
        scores: `(N,)` float32, higher = faster.
        hidden: `(N, D)` float32, the last layer's input summed over rows; `scores` are linear in it.
    """

    scores: FloatArray
    hidden: FloatArray


class Inference:
    """One head of a network, its weights laid out for scoring.

    Args:
        network: with one head (`MTLTLP.keep_head`); its weights are copied.
        precision: of the matrix products.

    Raises:
        InvalidInputError: a network that this cannot compute: see `fits`.
    """

    def __init__(self, network: MTLTLP, precision: Precision = Precision.FLOAT32) -> None:
        if not self.fits(network):
            raise InvalidInputError("dense scoring needs one head, a token table, masked padding and no common head")
        self._network = network
        self._dtype = precision.dtype()
        self._profile = self._layers(network.profile.layers) if network.profile_rows else []
        self._input = self._weights(network.input)
        self._embed = self._layers(network.embed)
        self._qkv = self._weights(network.attention_in)
        self._out = self._weights(network.attention_out)
        self._blocks = [weights for block in network.residuals for weights in self._layers(block)]
        *self._head, last = self._layers(network.heads[0])
        self._last = last[0].float()[0], float(last[1])

    @staticmethod
    def fits(network: MTLTLP) -> bool:
        """Whether the network is of the kind this computes (the shipped one is)."""
        config = network.config
        plain = config.mask_padding and config.token_table and not config.positions and not config.common_head
        return plain and len(config.heads) == 1

    def __call__(self, features: FloatArray) -> Pooled:
        """`(N, L, E)` encoded programs **of one sketch** → scores and pooled vectors."""
        with torch.inference_mode():
            hidden, rows = self._hidden(torch.from_numpy(np.ascontiguousarray(features)))
            weight, bias = self._last
            return Pooled((hidden @ weight + rows * bias).numpy(), hidden.numpy())

    def _hidden(self, x: Tensor) -> tuple[Tensor, int]:
        """`(B, L, E)` → `(B, D)` and the number of rows in use."""
        network, B = self._network, len(x)
        rows = x[:, network.profile_rows :]
        L = max(int(rows[:1, :, layout.KIND].any(dim=-1).sum()), 1)
        rows = rows[:, :L].reshape(B * L, -1)
        h = F.linear(self._numbers(rows), *self._input) + self._tokens(rows)
        if network.profile_rows:
            h = (h.view(B, L, -1) + self._profile_of(x)[:, None]).view(B * L, -1)
        for layer in self._embed:
            h = F.linear(F.relu_(h), *layer)
        h = F.relu_(h)
        h = h + F.linear(self._attend(h, B, L), *self._out)
        for layer in self._blocks:
            h = F.relu_(F.linear(h, *layer)) + h
        for layer in self._head:
            h = F.relu_(F.linear(h, *layer))
        return h.view(B, L, -1).sum(dim=1, dtype=torch.float32), L

    def _numbers(self, rows: Tensor) -> Tensor:
        network = self._network
        numbers = (rows[:, layout.SCALARS.start :] - network.mean) * network.scale
        both = torch.cat([rows[:, layout.KIND], numbers], dim=-1)
        return both.to(self._dtype)

    def _tokens(self, rows: Tensor) -> Tensor:
        network = self._network
        words = rows[:, layout.WORDS].long()
        words = torch.where(words < network.config.words, words, UNKNOWN)
        looked_up = F.embedding_bag(words, network.words.weight, mode="sum")
        both: Tensor = looked_up + network.loops(rows[:, layout.LOOP].long())
        return both.to(self._dtype)

    def _profile_of(self, x: Tensor) -> Tensor:
        spread = self._network.profile.spread(self._network._numbers(x))
        first, second = self._profile
        hidden = F.gelu(F.linear(spread.to(self._dtype), *first))
        return F.linear(hidden, *second)

    def _attend(self, h: Tensor, B: int, L: int) -> Tensor:
        """Two batched products beat the fused kernel at so few rows, 15 or so (measured: 22,000/s against 20,000)."""
        heads = self._network.config.attention_heads
        width = h.shape[-1] // heads
        qkv = F.linear(h, *self._qkv).view(B, L, 3, heads, width).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * heads, L, width)
        weights = torch.bmm(q * width**-0.5, k.transpose(1, 2)).softmax(dim=-1)
        return torch.bmm(weights, v).view(B, heads, L, width).transpose(1, 2).reshape(B * L, -1)

    def _layers(self, layers: nn.Module) -> list[tuple[Tensor, Tensor]]:
        return [self._weights(layer) for layer in layers.children() if isinstance(layer, nn.Linear)]

    def _weights(self, layer: nn.Linear) -> tuple[Tensor, Tensor]:
        return layer.weight.detach().to(self._dtype), layer.bias.detach().to(self._dtype)
