"""What every `ModelRegistry` promises: MLflow's and the fake."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import Actor, DuckDBStore
from tests.registries import FakeRegistry
from tests.tlp.registry.helpers import write_checkpoint
from tlp.core.errors import InvalidInputError, ModelFormatError, NotFoundError
from tlp.core.registry import ModelRegistry, ResolvedModel, Submission, VersionFacts
from tlp.registry import Registry

FAMILY, MODEL = "x86_64", "mtl-tlp-x86_64"


@pytest.fixture(params=["mlflow", "folder"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> ModelRegistry:
    if request.param == "folder":
        return FakeRegistry(tmp_path / "registry")
    return Registry(request.getfixturevalue("mlflow_settings"), DuckDBStore())


@pytest.fixture
def add(registry: ModelRegistry, tmp_path: Path) -> Callable[..., int]:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    return lambda *, family=FAMILY, **more: registry.register(Submission(checkpoint, family, **more))


@pytest.fixture
def three(registry: ModelRegistry, add: Callable[..., int]) -> ModelRegistry:
    """Three versions, promoted one after the other."""
    for version in (1, 2, 3):
        assert add() == version
        registry.promote(FAMILY, version, reason="better")
    return registry


def test_a_version_shows_what_was_registered(registry: ModelRegistry, add: Callable[..., int]) -> None:
    facts = VersionFacts({"cpu0": 300, "v2": 100}, "joint", "2", False, ("top-1 .3 vs .4 champion, failed",), 2)
    assert add(device="cpu0", metrics={"top1": 0.5, "loss": 1.0}, tags=facts.to_tags()) == 1
    shown = registry.show(FAMILY, 1)
    assert (shown.model, shown.version, shown.aliases, shown.rejected) == (MODEL, 1, (), False)
    assert shown.metrics == {"top1": 0.5, "loss": 1.0}
    assert shown.tags == facts.to_tags() | {"trained_for": "cpu0", "top1": "0.5000"}
    assert all(not value.startswith(("[", "{")) for value in shown.tags.values())  # for people
    resolved = registry.resolve(FAMILY, ref="v1")
    assert (resolved.version, resolved.alias, resolved.devices) == (1, None, ("cpu0", "v2"))
    assert (resolved.checkpoint_dir / "weights.safetensors").read_text() == "weights"


def test_versions_are_listed_newest_first_by_family(registry: ModelRegistry, add: Callable[..., int]) -> None:
    assert registry.list_versions() == [] == registry.list_versions(FAMILY)
    add(), add(), add(family="felix-x86_64")
    assert [version.version for version in registry.list_versions(FAMILY)] == [2, 1]
    assert {version.model for version in registry.list_versions()} == {MODEL, "felix-x86_64"}


def test_a_submission_is_registered_once(registry: ModelRegistry, add: Callable[..., int]) -> None:
    assert registry.find_submission(FAMILY, "abc") is None
    assert (add(submission="abc", at=1.0), add(submission="abc", at=1.0), add(submission="xyz")) == (1, 1, 2)
    assert (registry.find_submission(FAMILY, "abc"), registry.find_submission(FAMILY, "xyz")) == (1, 2)


def test_what_is_not_there(registry: ModelRegistry, add: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="not a checkpoint directory"):
        registry.register(Submission(tmp_path / "nothing", FAMILY))
    add()
    assert registry.champion_version(FAMILY) is None
    for ref in ("champion", "nosuch", 7, "7"):
        with pytest.raises(NotFoundError):
            registry.resolve(FAMILY, ref=ref)
    with pytest.raises(NotFoundError):
        registry.show(FAMILY, 7)
    with pytest.raises(NotFoundError):
        registry.promote(FAMILY, 7, reason="?")
    with pytest.raises(NotFoundError):
        registry.rollback(FAMILY)
    assert registry.history() == []


def test_promotions_are_recorded(three: ModelRegistry) -> None:
    assert three.champion_version(FAMILY) == 3
    assert three.promote(FAMILY, 3, reason="again") is None
    assert three.promote(FAMILY, 1, reason="slow there", by=Actor.PERSON, alias="champion-rpi4") is not None
    assert (three.resolve(FAMILY, "rpi4").version, three.resolve(FAMILY, "cpu0").version) == (1, 3)
    moves = [(e.alias, e.from_version, e.to_version, e.by) for e in three.history(FAMILY)]
    assert moves == [
        ("champion", None, "1", "pipeline"),
        ("champion", "1", "2", "pipeline"),
        ("champion", "2", "3", "pipeline"),
        ("champion-rpi4", None, "1", "person"),
    ]
    assert three.list_versions(FAMILY)[2].aliases == ("champion-rpi4",)
    assert three.reconcile() == [] == three.close_stale_runs()


def test_a_rollback_rejects_and_goes_further_back_each_time(three: ModelRegistry) -> None:
    assert three.rollback(FAMILY, reason="bad").to_version == "2"
    assert three.rollback(FAMILY, reason="bad, too").to_version == "1"
    assert [version.rejected for version in three.list_versions(FAMILY)] == [True, True, False]
    with pytest.raises(NotFoundError):
        three.rollback(FAMILY)
    with pytest.raises(InvalidInputError, match="rejected"):
        three.promote(FAMILY, 3, reason="nightly")
    three.promote(FAMILY, 3, reason="I looked at it", by=Actor.PERSON)
    assert not three.show(FAMILY, 3).rejected


def test_a_rollback_of_a_device(three: ModelRegistry) -> None:
    event = three.rollback(FAMILY, device="rpi4", reason="slow there")
    assert (event.alias, event.from_version, event.to_version) == ("champion-rpi4", "3", "2")
    assert three.champion_version(FAMILY) == 3 and three.show(FAMILY, 3).tags["rejected-rpi4"] == "slow there"
    with pytest.raises(InvalidInputError, match="already"):
        three.rollback(FAMILY, 2, device="rpi4")


def test_what_was_judged_is_promoted_once(three: ModelRegistry, add: Callable[..., int]) -> None:
    assert (add(), add()) == (4, 5)
    assert three.promote_judged(FAMILY, 4, reason="passed", judged_against=3, parent=3)
    three.rollback(FAMILY)
    assert not three.promote_judged(FAMILY, 4, reason="passed", judged_against=3, parent=3)
    with pytest.raises(InvalidInputError, match="judged when champion was version 4, and it is version 3 by now"):
        three.promote_judged(FAMILY, 5, reason="passed", judged_against=4, parent=None)
    with pytest.raises(InvalidInputError, match="trained from version 4, which was rejected"):
        three.promote_judged(FAMILY, 5, reason="passed", judged_against=3, parent=4)


def test_the_last_good_version_stands_in(three: ModelRegistry) -> None:
    def load(resolved: ResolvedModel) -> int:
        if not (resolved.checkpoint_dir / "config.json").is_file():
            raise ModelFormatError("damaged")
        return resolved.version

    assert three.usable(FAMILY, None, load).fallback is None
    (three.resolve(FAMILY).checkpoint_dir / "config.json").unlink()
    three.tag(FAMILY, 2, "rejected", "bad")
    used = three.usable(FAMILY, "cpu0", load)
    assert (used.version, used.loaded) == (1, 1)
    assert used.fallback == (
        f"the champion of {MODEL} cannot be used (damaged); version 1, the last good one, is used instead"
    )
    shutil.rmtree(three.resolve(FAMILY, ref=1).checkpoint_dir)
    with pytest.raises(ModelFormatError, match="damaged"):
        three.usable(FAMILY, None, load)


def test_a_hold_is_there_until_it_is_released(three: ModelRegistry) -> None:
    assert three.standing(FAMILY, 3).holds == {}
    three.hold(FAMILY, "a conference")
    three.hold(FAMILY, "it is being repaired", device="cpu0")
    assert three.standing(FAMILY, 3).holds == {"": "a conference", "cpu0": "it is being repaired"}
    assert three.release(FAMILY, "over") and not three.release(FAMILY, "over")
    assert three.standing(FAMILY, 3).holds == {"cpu0": "it is being repaired"}
    assert not three.release(FAMILY, "over", device="cpu1")
    with pytest.raises(NotFoundError, match="not registered"):
        three.hold("aarch64", "?")


def test_the_pipelines_own_pin_comes_off(three: ModelRegistry) -> None:
    three.promote(FAMILY, 2, reason="a trial", alias="champion-cpu0")
    assert three.unpin(FAMILY, "cpu0", 3, reason="no") is None, "it is on another version"
    three.tag(FAMILY, 2, "approval", "yes")
    standing = three.standing(FAMILY, 2)
    assert (standing.champion, standing.pins, standing.tags["approval"]) == (3, {"cpu0": 2}, "yes")
    event = three.unpin(FAMILY, "cpu0", 2, reason="over")
    assert event is not None and (event.from_version, event.to_version, event.by) == ("2", None, Actor.PIPELINE)
    assert three.standing(FAMILY, 2).pins == {} and three.unpin(FAMILY, "cpu0", 2, reason="over") is None
    assert three.reconcile() == [], "no person's move"
    assert "rejected-cpu0" not in three.show(FAMILY, 2).tags
    with pytest.raises(NotFoundError):
        three.standing(FAMILY, 9)
