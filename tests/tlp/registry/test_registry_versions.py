"""Versions on a real MLflow: registered, resolved, closed after a crash, refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from storage import Actor, DuckDBStore
from tests.tlp.registry.helpers import FAMILY, MODEL, add_versions, client_of, run_python
from tlp.core.errors import InvalidInputError, NotFoundError, RegistryError, RegistryUnavailableError
from tlp.core.registry import RunRecord, Submission, VersionFacts
from tlp.core.settings import Settings
from tlp.registry import Registry
from tlp.registry.mlflow import OWNER_TAG, mlflow_run


class TestRegister:
    def test_version_carries_what_was_given(self, registry: Registry, checkpoint: Path, tmp_path: Path) -> None:
        figure = tmp_path / "curve.png"
        figure.write_bytes(b"\x89PNG")
        facts = VersionFacts({"cpu0": 300, "v2": 100}, "joint", None, "passed", ("beats random", "top-1 .9"), 3, 2)
        version = registry.register(
            Submission(
                checkpoint,
                FAMILY,
                device="cpu0",
                metrics={"top1": 0.9, "top5": 0.95, "loss": 0.1},
                params={"epochs": 3},
                curves={"train_loss": list(enumerate([0.3, 0.2, 0.1]))},
                tags=facts.to_tags(),
                figures=[figure],
                report={"gate": {"passed": True}},
                run_name="cpu0 joins",
            )
        )
        assert version == 1
        registered = registry.show(FAMILY, 1)
        assert registered.tags == {  # all of it for people
            "trained_for": "cpu0",
            "top1": "0.9000",
            "top5": "0.9500",
            "devices": "cpu0, v2",
            "samples": "cpu0 300, v2 100",
            "strategy": "joint",
            "trained_from": "scratch",
            "gate": "passed",
            "gate_reason": "beats random; top-1 .9",
            "judged_against": "version 3",
            "best_earlier": "2",
        }
        assert registry.resolve(FAMILY, ref=1).devices == ("cpu0", "v2")
        assert registered.metrics["top5"] == 0.95
        assert not registered.aliases
        assert not registered.rejected

        client = registry._client
        curve = client.get_metric_history(registered.run_id, "train_loss")
        assert [(m.step, m.value) for m in sorted(curve, key=lambda m: m.step)] == [(0, 0.3), (1, 0.2), (2, 0.1)]
        run = client.get_run(registered.run_id)
        assert (run.info.status, run.info.run_name) == ("FINISHED", "cpu0 joins")
        assert {a.path for a in client.list_artifacts(registered.run_id)} == {"figures", "report.json"}

    def test_numbers_grow_and_list_is_newest_first(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 3)
        registry.register(Submission(checkpoint, "aarch64"))
        assert [v.version for v in registry.list_versions(FAMILY)] == [3, 2, 1]
        assert {(v.model, v.version) for v in registry.list_versions()} >= {("mtl-tlp-aarch64", 1), (MODEL, 3)}

    def test_failure_on_the_way_leaves_no_version(self, registry: Registry, checkpoint: Path, tmp_path: Path) -> None:
        with pytest.raises(RegistryError, match="registering a version"):
            registry.register(Submission(checkpoint, FAMILY, figures=[tmp_path / "not-there.png"]))
        assert registry.list_versions(FAMILY) == []
        (run,) = registry._client.search_runs([registry._experiment_id()])
        assert run.info.status == "FAILED"

    def test_missing_checkpoint_is_refused(self, registry: Registry, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="not a checkpoint directory"):
            registry.register(Submission(tmp_path / "nothing", FAMILY))

    def test_everything_lies_under_home(
        self, mlflow_settings: Settings, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        registry = Registry(mlflow_settings, DuckDBStore())
        registry.register(Submission(checkpoint, FAMILY))
        assert registry.resolve(FAMILY, ref=1).checkpoint_dir.is_relative_to(mlflow_settings.mlflow_dir)
        assert list(elsewhere.iterdir()) == []

    def test_nothing_is_printed(self, registry: Registry, checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
        registry.register(Submission(checkpoint, FAMILY))
        registry.promote(FAMILY, 1, reason="first")
        assert capfd.readouterr() == ("", "")


class TestResolve:
    def test_files_come_back(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 1)
        registry.promote(FAMILY, 1, reason="first")
        resolved = registry.resolve(FAMILY)
        assert (resolved.model, resolved.version, resolved.alias) == (MODEL, 1, "champion")
        assert {p.name: p.read_text() for p in resolved.checkpoint_dir.iterdir()} == {
            p.name: p.read_text() for p in checkpoint.iterdir()
        }

    def test_files_are_found_after_the_home_was_moved(self, registry: Registry, checkpoint: Path) -> None:
        registry.register(Submission(checkpoint, "x86_64"))
        before = registry.resolve("x86_64", ref=1).checkpoint_dir
        home = registry._settings.home
        moved = home.with_name(f"{home.name}-moved")
        home.rename(moved)
        try:
            again = Registry(registry._settings.model_copy(update={"home": moved, "mlflow_uri": None}), DuckDBStore())
            folder = again.resolve("x86_64", ref=1).checkpoint_dir
            assert folder == moved / before.relative_to(home)
            assert folder.is_dir()
        finally:
            moved.rename(home)

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
        resolved = registry.resolve(FAMILY, "cpu0", ref)
        assert (resolved.version, resolved.alias) == (2, None)

    def test_no_model_yet(self, registry: Registry) -> None:
        with pytest.raises(NotFoundError, match=f"{MODEL} has no version yet") as caught:
            registry.resolve(FAMILY)
        assert caught.value.next_command == "tlp train"

    def test_no_champion(self, registry: Registry, checkpoint: Path) -> None:
        add_versions(registry, checkpoint, 2)
        with pytest.raises(NotFoundError, match="no alias 'champion'; its versions are 2, 1") as caught:
            registry.resolve(FAMILY, "cpu0")
        assert caught.value.next_command == "tlp model list"

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


class TestStaleRuns:
    def test_run_of_a_dead_process_is_closed(self, registry: Registry, mlflow_settings: Settings) -> None:
        code = """
            import os, signal, sys
            from pathlib import Path
            from tlp.core.registry import RunRecord
            from tlp.registry import Registry
            from tlp.registry.mlflow import mlflow_run
            from tlp.core.settings import Settings
            registry = Registry(Settings(home=Path(sys.argv[1])))
            with mlflow_run(registry._client, registry._experiment_id(), RunRecord(run_name="killed"), "one"):
                os.kill(os.getpid(), signal.SIGKILL)
        """
        assert run_python(code, str(mlflow_settings.home)).returncode == -signal.SIGKILL
        with mlflow_run(registry._client, registry._experiment_id(), RunRecord(run_name="alive"), "two") as alive:
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


def test_owner_tag_names_this_process(registry: Registry, checkpoint: Path) -> None:
    add_versions(registry, checkpoint, 1)
    run: Any = registry._client.get_run(registry.show(FAMILY, 1).run_id)
    assert json.loads(run.data.tags[OWNER_TAG])["pid"] == os.getpid()
