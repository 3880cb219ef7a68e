"""What the registry hands out. Frozen, free of MLflow's own types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tlp.core.errors import InvalidInputError
from tlp.model.kinds import KINDS, MTL_TLP

CHAMPION: Final = "champion"
REJECTED: Final = "rejected"
ALIAS_PATTERN: Final = re.compile(r"(?!v\d+$)(?!latest$)[A-Za-z0-9_\-]{1,100}")


def model_name(family: str) -> str:
    """The registered model of an ISA family, e.g. `mtl-tlp-x86_64`; another kind's is asked for as `felix-x86_64`."""
    others = tuple(kind.prefix for kind in KINDS.values() if kind.name != MTL_TLP)
    return family if family.startswith(others) else KINDS[MTL_TLP].prefix + family


def family_of(model: str) -> str:
    """The inverse of `model_name`."""
    return model.removeprefix(KINDS[MTL_TLP].prefix)


def pin_alias(device: str) -> str:
    """The alias that pins one device to a version: `champion-<device>`."""
    return f"{CHAMPION}-{device}"


def rejected_tag(alias: str) -> str:
    """The tag that keeps the pipeline from putting `alias` on a version again.

    `rejected` for `champion`; `rejected-<device>` for a pin: a version that is bad for one device is not bad for all.
    """
    return REJECTED + alias.removeprefix(CHAMPION) if alias.startswith(CHAMPION) else f"{REJECTED}-{alias}"


def check_alias(alias: str) -> str:
    """Return `alias` if MLflow takes it. Raises InvalidInputError."""
    if ALIAS_PATTERN.fullmatch(alias):
        return alias
    raise InvalidInputError(
        f"{alias!r} cannot be an alias: letters, digits, - and _ only, not 'latest' and not 'v' with a number",
        next_command="tlp model list",
    )


@dataclass(frozen=True)
class ModelVersion:
    """One registered version.

    Attributes:
        model: registered model, e.g. `mtl-tlp-x86_64`.
        version: 1, 2, …; never used again after a deletion.
        aliases: aliases on it at the time of asking.
        created_at: UTC.
        run_id: MLflow run that registered it; None if made by hand.
        tags: as registered; values are text, structures are JSON.
        metrics: final values, e.g. `top1`, `top5`; empty in `list_versions`, where `tags` has the main ones.
        rejected: the pipeline may not make it champion.
    """

    model: str
    version: int
    aliases: tuple[str, ...]
    created_at: datetime
    run_id: str | None
    tags: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def rejected(self) -> bool:
        """Whether a person (or a rollback) took it out of use."""
        return REJECTED in self.tags


@dataclass(frozen=True)
class ResolvedModel:
    """A version to work with, and its files on this machine.

    Attributes:
        alias: the alias that led to it; None if it was asked for by number.
        checkpoint_dir: what was registered (read only; shared by all readers).
    """

    model: str
    version: int
    alias: str | None
    checkpoint_dir: Path
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class VersionFacts:
    """What a version was trained on and how it was judged; `Registry.register(tags=facts.to_tags())`.

    Attributes:
        samples: OK samples per device that were trained on; its keys are the heads.
        watermark: sequence number of the newest measurement in the snapshot.
        strategy: training strategy, e.g. `joint`.
        parent_version: version the training started from, its number as text; None if from scratch.
        encoder_version: encoder the vocabulary belongs to.
        gate_passed: verdict of the promotion gate; None before it has judged.
        gate_reasons: why, one sentence each.
        scores: `top1`, `top5`, and `top1.<device>`, `top5.<device>`; written with six decimals, so that text sorts as
            numbers do.
    """

    samples: Mapping[str, int]
    watermark: int
    strategy: str
    parent_version: str | None
    encoder_version: str
    gate_passed: bool | None = None
    gate_reasons: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)

    def to_tags(self) -> dict[str, Any]:
        """Tags of the version, by the names `tlp model show` prints."""
        tags: dict[str, Any] = {
            "devices": sorted(self.samples),
            "samples": dict(self.samples),
            "watermark": self.watermark,
            "strategy": self.strategy,
            "encoder_version": self.encoder_version,
        }
        tags |= {f"samples.{device}": str(count) for device, count in self.samples.items()}
        tags |= {key: f"{value:.6f}" for key, value in self.scores.items()}
        if self.parent_version is not None:
            tags["parent_version"] = self.parent_version
        if self.gate_passed is not None:
            tags |= {"gate": "passed" if self.gate_passed else "failed", "gate_reasons": list(self.gate_reasons)}
        return tags
