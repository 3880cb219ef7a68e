"""What users' tests may use, too: an in-memory registry, a comparison of data sets."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tlp.errors import NotFoundError

if TYPE_CHECKING:
    from tlp.training.dataset import Dataset


def assert_same_dataset(got: Dataset, wanted: Dataset) -> None:
    """Every array of the one is that of the other, bit for bit; what making them cost may differ."""
    for name in ("sketch_of", "decisions", "labels", "groups"):
        one, two = getattr(got, name), getattr(wanted, name)
        assert one.dtype == two.dtype, name
        np.testing.assert_array_equal(one, two)
    for name in ("devices", "vocabulary", "sketches", "workload_ids", "validation", "samples"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert got.encoder.version == wanted.encoder.version
    assert (got.duplicates, got.watermark, got.holdout) == (wanted.duplicates, wanted.watermark, wanted.holdout)


@dataclass(frozen=True)
class FakeVersion:
    """A version of `FakeRegistry`."""

    version: int
    checkpoint_dir: Path
    tags: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    figures: tuple[str, ...] = ()


class FakeRegistry:
    """A registry in a folder: keeps checkpoints, aliases and moves; knows no MLflow.

    Args:
        folder: checkpoints are copied below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: list[FakeVersion] = []
        self.champion: dict[str, int] = {}
        self.moves: list[tuple[str, int, str]] = []

    def resolve(self, family: str, device: str | None = None, ref: str | int = "champion") -> FakeVersion:
        """The champion, or a version by number. Raises NotFoundError."""
        number = self.champion.get(family, 0) if ref == "champion" else int(ref)
        if not 0 < number <= len(self.versions):
            raise NotFoundError(f"{ref} of mtl-tlp-{family} points nowhere", next_command="tlp train")
        return self.versions[number - 1]

    def register(
        self,
        checkpoint_dir: Path,
        *,
        family: str,
        device: str | None = None,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, Any] | None = None,
        curves: Mapping[str, Sequence[float]] | None = None,
        tags: Mapping[str, Any] | None = None,
        figures: Sequence[Path] = (),
        report: Mapping[str, Any] | None = None,
        run_name: str | None = None,
        feature_shape: tuple[int, int] | None = None,
    ) -> int:
        """Copy the checkpoint and return its number."""
        number = len(self.versions) + 1
        target = self.folder / f"{family}-{number}"
        shutil.copytree(checkpoint_dir, target)
        names = tuple(path.name for path in figures if path.is_file())
        self.versions.append(FakeVersion(number, target, dict(tags or {}), dict(metrics or {}), names))
        return number

    def promote(self, family: str, version: int, *, reason: str) -> None:
        """Move the champion."""
        self.champion[family] = version
        self.moves.append((family, version, reason))
