"""The registry on a real MLflow: in process on SQLite, from several processes, and through a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import mlflow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import Actor, DuckDBStore, MemoryStore, ModelEvent
from tlp.errors import InvalidInputError, NotFoundError, RegistryError, RegistryUnavailableError
from tlp.registry import Registry, VersionFacts, _history, _register
from tlp.settings import Settings

if TYPE_CHECKING:
    from tests.conftest import ServedRegistry

FAMILY = "x86_64"
MODEL = "mtl-tlp-x86_64"


def write_checkpoint(folder: Path, content: str = "weights") -> Path:
    """Files as opaque to the registry as a checkpoint's."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights.safetensors").write_text(content)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "anything")


@pytest.fixture
def registry(mlflow_settings: Settings) -> Registry:
    return Registry(mlflow_settings, MemoryStore())


def add_versions(registry: Registry, checkpoint: Path, count: int, family: str = FAMILY) -> None:
    for _ in range(count):
        registry.register(checkpoint, family=family)


def client_of(settings: Settings) -> mlflow.MlflowClient:
    """What a person's tools use: the same database, none of our code."""
    return mlflow.MlflowClient(settings.mlflow_tracking_uri, settings.mlflow_tracking_uri)


def moves(registry: Registry, family: str = FAMILY) -> list[tuple[str, str | None, str | None, str]]:
    return [(e.alias, e.from_version, e.to_version, e.by.value) for e in registry.history(family)]


