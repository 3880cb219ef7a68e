"""Kept models with files that somebody edited: set aside, each by itself, and training goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from storage import Device, DeviceState, DuckDBStore
from tests.fleets import fleet_of
from tests.registries import FakeRegistry
from tlp.core.settings import Settings
from tlp.registry import kept
from tlp.training.retrain import submit_kept

FACTS: dict[str, Any] = {
    "format": kept.FORMAT,
    "key": "x86_64",
    "device": "cpu",
    "language": "metaschedule",
    "reason": "due",
    "parent": None,
    "at": 1.0,
    "holdout": {},
    "held_networks": [],
    "warnings": [],
}


def folder(settings: Settings, name: str, **changes: Any) -> Path:
    made = settings.pending_dir / name
    (made / "checkpoint").mkdir(parents=True)
    (made / "manifest.json").write_text(json.dumps(FACTS | changes))
    return made


@pytest.fixture
def store() -> DuckDBStore:
    made = DuckDBStore()
    target = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}
    state = DeviceState.SERVING
    made.add_device(Device("cpu", target, "x86_64", 8, {}, {"kind": "fake"}, state, datetime.now(UTC)), "for a test")
    return made


def waiting(settings: Settings) -> list[str]:
    return sorted(path.name for path in settings.pending_dir.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize(
    "changes",
    [{"holdout": [1]}, {"at": "yesterday"}, {"holdout": {"net": 1}}, {"held_networks": 3}, {"format": 99}],
)
def test_a_manifest_that_is_none_is_set_aside(settings: Settings, changes: dict[str, Any]) -> None:
    folder(settings, "good")
    folder(settings, "bad", **changes)
    assert [candidate.submission for candidate in kept.find(settings)] == ["good"]
    folder(settings, "bad", **changes)  # once more, while the first lies aside
    assert [candidate.submission for candidate in kept.find(settings)] == ["good"]
    assert len([path for path in settings.pending_dir.iterdir() if path.name.startswith(".damaged-bad")]) == 2


@pytest.mark.parametrize("text", ["[]", '{"gate": []}', '{"champion": "x"}', "{"])
def test_a_verdict_that_is_none_is_spoken_anew(settings: Settings, text: str) -> None:
    (folder(settings, "one") / "judged.json").write_text(text)
    (candidate,) = kept.find(settings)
    assert candidate.judged() is None


@pytest.mark.parametrize(
    ("damage", "changes"),
    [
        (lambda made: (made / "checkpoint" / "manifest.json").write_text("[]"), {}),
        (lambda made: None, {"device": "nobody"}),
        (lambda made: None, {"holdout": {"net": {"unknown": 1}}}),
    ],
)
def test_what_cannot_be_used_is_set_aside(
    store: DuckDBStore, settings: Settings, damage: Callable[[Path], None], changes: dict[str, Any], tmp_path: Path
) -> None:
    damage(folder(settings, "one", **changes))
    registry = FakeRegistry(tmp_path / "registry")
    assert submit_kept(fleet_of(settings, store, registry)) == [] or not registry.versions
    assert waiting(settings) == []
