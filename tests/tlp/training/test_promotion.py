"""What becomes of a version that passed the gate: promoted, waiting, on trial; and what a kill in between leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from storage import (
    Actor,
    Device,
    DeviceState,
    DuckDBStore,
    ReasonCode,
    RoundQuality,
    RunKind,
    VersionEvent,
    VersionState,
)
from tests.fleets import fleet_of
from tests.registries import FakeRegistry
from tlp.core.errors import RegistryError
from tlp.core.fleet import Fleet
from tlp.core.registry import ResolvedModel, Submission
from tlp.core.settings import Settings
from tlp.model.checkpoint import WEIGHTS
from tlp.training import promotion, trial
from tlp.training.promotion import Passed
from tlp.training.reproduce import NotReproducedError

FAMILY, MODEL = "x86_64", "mtl-tlp-x86_64"
ROUNDS = 3
MUTATING = ("tag", "promote", "promote_judged", "unpin", "add_version_event", "set_device_state")


class DiedError(BaseException):
    """A process was killed."""


class Mortal:
    """Passes calls on; the process dies before or after the n-th that changes something."""

    def __init__(self, inner: Any, fuse: list[int]) -> None:
        self._inner, self._fuse = inner, fuse

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._burning(value) if name in MUTATING else value

    def _burning(self, value: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._burn()
            result = value(*args, **kwargs)
            self._burn()
            return result

        return call

    def _burn(self) -> None:
        self._fuse[0] -= 1
        if self._fuse[0] == 0:
            raise DiedError


@dataclass
class House:
    """Version 1 is champion, version 2 passed the gate against it; two devices serve."""

    settings: Settings
    store: DuckDBStore
    registry: FakeRegistry
    folder: Path
    fuse: list[int]

    @property
    def fleet(self) -> Fleet:
        store, registry = Mortal(self.store, self.fuse), Mortal(self.registry, self.fuse)
        return fleet_of(self.settings, store, registry)  # type: ignore[arg-type]

    def add(self, version: int, weights: str = "", **facts: Any) -> Passed:
        checkpoint = self.folder / str(version)
        checkpoint.mkdir(parents=True)
        (checkpoint / WEIGHTS).write_text(weights or str(version))
        assert self.registry.register(Submission(checkpoint, FAMILY)) == version
        hashed = promotion.hash_weights(checkpoint)
        passed = Passed(FAMILY, version, "a", "mtl-tlp", "metaschedule", ("a", "b"), "new samples", 1, 1, 9, hashed, ())
        passed = replace(passed, **facts)
        promotion.note_registered(self.fleet, passed)
        return passed

    def became(self, version: int) -> VersionEvent:
        return self.store.version_events(model=MODEL, version=str(version))[-1]

    def score(self, device: str, rounds: int, ours: int, theirs: int) -> None:
        """Rounds with ten pairs, of which version 2 and the champion rank so many right."""
        run = self.store.start_run(RunKind.TUNE, device=device, params={}, owner={})
        for visit in range(rounds):
            live = RoundQuality(
                run, device, "2", "w", datetime.now(UTC), visit, 5, (10, 0, 0), (float(ours), 0.0, 0.0), 0, {}
            )
            shadow = replace(live, version="1", pairs_right=(float(theirs), 0.0, 0.0))
            self.store.add_round_qualities([live], [shadow])

    def state(self) -> tuple[Any, ...]:
        """What has to be the same whether a process was killed or not."""
        events = self.store.version_events(model=MODEL, version="2")
        tags = self.registry.show(FAMILY, 2).tags
        return (
            dict(self.registry.aliases),
            [(event.state, event.code, event.device) for event in events],
            {key: tags[key] for key in ("rejected", "not_promoted", "approval") if key in tags},
            [device.state for device in self.store.list_devices()],
        )


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., House]:
    made = []
    monkeypatch.setattr(promotion, "require_reproduced", lambda *_: None)  # there is nothing to load

    def make(**settings: Any) -> House:
        folder = tmp_path / str(len(made))
        store = DuckDBStore()
        for name in ("a", "b"):
            row = Device(name, {}, FAMILY, 9, {}, {"kind": "fake"}, DeviceState.ENROLLED, datetime.now(UTC))
            store.add_device(row, "for a test")
            store.set_device_state(name, DeviceState.SERVING, "version 1", code=ReasonCode.PROMOTED)
        house = House(
            Settings(home=folder / "home", stage_rounds=ROUNDS, registry_patience_s=0.0, **settings),
            store,
            FakeRegistry(folder / "registry"),
            folder,
            [0],
        )
        house.add(1, alias=None, parent=None)
        house.registry.promote(FAMILY, 1, reason="first")
        made.append(house)
        return house

    return make


def test_it_is_promoted_at_once(build: Callable[..., House]) -> None:
    house = build()
    assert promotion.offer(house.fleet, house.add(2)).state is VersionState.PROMOTED
    assert house.registry.champion == {FAMILY: 2}
    assert promotion.carry_on(house.fleet) == []


@pytest.mark.parametrize("mode", ["auto", "staged"])
def test_no_alias_moves_to_a_version_that_is_not_what_was_judged(
    build: Callable[..., House], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = build(promotion=mode)

    def other(*_: object) -> None:
        raise NotReproducedError("it gives other scores")

    monkeypatch.setattr(promotion, "require_reproduced", other)
    assert promotion.offer(house.fleet, house.add(2)).code is ReasonCode.NOT_REPRODUCED
    assert house.registry.aliases == {(FAMILY, "champion"): 1}


def test_the_same_weights_are_not_promoted_twice(build: Callable[..., House]) -> None:
    house = build()
    promotion.offer(house.fleet, house.add(2))
    house.registry.rollback(FAMILY, reason="slow")
    event = promotion.offer(house.fleet, house.add(3, weights="2"))
    assert (event.state, event.code) == (VersionState.REFUSED, ReasonCode.SAME_WEIGHTS)
    assert "version 2" in event.reason and house.registry.champion == {FAMILY: 1}
    assert promotion.offer(house.fleet, house.add(4)).state is VersionState.PROMOTED


def test_a_lost_champion_may_come_again(build: Callable[..., House]) -> None:
    """No person spoke against it: its files are gone. FakeRegistry has no files to lose, so the call fails."""
    house = build()
    promotion.offer(house.fleet, house.add(2))
    resolve = house.registry.resolve

    def lost(family: str, device: str | None = None, ref: str | int = "champion") -> ResolvedModel:
        if str(ref) == "2":
            raise RegistryError("version 2 has no checkpoint")
        return resolve(family, device, ref)

    house.registry.resolve = lost  # type: ignore[method-assign]
    assert promotion.offer(house.fleet, house.add(3, weights="2", alias=2)).state is VersionState.PROMOTED


def test_weights_of_a_version_that_only_failed_may_come_again(build: Callable[..., House]) -> None:
    house = build()
    promotion.refuse(house.fleet, house.add(2), ReasonCode.GATE, "worse")
    assert promotion.offer(house.fleet, house.add(3, weights="2")).state is VersionState.PROMOTED


def test_weights_of_versions_of_an_earlier_release_are_looked_at(build: Callable[..., House]) -> None:
    """The store knows no hash of them."""
    house = build()
    promotion.offer(house.fleet, house.add(2))
    house.registry.rollback(FAMILY, reason="slow")
    events = house.store.version_events
    house.store.version_events = lambda **asked: [e for e in events(**asked) if e.version != "2"]  # type: ignore
    assert promotion.offer(house.fleet, house.add(3, weights="2")).code is ReasonCode.SAME_WEIGHTS


def test_while_held_the_newest_waits_and_the_older_is_superseded(build: Callable[..., House]) -> None:
    house = build()
    house.registry.hold(FAMILY, "a demonstration")
    for version in (2, 3):
        event = promotion.offer(house.fleet, house.add(version))
        assert (event.state, event.code, event.reason) == ("waiting", ReasonCode.HELD, "held: a demonstration")
    promotion.carry_on(house.fleet)
    assert len(house.store.version_events(model=MODEL, version="2")) == 2, "said once"
    assert house.registry.champion == {FAMILY: 1}
    house.registry.release(FAMILY, "over")
    promotion.carry_on(house.fleet)
    assert house.registry.champion == {FAMILY: 3}
    assert (house.became(2).state, house.became(2).code) == (VersionState.REFUSED, ReasonCode.SUPERSEDED)


def test_a_held_device_keeps_its_version(build: Callable[..., House]) -> None:
    house = build()
    house.registry.hold(FAMILY, "a demonstration", device="b")
    second = house.add(2)
    assert promotion.offer(house.fleet, second).reason == "held for b: a demonstration"
    house.registry.promote(FAMILY, 1, reason="stays", by=Actor.PERSON, alias="champion-b")
    assert promotion.offer(house.fleet, second).state is VersionState.PROMOTED
    assert house.registry.resolve(FAMILY, "b").version == 1


def test_a_device_that_is_held_on_its_trial_keeps_the_version_on_trial(build: Callable[..., House]) -> None:
    house = build(promotion="staged")
    promotion.offer(house.fleet, house.add(2))
    house.registry.hold(FAMILY, "a demonstration", device="a")
    house.score("a", ROUNDS, 9, 6)
    promotion.carry_on(house.fleet)
    assert house.registry.aliases == {(FAMILY, "champion"): 1, (FAMILY, "champion-a"): 2}
    house.registry.release(FAMILY, "over", device="a")
    promotion.carry_on(house.fleet)
    assert house.registry.aliases == {(FAMILY, "champion"): 2}


def test_approval(build: Callable[..., House]) -> None:
    house = build(promotion="approval")
    assert promotion.offer(house.fleet, house.add(2)).code is ReasonCode.APPROVAL
    assert house.registry.show(FAMILY, 2).tags["approval"] == "waiting"
    house.registry.tag(FAMILY, 2, "approval", " Yes")
    house.registry.hold(FAMILY, "not today")
    promotion.carry_on(house.fleet)
    assert house.became(2).code is ReasonCode.HELD
    house.registry.release(FAMILY, "now")
    promotion.carry_on(house.fleet)
    assert house.became(2).state is VersionState.PROMOTED and house.registry.champion == {FAMILY: 2}


def test_disapproval(build: Callable[..., House]) -> None:
    house = build(promotion="approval")
    promotion.offer(house.fleet, house.add(2))
    house.registry.tag(FAMILY, 2, "approval", "no")
    promotion.carry_on(house.fleet)
    assert (house.became(2).state, house.became(2).code) == (VersionState.REFUSED, ReasonCode.DISAPPROVED)
    assert house.registry.show(FAMILY, 2).rejected and house.registry.champion == {FAMILY: 1}
    assert promotion.offer(house.fleet, house.add(3, weights="2")).code is ReasonCode.SAME_WEIGHTS


def test_a_person_who_promotes_it_by_hand_has_approved(build: Callable[..., House]) -> None:
    house = build(promotion="approval")
    promotion.offer(house.fleet, house.add(2))
    house.registry.promote(FAMILY, 2, reason="good", by=Actor.PERSON)
    promotion.carry_on(house.fleet)
    assert house.became(2).state is VersionState.PROMOTED


@pytest.mark.parametrize(("ours", "champion"), [(7, 2), (6, 2), (5, 1)])
def test_a_trial(build: Callable[..., House], ours: int, champion: int) -> None:
    """Against six of ten pairs that the champion ranks right."""
    house = build(promotion="staged")
    event = promotion.offer(house.fleet, house.add(2))
    assert (event.state, event.device) == (VersionState.STAGED, "a")
    assert house.registry.aliases == {(FAMILY, "champion"): 1, (FAMILY, "champion-a"): 2}
    house.score("b", ROUNDS, 10, 0)  # elsewhere
    house.score("a", ROUNDS - 1, ours, 6)
    assert trial.progress(house.fleet, house.became(2)) == "2 of 3"
    promotion.carry_on(house.fleet)
    assert house.became(2).state is VersionState.STAGED
    house.score("a", 1, ours, 6)
    house.score("a", 5, 0, 10)  # too late
    promotion.carry_on(house.fleet)
    assert house.registry.aliases == {(FAMILY, "champion"): champion}
    if champion == 1:
        assert house.became(2).code is ReasonCode.TRIAL and "50.0%" in house.became(2).reason
        assert house.registry.show(FAMILY, 2).rejected
        assert promotion.offer(house.fleet, house.add(3, weights="2")).code is ReasonCode.SAME_WEIGHTS


def test_one_trial_at_a_time(build: Callable[..., House]) -> None:
    house = build(promotion="staged")
    promotion.offer(house.fleet, house.add(2))
    assert promotion.offer(house.fleet, house.add(3)).reason == "waits: version 2 is on trial on a"
    house.score("a", ROUNDS, 0, 6)
    promotion.carry_on(house.fleet)
    assert house.became(2).code is ReasonCode.TRIAL
    assert (house.became(3).state, house.registry.aliases[FAMILY, "champion-a"]) == (VersionState.STAGED, 3)


def test_pinned_held_and_idle_devices_are_no_place_for_a_trial(build: Callable[..., House]) -> None:
    house = build(promotion="staged")
    house.registry.promote(FAMILY, 1, reason="stays", by=Actor.PERSON, alias="champion-a")
    house.store.set_device_state("b", DeviceState.QUARANTINED, "lost")
    passed = house.add(2)
    assert promotion.offer(house.fleet, passed).code is ReasonCode.NO_DEVICE
    house.store.set_device_state("b", DeviceState.SERVING, "back")
    assert promotion.offer(house.fleet, passed).device == "b"


def test_without_a_champion_there_is_nothing_to_compare_with(build: Callable[..., House]) -> None:
    house = build(promotion="staged")
    house.registry.aliases.clear()
    assert promotion.offer(house.fleet, house.add(2, alias=None)).state is VersionState.PROMOTED


@pytest.mark.parametrize("to", [1, None])
def test_a_person_who_moves_the_pin_is_obeyed(build: Callable[..., House], to: int | None) -> None:
    house = build(promotion="staged")
    promotion.offer(house.fleet, house.add(2))
    pin = (FAMILY, "champion-a")
    if to is None:
        del house.registry.aliases[pin]
    else:
        house.registry.promote(FAMILY, 1, reason="no", by=Actor.PERSON, alias="champion-a")
    house.score("a", ROUNDS, 9, 1)
    promotion.carry_on(house.fleet)
    assert (house.became(2).code, house.registry.aliases.get(pin)) == (ReasonCode.SUPERSEDED, to)
    assert house.registry.champion == {FAMILY: 1}


def test_a_person_who_moves_the_champion_is_obeyed(build: Callable[..., House]) -> None:
    house = build(promotion="staged")
    third = house.add(2), house.add(3)
    promotion.offer(house.fleet, third[0])
    house.registry.promote(FAMILY, 3, reason="this one", by=Actor.PERSON)
    promotion.carry_on(house.fleet)
    assert house.became(2).code is ReasonCode.SUPERSEDED
    assert house.registry.aliases == {(FAMILY, "champion"): 3}


def test_a_retired_device_ends_the_trial_there(build: Callable[..., House]) -> None:
    house = build(promotion="staged")
    promotion.offer(house.fleet, house.add(2))
    house.store.set_device_state("a", DeviceState.RETIRED, "sold")
    promotion.carry_on(house.fleet)
    assert house.registry.aliases == {(FAMILY, "champion"): 1}
    promotion.carry_on(house.fleet)
    assert (house.became(2).state, house.became(2).device) == (VersionState.STAGED, "b")


def test_a_round_counts_only_if_both_scored_it(build: Callable[..., House]) -> None:
    house = build(promotion="staged")
    promotion.offer(house.fleet, house.add(2))
    house.score("a", 1, 5, 5)
    house.store.add_round_qualities(house.store.round_qualities()[:1])  # the champion said nothing
    live = replace(house.store.round_qualities()[0], at=datetime.now(UTC), canary_off=True)
    house.store.add_round_qualities([live], [replace(live, version="1")])
    assert len({row.at for row, _ in trial.rounds(house.store, house.became(2), 1)}) == 1


def nothing(house: House) -> None:
    """No word of anybody's."""