class TestRegister:
    def test_version_carries_what_was_given(self, registry: Registry, checkpoint: Path, tmp_path: Path) -> None:
        figure = tmp_path / "curve.png"
        figure.write_bytes(b"\x89PNG")
        facts = VersionFacts({"cpu0": 300, "v2": 100}, 400, "joint", None, "metaschedule-1", True, ("beats random",))
        version = registry.register(
            checkpoint,
            family=FAMILY,
            device="cpu0",
            metrics={"top1": 0.9, "top5": 0.95, "loss": 0.1},
            params={"epochs": 3},
            curves={"train_loss": [0.3, 0.2, 0.1]},
            tags=facts.to_tags(),
            figures=[figure],
            report={"gate": {"passed": True}},
            run_name="cpu0 joins",
        )
        assert version == 1
        found = registry.show(FAMILY, 1)
        assert found.tags["trained_device"] == "cpu0"
        assert found.tags["top1"] == "0.900000"
        assert json.loads(found.tags["samples"]) == {"cpu0": 300, "v2": 100}
        assert json.loads(found.tags["devices"]) == ["cpu0", "v2"]
        assert (found.tags["watermark"], found.tags["strategy"], found.tags["gate"]) == ("400", "joint", "passed")
        assert found.metrics["top5"] == 0.95
        assert not found.aliases
        assert not found.rejected

        client = registry._client
        curve = client.get_metric_history(found.run_id, "train_loss")
        assert [(m.step, m.value) for m in sorted(curve, key=lambda m: m.step)] == [(0, 0.3), (1, 0.2), (2, 0.1)]
        run = client.get_run(found.run_id)
        assert (run.info.status, run.info.run_name) == ("FINISHED", "cpu0 joins")
        assert {a.path for a in client.list_artifacts(found.run_id)} == {"figures", "report.json"}

    def test_numbers_grow_and_list_is_newest_first(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 3)
        registry.register(checkpoint, family="aarch64")
        assert [v.version for v in registry.list_versions(FAMILY)] == [3, 2, 1]
        assert {(v.model, v.version) for v in registry.list_versions()} >= {("mtl-tlp-aarch64", 1), (MODEL, 3)}

    def test_failure_on_the_way_leaves_no_version(self, registry: Registry, checkpoint: Path, tmp_path: Path) -> None:
        with pytest.raises(RegistryError, match="registering a version"):
            registry.register(checkpoint, family=FAMILY, figures=[tmp_path / "not-there.png"])
        assert registry.list_versions(FAMILY) == []
        (run,) = registry._client.search_runs([registry._experiment_id()])
        assert run.info.status == "FAILED"

    def test_missing_checkpoint_is_refused(self, registry: Registry, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="not a checkpoint directory"):
            registry.register(tmp_path / "nothing", family=FAMILY)

    def test_everything_lies_under_home(
        self, mlflow_settings: Settings, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        registry = Registry(mlflow_settings, MemoryStore())
        registry.register(checkpoint, family=FAMILY)
        assert registry.resolve(FAMILY, ref=1).checkpoint_dir.is_relative_to(mlflow_settings.mlflow_dir)
        assert list(elsewhere.iterdir()) == []

    def test_nothing_is_printed(self, registry: Registry, checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
        registry.register(checkpoint, family=FAMILY)
        registry.promote(FAMILY, 1, reason="first")
        assert capfd.readouterr() == ("", "")


class TestResolve:
    def test_files_come_back(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 1)
        registry.promote(FAMILY, 1, reason="first")
        found = registry.resolve(FAMILY)
        assert (found.model, found.version, found.alias) == (MODEL, 1, "champion")
        assert {p.name: p.read_text() for p in found.checkpoint_dir.iterdir()} == {
            p.name: p.read_text() for p in checkpoint.iterdir()
        }

    def test_pin_of_a_device_wins(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 2)
        registry.promote(FAMILY, 2, reason="best")
        registry.promote(FAMILY, 1, reason="old board", alias="champion-rpi4", by=Actor.PERSON)
        assert registry.resolve(FAMILY, "rpi4").version == 1
        assert registry.resolve(FAMILY, "rpi4").alias == "champion-rpi4"
        assert registry.resolve(FAMILY, "cpu0").version == 2
        assert registry.resolve(FAMILY, "rpi4", 2).version == 2

    @pytest.mark.parametrize("ref", [2, "2", "v2"])
    def test_by_number(self, registry: Registry, checkpoint: Path, ref: str | int) -> None:
        add_versions(registry, checkpoint, 2)
        found = registry.resolve(FAMILY, "cpu0", ref)
        assert (found.version, found.alias) == (2, None)

    def test_no_model_yet(self, registry: Registry) -> None:
        with pytest.raises(NotFoundError, match=f"{MODEL} has no version yet") as caught:
            registry.resolve(FAMILY)
        assert caught.value.next_command == "tlp train"

    def test_no_champion(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 2)
        with pytest.raises(NotFoundError, match="no alias 'champion'; its versions are 2, 1") as caught:
            registry.resolve(FAMILY, "cpu0")
        assert caught.value.next_command == "tlp model promote 2"

    def test_unknown_alias_and_version(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 1)
        with pytest.raises(NotFoundError, match="no alias 'stagign'"):
            registry.resolve(FAMILY, ref="stagign")
        with pytest.raises(NotFoundError, match=r"no version 7 \(there: 1\)"):
            registry.resolve(FAMILY, ref=7)

    def test_deleted_version_is_no_champion(
        self, registry: Registry, checkpoint: Path, mlflow_settings: Settings
    ) -> None:
        add_versions(registry, checkpoint, 2)
        registry.promote(FAMILY, 2, reason="best")
        client_of(mlflow_settings).delete_model_version(MODEL, "2")
        with pytest.raises(NotFoundError, match="no alias 'champion'"):
            registry.resolve(FAMILY)

    def test_deleted_files(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 1)
        registry.promote(FAMILY, 1, reason="first")
        folder = registry.resolve(FAMILY).checkpoint_dir
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        with pytest.raises(RegistryError, match="version 1 of mtl-tlp-x86_64 has no checkpoint") as caught:
            registry.resolve(FAMILY)
        assert caught.value.next_command == "tlp model list"


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

    def test_promotion_records_a_persons_move_first(self, three: Registry, mlflow_settings: Settings) -> None:
        client_of(mlflow_settings).set_registered_model_alias(MODEL, "champion", "1")
        three.promote(FAMILY, 2, reason="nightly")
        assert moves(three)[2:] == [("champion", "3", "1", "person"), ("champion", "1", "2", "pipeline")]

    def test_a_new_store_learns_what_is_in_force(self, three: Registry, mlflow_settings: Settings) -> None:
        fresh = MemoryStore()
        (event,) = three.reconcile(fresh)
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
            from tlp.settings import Settings
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


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_four_cold_processes_at_once(settings: Settings, checkpoint: Path) -> None:
    """Database, experiment, model and version numbers are asked for by all of them in the same moment."""
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from storage import MemoryStore
        from tlp.registry import Registry
        from tlp.settings import Settings
        registry = Registry(Settings(home=Path(sys.argv[1])), MemoryStore())
        print(registry.register(Path(sys.argv[2]), family="x86_64"))
    """)
    command = [sys.executable, "-c", code, str(settings.home), str(checkpoint)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [err for _, err in outputs] == ["", "", "", ""]
    assert sorted(int(out) for out, _ in outputs) == [1, 2, 3, 4]
    assert not list(settings.mlflow_dir.glob("*.partial"))


class TestStaleRuns:
    def test_run_of_a_dead_process_is_closed(self, registry: Registry, mlflow_settings: Settings) -> None:
        code = """
            import os, signal, sys
            from pathlib import Path
            from tlp.registry import Registry, _register
            from tlp.settings import Settings
            registry = Registry(Settings(home=Path(sys.argv[1])))
            with _register._run(registry._client, registry._experiment_id(), "killed"):
                os.kill(os.getpid(), signal.SIGKILL)
        """
        assert run_python(code, str(mlflow_settings.home)).returncode == -signal.SIGKILL
        with _register._run(registry._client, registry._experiment_id(), "alive") as alive:
            (closed,) = registry.close_stale_runs()
            status = {r.info.run_name: r.info.status for r in registry._client.search_runs([registry._experiment_id()])}
            assert status == {"killed": "KILLED", "alive": "RUNNING"}
        assert closed != alive
        assert registry.close_stale_runs() == []


class TestErrors:
    def test_server_that_does_not_answer(self, tmp_path: Path) -> None:
        settings = Settings(home=tmp_path, mlflow_uri="http://127.0.0.1:9")
        with pytest.raises(RegistryUnavailableError, match=r"http://127\.0\.0\.1:9 does not answer") as caught:
            Registry(settings).resolve(FAMILY)
        assert caught.value.next_command == "tlp up"

    def test_file_that_is_no_database(self, settings: Settings) -> None:
        settings.mlflow_dir.mkdir(parents=True)
        (settings.mlflow_dir / "mlflow.db").write_bytes(b"no database" * 1000)
        with pytest.raises(RegistryError, match="not a database"):
            Registry(settings).list_versions()

    def test_home_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "home").write_text("")
        with pytest.raises(RegistryError, match="opening the registry"):
            Registry(Settings(home=tmp_path / "home")).list_versions()

    def test_password_is_not_shown(self, tmp_path: Path) -> None:
        settings = Settings(home=tmp_path, mlflow_uri="http://me:secret@127.0.0.1:9")
        with pytest.raises(RegistryUnavailableError) as caught:
            Registry(settings).list_versions(FAMILY)
        assert "secret" not in str(caught.value)


def move_in_ui(url: str, model: str, alias: str, version: int) -> None:
    """The one request that MLflow's page sends when an alias is moved there."""
    answer = httpx.post(
        f"{url}/ajax-api/2.0/mlflow/registered-models/alias",
        json={"name": model, "alias": alias, "version": str(version)},
        trust_env=False,
    )
    answer.raise_for_status()


@pytest.mark.slow
class TestServer:
    """A real `mlflow server`; a class of one family per test, because the server is shared."""

    @pytest.mark.parametrize("how", ["direct", "served"])
    def test_alias_moved_in_the_ui_is_obeyed(self, mlflow_server: ServedRegistry, checkpoint: Path, how: str) -> None:
        family = f"ui-{how}"
        registry = Registry(getattr(mlflow_server, how), MemoryStore())
        add_versions(registry, checkpoint, 2, family)
        registry.promote(family, 1, reason="first")
        registry.promote(family, 2, reason="better")
        assert registry.resolve(family).version == 2

        move_in_ui(mlflow_server.url, registry.model_name(family), "champion", 1)

        for settings in (mlflow_server.direct, mlflow_server.served):
            found = Registry(settings, MemoryStore()).resolve(family)
            assert found.version == 1
            assert (found.checkpoint_dir / "weights.safetensors").read_text() == "weights"
        registry.reconcile()
        assert moves(registry, family)[-1] == ("champion", "2", "1", "person")
        assert registry.show(family, 2).rejected
        assert registry.list_versions(family)[1].aliases == ("champion",)

    def test_rollback_through_the_server(self, mlflow_server: ServedRegistry, checkpoint: Path) -> None:
        registry = Registry(mlflow_server.served, MemoryStore())
        add_versions(registry, checkpoint, 3, "back")
        for version in (1, 2, 3):
            registry.promote("back", version, reason="better")
        assert registry.rollback("back").to_version == "2"
        assert registry.rollback("back").to_version == "1"
        assert Registry(mlflow_server.direct).resolve("back").version == 1
        with pytest.raises(NotFoundError, match=r"no version 9 \(there: 3, 2, 1\)"):
            registry.show("back", 9)

    def test_client_without_the_files(
        self, mlflow_server: ServedRegistry, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An experiment whose files lie with the server, as on a server that is not ours: they are fetched once."""
        monkeypatch.setattr(_register, "EXPERIMENT", "elsewhere")
        remote = Settings(home=tmp_path / "other-machine", mlflow_uri=mlflow_server.url)
        registry = Registry(remote, MemoryStore())
        add_versions(registry, checkpoint, 1, "remote")
        registry.promote("remote", 1, reason="first")
        first = registry.resolve("remote").checkpoint_dir
        assert first.is_relative_to(remote.cache_dir)
        assert (first / "weights.safetensors").read_text() == "weights"
        before = first.stat().st_mtime_ns
        assert registry.resolve("remote").checkpoint_dir == first
        assert first.stat().st_mtime_ns == before


def event(from_version: int | None, to_version: int | None) -> ModelEvent:
    def text(version: int | None) -> str | None:
        return None if version is None else str(version)

    return ModelEvent(
        datetime.now(UTC), MODEL, "champion", text(from_version), text(to_version), Actor.PIPELINE, "because"
    )


@given(st.lists(st.one_of(st.none(), st.integers(1, 6))))
def test_champion_stack_ends_where_the_alias_is(targets: list[int | None]) -> None:
    events: list[ModelEvent] = []
    at: int | None = None
    for target in targets:
        if target != at:
            events.append(event(at, target))
            at = target
    stack = _history.champion_stack(events)
    assert len(stack) == len(set(stack))
    assert _history.last_version(events) == at
    if at is not None:
        assert stack[-1] == at


def test_owner_tag_names_this_process(registry: Registry, checkpoint: Path) -> None:
    add_versions(registry, checkpoint, 1)
    run: Any = registry._client.get_run(registry.show(FAMILY, 1).run_id)
    assert json.loads(run.data.tags[_register.OWNER_TAG])["pid"] == os.getpid()
