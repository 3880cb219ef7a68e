"""Aliases on a real MLflow: promoted, rolled back, reconciled with what people did."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import Actor, DuckDBStore, ModelEvent, ReasonCode
from tests.tlp.registry.helpers import FAMILY, MODEL, add_versions, client_of, moves, run_python
from tlp.core.errors import InvalidInputError, NotFoundError
from tlp.core.settings import Settings
from tlp.registry import Registry
from tlp.registry import moves as history


class TestPromote:
    def test_moves_and_records(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 2)
        first = registry.promote(FAMILY, 1, reason="beats random")
        assert first is not None
        assert (first.from_version, first.to_version, first.by, first.reason) == (None, "1", "pipeline", "beats random")
        registry.promote(FAMILY, 2, reason="better")
        assert moves(registry) == [("champion", None, "1", "pipeline"), ("champion", "1", "2", "pipeline")]

    def test_twice_is_once(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 1)
        registry.promote(FAMILY, 1, reason="first")
        assert registry.promote(FAMILY, 1, reason="again") is None
        assert len(registry.history(FAMILY)) == 1

    def test_unknown_version_moves_nothing(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 1)
        with pytest.raises(NotFoundError, match="no version 9"):
            registry.promote(FAMILY, 9, reason="?")
        assert registry.history(FAMILY) == []

    @pytest.mark.parametrize("alias", ["latest", "v3", "two words", "a.b", ""])
    def test_alias_mlflow_would_refuse(self, registry: Registry, alias: str) -> None:
        with pytest.raises(InvalidInputError, match="cannot be an alias"):
            registry.promote(FAMILY, 1, reason="?", alias=alias)

    def test_rejected_version_needs_a_person(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 2)
        registry.promote(FAMILY, 1, reason="first")
        registry.promote(FAMILY, 2, reason="better")
        registry.rollback(FAMILY, reason="wrong on cpu0")
        with pytest.raises(InvalidInputError, match=r"version 2 .* was rejected \(wrong on cpu0\)"):
            registry.promote(FAMILY, 2, reason="once more")
        registry.promote(FAMILY, 2, reason="I looked at it", by=Actor.PERSON)
        assert registry.resolve(FAMILY).version == 2
        assert not registry.show(FAMILY, 2).rejected


class TestRollback:
    def test_goes_further_back_each_time(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 4)
        for version in (1, 2, 3):
            registry.promote(FAMILY, version, reason="better")
        assert registry.rollback(FAMILY, reason="bad").to_version == "2"
        assert registry.rollback(FAMILY, reason="bad, too").to_version == "1"
        assert [v.rejected for v in registry.list_versions(FAMILY)] == [False, True, True, False]
        with pytest.raises(NotFoundError, match="no earlier champion"):
            registry.rollback(FAMILY)
        registry.promote(FAMILY, 4, reason="trained anew")
        assert registry.rollback(FAMILY).to_version == "1"

    def test_what_is_rejected_is_named_with_the_way_to_it(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 2)
        registry.promote(FAMILY, 2, reason="better")
        registry.promote(FAMILY, 1, reason="no", by=Actor.PERSON)
        with pytest.raises(
            NotFoundError, match=r"is rejected \(now: version 1\): version 2: champion was moved"
        ) as caught:
            registry.rollback(FAMILY)
        assert caught.value.next_command == "tlp model rollback --to 2"
        with pytest.raises(NotFoundError) as caught:
            registry.rollback(FAMILY, device="rpi4")
        assert caught.value.next_command == "tlp model history"  # 2 is newer than what it uses: nothing behind it
        registry.rollback(FAMILY, 2)
        assert [(v.version, v.rejected) for v in registry.list_versions(FAMILY)] == [(2, False), (1, True)]

    def test_to_a_version(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 3)
        registry.promote(FAMILY, 3, reason="best")
        event = registry.rollback(FAMILY, 1, reason="the others, too")
        assert (event.from_version, event.to_version, event.by) == ("3", "1", Actor.PERSON)
        with pytest.raises(InvalidInputError, match="is version 1 already"):
            registry.rollback(FAMILY, 1)
        with pytest.raises(NotFoundError, match="no version 9"):
            registry.rollback(FAMILY, 9)

    def test_skips_deleted_versions(self, registry: Registry, checkpoint: Path, mlflow_settings: Settings) -> None:
        add_versions(registry, checkpoint, 3)
        for version in (1, 2, 3):
            registry.promote(FAMILY, version, reason="better")
        client_of(mlflow_settings).delete_model_version(MODEL, "2")
        assert registry.rollback(FAMILY).to_version == "1"

    def test_one_device(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 3)
        for version in (1, 2, 3):
            registry.promote(FAMILY, version, reason="better")
        event = registry.rollback(FAMILY, device="rpi4", reason="slow there")
        assert (event.alias, event.from_version, event.to_version) == ("champion-rpi4", "3", "2")
        assert registry.resolve(FAMILY, "rpi4").version == 2
        assert registry.resolve(FAMILY, "cpu0").version == 3
        third = registry.show(FAMILY, 3)
        assert not third.rejected  # bad for one device is not bad for all
        assert third.tags["rejected-rpi4"] == "slow there"
        assert registry.rollback(FAMILY, device="rpi4").to_version == "1"

    def test_after_the_champion_was_deleted(
        self, registry: Registry, checkpoint: Path, mlflow_settings: Settings
    ) -> None:
        add_versions(registry, checkpoint, 2)
        registry.promote(FAMILY, 1, reason="first")
        registry.promote(FAMILY, 2, reason="better")
        client_of(mlflow_settings).delete_model_version(MODEL, "2")
        assert registry.rollback(FAMILY, reason="gone").to_version == "1"
        assert moves(registry)[2:] == [("champion", "2", None, "person"), ("champion", None, "1", "person")]


class TestReconcile:
    @pytest.fixture
    def three(self, registry: Registry, checkpoint: Path) -> Registry:
        add_versions(registry, checkpoint, 3)
        registry.promote(FAMILY, 1, reason="first")
        registry.promote(FAMILY, 3, reason="better")
        return registry

    def test_nothing_to_do(self, three: Registry) -> None:
        assert three.reconcile() == []

    def test_a_person_rolls_back(self, three: Registry, mlflow_settings: Settings) -> None:
        client_of(mlflow_settings).set_registered_model_alias(MODEL, "champion", "1")
        (event,) = three.reconcile()
        assert (event.from_version, event.to_version, event.by) == ("3", "1", Actor.PERSON)
        assert three.show(FAMILY, 3).rejected
        assert three.reconcile() == []
        with pytest.raises(InvalidInputError, match="was rejected"):
            three.promote(FAMILY, 3, reason="nightly")

    def test_a_person_goes_on_to_a_newer_one(
        self, registry: Registry, checkpoint: Path, mlflow_settings: Settings
    ) -> None:
        add_versions(registry, checkpoint, 2)
        registry.promote(FAMILY, 1, reason="first")
        client_of(mlflow_settings).set_registered_model_alias(MODEL, "champion", "2")
        registry.reconcile()
        assert [v.rejected for v in registry.list_versions(FAMILY)] == [False, False]

    def test_a_person_takes_a_verdict_back(self, three: Registry, mlflow_settings: Settings) -> None:
        client = client_of(mlflow_settings)
        client.set_registered_model_alias(MODEL, "champion", "1")
        three.reconcile()
        client.set_registered_model_alias(MODEL, "champion", "3")
        (event,) = three.reconcile()
        assert (event.to_version, event.by) == ("3", Actor.PERSON)  # although we once announced a move to 3
        assert not three.show(FAMILY, 3).rejected

    def test_a_person_removes_the_alias(self, three: Registry, mlflow_settings: Settings) -> None:
        client_of(mlflow_settings).delete_registered_model_alias(MODEL, "champion")
        (event,) = three.reconcile()
        assert (event.from_version, event.to_version, event.by) == ("3", None, Actor.PERSON)
        assert three.show(FAMILY, 3).rejected

    def test_pins_are_seen(self, three: Registry, mlflow_settings: Settings) -> None:
        client_of(mlflow_settings).set_registered_model_alias(MODEL, "champion-rpi4", "1")
        (event,) = three.reconcile()
        assert (event.alias, event.to_version) == ("champion-rpi4", "1")
        assert three.resolve(FAMILY, "rpi4").version == 1

    def test_a_hold_set_in_mlflow_is_recorded(self, three: Registry, mlflow_settings: Settings) -> None:
        client = client_of(mlflow_settings)
        client.set_registered_model_tag(MODEL, "hold", " True ")
        client.set_registered_model_tag(MODEL, "hold-cpu0", "false")
        for _ in range(2):
            three.reconcile()
        assert three.standing(FAMILY, 1).holds == {"": "hold = True in MLflow"}
        client.delete_registered_model_tag(MODEL, "hold")
        three.hold(FAMILY, "slow", device="cpu0")
        three.reconcile()
        held = [(e.alias, e.by, e.code, e.reason) for e in three.history(FAMILY)][2:]
        assert held == [
            ("hold", Actor.PERSON, ReasonCode.HELD, "hold = True in MLflow"),
            ("hold", Actor.PERSON, ReasonCode.RELEASED, "hold was taken off in MLflow"),
            ("hold-cpu0", Actor.PERSON, ReasonCode.HELD, "slow"),
        ]
        (row,) = three.models()
        assert row["holds"] == {"cpu0": "slow"} and history.recorded_models(three._events) == [row | {"versions": 2}]

    def test_a_kill_after_a_pin_came_off(self, three: Registry, mlflow_settings: Settings) -> None:
        """The alias is gone and nobody recorded it: it was announced, so it is no person's verdict."""
        three.promote(FAMILY, 2, reason="a trial", alias="champion-cpu0")

        class Killed(DuckDBStore):
            def add_model_event(self, event: ModelEvent) -> None:
                raise KeyboardInterrupt

        store = three._events
        three._store = Killed()
        three._store.model_events = store.model_events  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            three.unpin(FAMILY, "cpu0", 2, reason="over")
        three._store = store
        (event,) = three.reconcile()
        assert (event.from_version, event.to_version, event.by, event.reason) == ("2", None, Actor.PIPELINE, "over")
        assert "rejected-cpu0" not in three.show(FAMILY, 2).tags

    def test_promotion_records_a_persons_move_first(self, three: Registry, mlflow_settings: Settings) -> None:
        client_of(mlflow_settings).set_registered_model_alias(MODEL, "champion", "1")
        three.promote(FAMILY, 2, reason="nightly")
        assert moves(three)[2:] == [("champion", "3", "1", "person"), ("champion", "1", "2", "pipeline")]

    def test_a_new_store_learns_what_is_in_force(self, three: Registry, mlflow_settings: Settings) -> None:
        fresh = DuckDBStore()
        (event,) = Registry(mlflow_settings, fresh).reconcile()
        assert (event.to_version, event.by, event.reason) == ("3", Actor.PIPELINE, "better")
        assert fresh.model_events(model=MODEL) == [event]

    @pytest.mark.parametrize("person", [False, True])
    def test_kill_between_alias_and_record(
        self, mlflow_settings: Settings, checkpoint: Path, tmp_path: Path, person: bool
    ) -> None:
        path = tmp_path / "store.duckdb"
        registry = Registry(mlflow_settings, DuckDBStore(path))
        add_versions(registry, checkpoint, 2)
        registry.promote(FAMILY, 1, reason="first")
        code = f"""
            import os, signal
            from storage import Actor, DuckDBStore
            from tlp.registry import Registry
            from tlp.core.settings import Settings
            class Killed(DuckDBStore):
                def add_model_event(self, event):
                    os.kill(os.getpid(), signal.SIGKILL)
            from pathlib import Path
            registry = Registry(Settings(home=Path({str(mlflow_settings.home)!r})), Killed(Path({str(path)!r})))
            registry.promote({FAMILY!r}, 2, reason="nightly", by=Actor({"person" if person else "pipeline"!r}))
        """
        assert run_python(code).returncode == -signal.SIGKILL
        assert registry.resolve(FAMILY).version == 2
        assert len(registry.history(FAMILY)) == 1
        (event,) = registry.reconcile()
        assert (event.from_version, event.to_version, event.reason) == ("1", "2", "nightly")
        assert event.by is (Actor.PERSON if person else Actor.PIPELINE)
        assert registry.reconcile() == []


def event(from_version: int | None, to_version: int | None) -> ModelEvent:
    def text(version: int | None) -> str | None:
        return None if version is None else str(version)

    return ModelEvent(
        datetime.now(UTC), MODEL, "champion", text(from_version), text(to_version), Actor.PIPELINE, "because"
    )


def test_what_was_left_behind() -> None:
    steps = [event(None, 1), event(1, 2), event(2, 3)]
    assert history.left_behind(steps) == set()
    assert history.left_behind([*steps, event(3, 1)]) == {2, 3}
    assert history.left_behind([*steps, event(3, 1), event(1, 3)]) == {2}
    assert history.left_behind([*steps, event(3, None)]) == {3}


@given(st.lists(st.one_of(st.none(), st.integers(1, 6))))
def test_champion_stack_ends_where_the_alias_is(targets: list[int | None]) -> None:
    events: list[ModelEvent] = []
    at: int | None = None
    for target in targets:
        if target != at:
            events.append(event(at, target))
            at = target
    stack = history.champion_stack(events)
    assert len(stack) == len(set(stack))
    assert history.last_version(events) == at
    if at is not None:
        assert stack[-1] == at
