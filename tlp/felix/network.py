"""Felix's cost model (ASPLOS 2024, §5): an MLP over each store, a sum over stores, one head per device.

Notation

    N  programs                       F  features of a store
    S  stores of the longest          C  width after the sum
    T  stores of all programs         H  heads = devices

    features (N, S, F)
      → standardised, or each feature spread over Q bins                    every store alone
      → F → dims, SiLU each                                                 every store alone
      → sum over the stores                                                 (N, C)
      → residual layers: h + SiLU(Linear(h))                                (N, C)   `hidden`
      → one row of a linear layer per device                                (N, H)

Scores are differentiable with respect to the features. Differences from the paper: heads, SiLU instead of ReLU (a
search that descends wants gradients that do not jump), a ranking loss instead of log-MSE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tlp.core.errors import InvalidInputError
from tlp.felix.config import FEATURE_VERSION, KIND, FelixConfig
from tlp.language.encoders import language_of
from tlp.model.checkpoint import CONFIG, load_state, require_fitting, save_files
from tlp.model.kinds import MANIFEST, Manifest, read_json

MIN_SPREAD = 0.1  # of a feature's standard deviation: a rare value must not become huge
CONSTANT = 1e-6  # a feature that varies less was the same in all training programs: nothing is known about it


class FelixNetwork(nn.Module):
    """Scores programs from their stores' features, higher = faster.

    Args:
        config: sizes and head names.
    """

    mean: Tensor  # (F,)
    scale: Tensor  # (F,), 0: the feature is ignored
    low: Tensor  # (Q, F)
    span: Tensor  # (Q, F), 0: the bin is left out

    def __init__(self, config: FelixConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(config.width))
        self.register_buffer("scale", torch.ones(config.width))
        self.register_buffer("low", torch.zeros(config.bins, config.width))
        self.register_buffer("span", torch.ones(config.bins, config.width))
        widths = [config.width * (1 + config.bins), *config.dims]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        C = config.dims[-1]
        self.residuals = nn.ModuleList(nn.Linear(C, C) for _ in range(config.residual_blocks))
        self.heads = nn.Linear(C, len(config.heads))
        self.dropout = nn.Dropout(config.dropout)

    def head_index(self, head: str) -> int:
        """Column of a device's head. Raises InvalidInputError: the device has none."""
        if head not in self.config.heads:
            raise InvalidInputError(f"the model has no head for {head!r}, only for {', '.join(self.config.heads)}")
        return self.config.heads.index(head)

    def calibrate(self, rows: Tensor) -> None:
        """Set what depends on the ranges of the training data: `(T, F)` stores. Before training only."""
        spread = rows.std(dim=0, correction=0)
        self.mean.copy_(rows.mean(dim=0))
        self.scale.copy_(torch.where(spread > CONSTANT, 1.0 / spread.clamp_min(MIN_SPREAD), 0.0))
        if self.config.bins:
            levels = torch.linspace(0, 1, self.config.bins + 1, dtype=rows.dtype)
            # Most stores have most features at 0: quantiles of the others say more.
            edges = torch.stack([_quantiles(column, levels) for column in rows.T], dim=1)  # (Q + 1, F)
            self.low.copy_(edges[:-1])
            self.span.copy_(torch.where(edges[1:] - edges[:-1] > CONSTANT, edges[1:] - edges[:-1], 0.0))

    def forward(self, features: Tensor, mask: Tensor, head: str) -> Tensor:
        """`(N,)` scores of `(N, S, F)` float32 features on one device; `mask` `(N, S)` is True for stores."""
        column = self.head_index(head)
        return self.hidden(features, mask) @ self.heads.weight[column] + self.heads.bias[column]

    def hidden(self, features: Tensor, mask: Tensor) -> Tensor:
        """What the heads see: `(N, S, F)` and `(N, S)` → `(N, C)`."""
        inside = mask[..., None]
        # Padding may hold anything, NaN too, and must reach neither scores nor gradients.
        stores = self._store(torch.where(inside, features, self.mean))
        return self._program(torch.where(inside, stores, 0.0).sum(dim=1))

    def ragged(self, rows: Tensor, program: Tensor, count: int) -> Tensor:
        """Scores of all heads without padding: `(T, F)` stores and the `(T,)` programs they are of → `(count, H)`."""
        stores = self._store(rows)
        summed = torch.zeros(count, stores.shape[1], dtype=stores.dtype, device=rows.device)
        out: Tensor = self.heads(self._program(summed.index_add(0, program, stores)))
        return out

    def _store(self, rows: Tensor) -> Tensor:
        h = (rows - self.mean) * self.scale
        if self.config.bins:
            used = self.span > 0
            part = (rows[..., None, :] - self.low) / torch.where(used, self.span, 1.0)  # (…, Q, F)
            h = torch.cat([h, ((part.clamp(0.0, 1.0) * 2.0 - 1.0) * used).flatten(-2)], dim=-1)
        for layer in self.layers:
            h = F.silu(layer(h))
        out: Tensor = self.dropout(h)
        return out

    def _program(self, h: Tensor) -> Tensor:
        for layer in self.residuals:
            h = h + self.dropout(F.silu(layer(h)))
        return h


def _quantiles(column: Tensor, levels: Tensor) -> Tensor:
    """Of the values other than 0; of all if there are none."""
    used = column[column != 0]
    return torch.quantile(used if len(used) else column, levels)


@dataclass(frozen=True)
class FelixCheckpoint:
    """A trained model in memory; `save` and `load` are inverse.

    A directory holds `weights.safetensors` (the network's state, the features' ranges included), `config.json`
    (`FelixConfig`) and `manifest.json` (MTL-TLP's `Manifest`, of kind `felix`). Nothing is pickled.
    """

    config: FelixConfig
    manifest: Manifest
    state: Mapping[str, Tensor]

    @property
    def heads(self) -> tuple[str, ...]:
        """Devices with a head, in order."""
        return self.config.heads

    @property
    def encoder_version(self) -> str:
        """The features the network reads."""
        return self.manifest.encoder_version

    @property
    def language(self) -> str:
        """The schedule language whose programs the model scores."""
        return language_of(self.encoder_version)

    def network(self) -> FelixNetwork:
        """A network with these weights, in evaluation mode."""
        network = FelixNetwork(self.config)
        network.load_state_dict(dict(self.state))
        return network.eval()

    def save(self, directory: Path) -> Path:
        """Write the three files; the directory is made. Returns it."""
        return save_files(directory, self.state, {CONFIG: self.config.to_json(), MANIFEST: self.manifest.to_json()})

    @staticmethod
    def load(directory: Path) -> FelixCheckpoint:
        """Read a checkpoint directory; everything is checked before a tensor is used.

        Raises:
            ModelFormatError: a file is missing or damaged; another model or other features; config, manifest and
                weights disagree.
        """
        manifest = Manifest.from_json(read_json(directory, MANIFEST))
        config = FelixConfig.from_json(read_json(directory, CONFIG))
        require_fitting(
            directory,
            "tlp train --model felix",
            ("kind", manifest.kind, KIND),
            ("features", manifest.encoder_version, FEATURE_VERSION),
            ("heads", manifest.heads, config.heads),
        )
        with torch.device("meta"):
            expected_state = FelixNetwork(config).state_dict()
        return FelixCheckpoint(config, manifest, load_state(directory, expected_state))
