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

from tlp.core.errors import InvalidInputError
from tlp.language import metaschedule_encoder as layout
from tlp.language.vocabulary import UNKNOWN
from tlp.model.network import MTLTLP

_EXPONENT = 80.0  # e to that is far from what float32 and bfloat16 can hold

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
    """Programs as the head's last layer sees them."""

    scores: FloatArray  # (N,) float32, higher = faster
    hidden: FloatArray  # (N, D) float32, the last layer's input summed over rows; scores are linear in it


class Inference:
    """The only head of a network (`MTLTLP.keep_head`), its weights copied and laid out for scoring.

    `precision` is that of the matrix products. Raises InvalidInputError: not `fits(network)`.
    """

    def __init__(self, network: MTLTLP, precision: Precision = Precision.FLOAT32) -> None:
        if not self.fits(network):
            raise InvalidInputError("dense scoring needs one head, a token table and masked padding")
        self._network = network
        self._dtype = precision.dtype()
        if network.profile_rows:
            self._low, self._step, self._profile = self._bins(network)
        kinds = network.config.width - layout.SCALARS.start
        weight, bias = network.input.weight.detach(), network.input.bias.detach()
        self._same = weight[:, :-kinds].t(), bias  # of what is the same for all programs of a sketch, float32
        self._input = weight[:, -kinds:].to(self._dtype)
        self._embed = self._layers(network.embed)
        self._qkv = self._query_scaled(network.attention_in)
        self._out = self._weights(network.attention_out)
        self._blocks = [weights for block in network.residuals for weights in self._layers(block)]
        *self._head, last = self._layers(network.heads[0])
        self._last = last[0].float()[0], float(last[1])

    @staticmethod
    def fits(network: MTLTLP) -> bool:
        """Whether the network is of the kind this computes (the shipped one is)."""
        config = network.config
        return config.mask_padding and config.token_table and len(config.heads) == 1

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
        rows = rows[:, :L]
        numbers = (rows[..., layout.SCALARS.start :] - network.mean) * network.scale
        h = F.linear(numbers.to(self._dtype), self._input) + self._words(rows)
        if network.profile_rows:
            h = h + self._profile_of(x)[:, None]
        h = h.view(B * L, -1)
        for layer in self._embed:
            h = F.linear(F.relu_(h), *layer)
        h = F.relu_(h)
        h = h + F.linear(self._attend(h, B, L), *self._out)
        for layer in self._blocks:
            h = F.relu_(F.linear(h, *layer)) + h
        for layer in self._head:
            h = F.relu_(F.linear(h, *layer))
        return h.view(B, L, -1).sum(dim=1, dtype=torch.float32), L

    def _words(self, rows: Tensor) -> Tensor:
        """Kinds and tokens of `(B, L, E)`: `(1, L, first)` if all programs have the same, as those of a sketch do."""
        network = self._network
        fixed = rows[..., : layout.SCALARS.start]
        tokens = rows[..., layout.WORDS.start : layout.SCALARS.start]
        if bool((tokens == tokens[:1]).all()):  # kinds are the sketch's in any case
            fixed = fixed[:1]
        words = fixed[..., layout.WORDS].long()
        words = torch.where(words < network.config.words, words, UNKNOWN)
        weight, bias = self._same
        kinds = fixed[..., layout.KIND] @ weight + bias
        embedded: Tensor = kinds + network.words(words).sum(dim=-2) + network.loops(fixed[..., layout.LOOP].long())
        return embedded.to(self._dtype)

    def _bins(self, network: MTLTLP) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """The profile's bins as `clamp(number · step - low)`, and its layers for 0 … 1 instead of -1 … 1."""
        profile = network.profile
        used = profile.span > 0
        step = torch.where(used, 1.0 / profile.span.clamp_min(1e-30), 0.0)
        first, second = (layer for layer in profile.layers if isinstance(layer, nn.Linear))
        weight = first.weight.detach() * used.flatten()
        folded = (2.0 * weight).to(self._dtype), (first.bias.detach() - weight.sum(dim=1)).to(self._dtype)
        return profile.low * step, step, [folded, self._weights(second)]

    def _profile_of(self, x: Tensor) -> Tensor:
        numbers = self._network._numbers(x)
        spread = (numbers[:, None, :] * self._step).sub_(self._low).clamp_(0.0, 1.0).flatten(1)
        first, second = self._profile
        hidden = F.gelu(F.linear(spread.to(self._dtype), *first))
        return F.linear(hidden, *second)

    def _attend(self, h: Tensor, B: int, L: int) -> Tensor:
        """Two batched products beat the fused kernel at so few rows, 15 or so; and exponentials and a product with
        ones beat a softmax over so short a dimension, as long as they are numbers."""
        heads = self._network.config.attention_heads
        width = h.shape[-1] // heads
        qkv = F.linear(h, *self._qkv).view(B, L, 3, heads, width).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * heads, L, width)
        logits = torch.bmm(q, k.transpose(1, 2))
        low, high = torch.aminmax(logits)
        if max(-float(low), float(high)) > _EXPONENT:
            attended = torch.bmm(F.softmax(logits, dim=2), v).view(-1, width)
        else:
            weights = logits.exp_()
            attended = torch.bmm(weights, v).view(-1, width)
            attended.div_(weights.view(-1, L) @ weights.new_ones(L, width))  # their sum, as wide as what it divides
        return attended.view(B, heads, L, width).transpose(1, 2).reshape(B * L, -1)

    def _query_scaled(self, layer: nn.Linear) -> tuple[Tensor, Tensor]:
        """The attention's input layer, queries divided by the root of their width."""
        width = layer.in_features // self._network.config.attention_heads
        scale = torch.ones(layer.out_features, 1)
        scale[: layer.in_features] = width**-0.5
        return (layer.weight.detach() * scale).to(self._dtype), (layer.bias.detach() * scale[:, 0]).to(self._dtype)

    def _layers(self, layers: nn.Module) -> list[tuple[Tensor, Tensor]]:
        return [self._weights(layer) for layer in layers.children() if isinstance(layer, nn.Linear)]

    def _weights(self, layer: nn.Linear) -> tuple[Tensor, Tensor]:
        return layer.weight.detach().to(self._dtype), layer.bias.detach().to(self._dtype)
