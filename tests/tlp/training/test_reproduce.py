"""The registered version is loaded again before the alias moves: real MLflow, a real process, changed files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from bench.synthetic import fill_store
from storage import ReasonCode
from tests.fleets import fleet_of
from tests.judging import judge_all
from tests.registries import FakeRegistry
from tests.tlp.training.crashing import DEVICE, FAMILY, Untrained
from tests.tlp.training.steps import run_retrain
from tlp.core.errors import RegistryError
from tlp.core.fleet import Fleet
from tlp.core.home import open_home
from tlp.core.settings import Settings
from tlp.registry import Registry, kept, versions
from tlp.training import reproduce
from tlp.training.judge.verdict import Verdict
from tlp.training.retrain import RetrainResult, submit_kept

Change = Callable[[Path], None]


def swap(weights: Path) -> None:
    """Other weights of the same shapes."""
    save_file({name: -value for name, value in load_file(weights).items()}, weights)


def cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-64])


@pytest.fixture
def fleet(mlflow_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    settings = mlflow_settings.model_copy(update={"torch_threads": 1})
    store = open_home(settings)
    fill_store(store, networks=("net", "held"), workloads_per_network=2, programs=8, min_samples=8)
    judge_all(monkeypatch, Verdict.PASSED)
    monkeypatch.setattr("tlp.training.submit.plots.draw_all", lambda *_: [])
    return fleet_of(settings, store)


def train(fleet: Fleet) -> RetrainResult:
    return run_retrain(fleet, device=DEVICE, force=True, strategy=Untrained(fleet.settings.home / "trainings"))


def change_registered(patch: pytest.MonkeyPatch, fleet: Fleet, change: Change) -> None:
    """The stored files change once the version is there."""

    def then(place: str) -> None:
        if place == "run-closed":
            newest = Registry(fleet.settings, fleet.store).list_versions(FAMILY)[0].version
            change(fleet.registry.resolve(FAMILY, ref=newest).checkpoint_dir / "weights.safetensors")

    patch.setattr(versions, "reached", then)


def test_a_version_whose_files_were_swapped_is_not_promoted(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(fleet)
    assert first.promoted and first.code is ReasonCode.PROMOTED, first.reason
    with monkeypatch.context() as patch:
        change_registered(patch, fleet, swap)
        second = train(fleet)
    assert (second.version, second.promoted, second.code) == (2, False, ReasonCode.NOT_REPRODUCED)
    assert "version 2 of mtl-tlp-x86_64 was judged by a score of " in second.reason and "it gives" in second.reason
    assert fleet.registry.champion_version(FAMILY) == 1
    assert fleet.registry.show(FAMILY, 2).tags["not_promoted"] == second.reason
    assert kept.names(fleet.settings) == []


def test_the_next_start_checks_it_as_well(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies between registering and promoting; the files are cut off before the next start."""

    def die(place: str) -> None:
        if place == "run-closed":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(versions, "reached", die)
        with pytest.raises(KeyboardInterrupt):
            train(fleet)
    cut(fleet.registry.resolve(FAMILY, ref=1).checkpoint_dir / "weights.safetensors")
    (done,) = submit_kept(fleet)
    assert (done.version, done.promoted, done.code) == (1, False, ReasonCode.NOT_REPRODUCED)
    assert "version 1 of mtl-tlp-x86_64 as registered cannot be used: " in done.reason
    assert fleet.registry.champion_version(FAMILY) is None and kept.names(fleet.settings) == []


def test_a_process_that_does_not_get_through_leaves_the_model_kept(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "ARGV", ("-c", "raise SystemExit('out of memory')"))
        with pytest.raises(RegistryError, match=r"in a process of its own: out of memory; the trained model is kept"):
            train(fleet)
    assert len(kept.names(fleet.settings)) == 1 and fleet.registry.champion_version(FAMILY) is None
    (done,) = submit_kept(fleet)
    assert done.promoted and fleet.registry.champion_version(FAMILY) == 1


@pytest.mark.parametrize("change", [swap, cut])
def test_a_registry_of_this_process_is_asked_here(
    fleet: Fleet, tmp_path: Path, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = FakeRegistry(tmp_path / "registry")
    register = registry.register

    def changed(what: object) -> int:
        number = register(what)  # type: ignore[arg-type]
        change(registry.versions[-1].checkpoint_dir / "weights.safetensors")
        return number

    monkeypatch.setattr(registry, "register", changed)
    result = train(fleet_of(fleet.settings, fleet.store, registry))
    assert (result.promoted, result.code, registry.champion) == (False, ReasonCode.NOT_REPRODUCED, {})


def test_what_is_judged_again_is_on_disk_with_the_verdict(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(place: str) -> None:
        if place == "judged":
            raise KeyboardInterrupt

    monkeypatch.setattr("tlp.training.submit.reached", die)
    with pytest.raises(KeyboardInterrupt):
        train(fleet)
    (waiting,) = kept.find(fleet.settings)
    judged = waiting.judged()
    assert judged is not None
    assert {sample.device for sample in judged.scored} == {"x86-64-v2", "x86-64-v3"}  # each head speaks
    assert all(len(s.scores) == len(s.decisions) == len(s.sketch_ids) == 8 for s in judged.scored)
    older = json.loads((waiting.folder / "judged.json").read_text())
    del older["scored"]  # of a release that did not ask: the gate judges again
    (waiting.folder / "judged.json").write_text(json.dumps(older))
    assert waiting.judged() is None
