"""Trained models that are not registered yet, on disk: what a kill or a silent MLflow must not lose.

    TLP_HOME/pending/<submission>/
        manifest.json    `Facts`: what the training was for; the last file to appear with the folder
        checkpoint/      the model
        judged.json      the gate's verdict and the evaluation, once there are any
        figures/         plots, likewise

A folder appears whole (written aside, then renamed) and goes when the model is registered, promoted if it passed, and
recorded. Everything after its appearance may be done again: see `tlp.training.submit`.

Imports neither torch nor mlflow: `tlp status` counts what is here.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from tlp.core.errors import InvalidInputError
from tlp.core.settings import Settings
from tlp.model.kinds import Model

log = logging.getLogger(__name__)

FORMAT: Final = 1
_MANIFEST: Final = "manifest.json"
_CHECKPOINT: Final = "checkpoint"
_JUDGED: Final = "judged.json"
_ASIDE: Final = "."  # names that start with it are being written, taken away, or were found damaged


@dataclass(frozen=True)
class Facts:
    """What a training was for."""

    key: str  # what its model is registered under (`tlp.training.kinds.model_key`)
    device: str
    language: str  # schedule language of the model
    reason: str  # why it was due
    parent: int | None  # version it started from; None: from scratch
    at: float  # when training ended, seconds since the epoch
    holdout: Mapping[str, Mapping[str, int]]  # network → (workload → weight), what it must be judged on
    held_networks: tuple[str, ...]  # `Holdout.networks`
    warnings: tuple[str, ...] = ()  # what a person should know, e.g. that the champion could not be loaded


@dataclass(frozen=True)
class ScoredPrograms:
    """Programs of one workload and what a candidate gave them when it was judged: N of each."""

    device: str
    sketch_ids: tuple[str, ...]
    decisions: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Judged:
    """A verdict and what it was spoken against."""

    champion: int | None  # version the candidate was compared with; None: random choice
    earlier: int | None  # the best earlier champion, which it was compared with as well; None: there is none
    alias: int | None  # where `champion` pointed then; another version if that one could not be loaded
    gate: Mapping[str, Any]  # `GateVerdict.to_json`
    report: Mapping[str, Any]  # `EvaluationReport.to_json`
    metrics: Mapping[str, float]  # for the registry
    scored: tuple[ScoredPrograms, ...]  # what the registered version has to reproduce


@dataclass(frozen=True)
class KeptCandidate:
    """One folder."""

    folder: Path
    facts: Facts

    @property
    def submission(self) -> str:
        """Its name, by which the registry finds what became of it."""
        return self.folder.name

    @property
    def checkpoint_dir(self) -> Path:
        """The model."""
        return self.folder / _CHECKPOINT

    @property
    def figures_dir(self) -> Path:
        """For plots; may not exist."""
        return self.folder / "figures"

    def judged(self) -> Judged | None:
        """The verdict; None if there is none yet, or it cannot be read: the gate judges again."""
        try:
            return TypeAdapter(Judged).validate_json((self.folder / _JUDGED).read_text())
        except (OSError, ValueError):
            return None

    def keep_verdict(self, judged: Judged) -> None:
        """Write the verdict, whole or not at all. Raises InvalidInputError (the disk)."""
        try:
            _write(self.folder / _JUDGED, asdict(judged))
        except OSError as exc:
            raise _unwritable(self.folder, exc) from exc

    def drop(self) -> None:
        """Remove the folder: the model is registered and recorded."""
        aside = self.folder.with_name(f"{_ASIDE}done-{self.submission}")
        os.replace(self.folder, aside)  # noqa: PTH105  # Path.replace says nothing about directories
        shutil.rmtree(aside, ignore_errors=True)


def keep(settings: Settings, candidate: Model, facts: Facts) -> KeptCandidate:
    """Write a trained model to disk. Raises InvalidInputError: the folder cannot be written."""
    final = settings.pending_dir / f"{facts.key}-{uuid.uuid4().hex[:12]}"
    aside = final.with_name(f"{_ASIDE}partial-{final.name}")
    try:
        aside.mkdir(parents=True)
        candidate.save(aside / _CHECKPOINT)
        _write(aside / _MANIFEST, {"format": FORMAT, **asdict(facts)})
        for path in (*(aside / _CHECKPOINT).iterdir(), aside / _CHECKPOINT, aside):
            _to_disk(path)
        os.replace(aside, final)  # noqa: PTH105
        _to_disk(final.parent)
    except OSError as exc:
        shutil.rmtree(aside, ignore_errors=True)
        raise _unwritable(final, exc) from exc
    return KeptCandidate(final, facts)


def find(settings: Settings, key: str | None = None) -> list[KeptCandidate]:
    """What is kept (for one key), oldest first. What cannot be read is set aside with a warning in the log."""
    candidates = []
    for folder in map(settings.pending_dir.joinpath, names(settings)):
        try:
            value = json.loads((folder / _MANIFEST).read_text())
            if value.pop("format") != FORMAT:
                raise ValueError("another format")
            candidates.append(KeptCandidate(folder, TypeAdapter(Facts).validate_python(value)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            set_aside(folder, f"the kept model {folder} cannot be read ({exc})")
    chosen = (candidate for candidate in candidates if key in (None, candidate.facts.key))
    return sorted(chosen, key=lambda candidate: (candidate.facts.at, candidate.submission))


def names(settings: Settings) -> list[str]:
    """Submissions that wait, without a look into them."""
    try:
        return sorted(path.name for path in settings.pending_dir.iterdir() if not path.name.startswith(_ASIDE))
    except FileNotFoundError:
        return []


def set_aside(folder: Path, why: str) -> None:
    """Keep the files of a damaged folder, but do not look at them again; `why` goes to the log."""
    aside = folder.with_name(f"{_ASIDE}damaged-{folder.name}-{uuid.uuid4().hex[:8]}")
    log.warning("%s; it is set aside as %s", why, aside)
    os.replace(folder, aside)  # noqa: PTH105


def _write(path: Path, value: Mapping[str, Any]) -> None:
    aside = path.with_name(f"{_ASIDE}{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=2, sort_keys=True))
    _to_disk(aside)
    aside.replace(path)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, exc: OSError) -> InvalidInputError:
    return InvalidInputError(
        f"the trained model cannot be kept in {folder}: {exc.strerror or exc}", next_command="tlp doctor"
    )