def won(house: House) -> None:
    house.score("a", ROUNDS, 9, 6)


def lost(house: House) -> None:
    house.score("a", ROUNDS, 5, 6)


def approve(house: House) -> None:
    house.registry.tag(FAMILY, 2, "approval", "yes")


def disapprove(house: House) -> None:
    house.registry.tag(FAMILY, 2, "approval", "no")


@pytest.mark.parametrize(
    ("mode", "word"),
    [("auto", nothing), ("staged", won), ("staged", lost), ("approval", approve), ("approval", disapprove)],
)
def test_a_kill_between_any_two_steps_leaves_nothing_half_done(
    build: Callable[..., House], mode: str, word: Callable[[House], None]
) -> None:
    """Each run dies at one place, then starts again; in the end all is as in the run that did not die."""

    def life(dies_at: int) -> tuple[House, bool]:
        house = build(promotion=mode)
        second = house.add(2)
        house.store.set_device_state("b", DeviceState.MEASURING, "at work", code=ReasonCode.WORK)
        house.fuse[0] = dies_at
        died = False
        for step in (lambda: promotion.offer(house.fleet, second), lambda: promotion.carry_on(house.fleet)):
            try:
                step()
            except DiedError:
                died = True
                step()
            if house.became(2).state in (VersionState.STAGED, VersionState.WAITING):
                word(house)
        return house, died

    whole, _ = life(0)
    assert whole.became(2).state.is_final()
    places = 0
    while (life_again := life(places + 1))[1]:
        places += 1
        assert life_again[0].state() == whole.state(), f"killed at place {places}"
    assert places >= 6
