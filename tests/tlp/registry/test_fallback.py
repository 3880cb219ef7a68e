"""The version in force was deleted, its alias points nowhere, its files are gone: the last good one, and it is said."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from storage import DuckDBStore
from tests.tlp.registry.helpers import FAMILY, MODEL, add_versions, client_of
from tlp.core.errors import InvalidInputError, ModelFormatError, NotFoundError, RegistryError, RegistryUnavailableError
from tlp.core.registry import ResolvedModel, Submission
from tlp.core.settings import Settings
from tlp.registry import Registry


@pytest.fixture
def three(registry: Registry, checkpoint: Path) -> Registry:
    """Promoted one after the other."""
    add_versions(registry, checkpoint, 3)
    for version in (1, 2, 3):
        registry.promote(FAMILY, version, reason="better")
    return registry


def number(version: ResolvedModel) -> int:
    return version.version


def used(registry: Registry, device: str | None = None) -> tuple[int, str]:
    usable = registry.usable(FAMILY, device, number)
    assert usable.loaded == usable.version
    return usable.version, usable.fallback or ""


def delete_files(registry: Registry, version: int) -> None:
    shutil.rmtree(registry.resolve(FAMILY, ref=version).checkpoint_dir)


def test_the_champion_is_used_without_a_word(three: Registry) -> None:
    assert used(three) == (3, "")


def test_a_deleted_version(three: Registry, mlflow_settings: Settings) -> None:
    client_of(mlflow_settings).delete_model_version(MODEL, "3")
    version, said = used(three)
    assert version == 2 and "no alias 'champion'" in said and "version 2, the last good one" in said


def test_an_alias_that_a_person_took_away_is_a_verdict(three: Registry, mlflow_settings: Settings) -> None:
    client_of(mlflow_settings).delete_registered_model_alias(MODEL, "champion")
    assert used(three)[0] == 2
    assert three.show(FAMILY, 3).rejected
    assert three.history(FAMILY)[-1].to_version is None


def test_files_that_are_gone(three: Registry) -> None:
    delete_files(three, 3)
    version, said = used(three)
    assert version == 2 and "has no checkpoint" in said
    delete_files(three, 2)
    assert used(three)[0] == 1
    delete_files(three, 1)
    with pytest.raises(RegistryError, match=r"version 3 .* has no checkpoint"):  # the one that should have been used
        used(three)
    assert three.champion_version(FAMILY) == 3  # a missing file is no verdict: nobody moved anything


def test_what_cannot_be_loaded_is_passed_over(three: Registry) -> None:
    def load(version: ResolvedModel) -> int:
        if version.version > 1:
            raise ModelFormatError(f"version {version.version} is damaged")
        return version.version

    usable = three.usable(FAMILY, None, load)
    assert usable.version == 1 and "version 3 is damaged" in str(usable.fallback)


def test_rejected_versions_are_not_fallen_back_to(three: Registry, mlflow_settings: Settings) -> None:
    client_of(mlflow_settings).set_model_version_tag(MODEL, "2", "rejected", "bad")
    delete_files(three, 3)
    assert used(three)[0] == 1


@pytest.mark.parametrize(("nowhere", "good"), [("99", 3), ("abc", 2)])
def test_an_alias_that_names_no_version(three: Registry, mlflow_settings: Settings, nowhere: str, good: int) -> None:
    """As a hand in the database leaves it. A number is a move, taken as the person's; no number, as taking it away."""
    path = mlflow_settings.mlflow_tracking_uri.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE registered_model_aliases SET version = ?", (nowhere,))
    assert used(three)[0] == good
    three.reconcile()
    assert used(three)[0] == good


def test_a_pin(three: Registry, mlflow_settings: Settings) -> None:
    three.promote(FAMILY, 1, reason="slow there", alias="champion-rpi4")
    three.promote(FAMILY, 2, reason="slow there", alias="champion-rpi4")
    assert (used(three, "rpi4"), used(three, "cpu0")) == ((2, ""), (3, ""))
    delete_files(three, 2)
    assert used(three, "rpi4")[0] == 1  # where the pin was before goes before champion
    client_of(mlflow_settings).delete_registered_model_alias(MODEL, "champion-rpi4")
    assert used(three, "rpi4") == (3, "")


def test_nothing_was_ever_promoted(registry: Registry, checkpoint: Path) -> None:
    with pytest.raises(NotFoundError, match="no version yet"):
        used(registry)
    add_versions(registry, checkpoint, 1)
    with pytest.raises(NotFoundError, match="no alias 'champion'"):  # registered is not promoted
        used(registry)


def test_no_answer_is_no_reason_to_fall_back(settings: Settings) -> None:
    away = settings.model_copy(update={"mlflow_uri": "http://127.0.0.1:9"})
    with pytest.raises(RegistryUnavailableError):
        used(Registry(away, DuckDBStore()))


class TestSubmission:
    def test_is_registered_once(self, registry: Registry, checkpoint: Path) -> None:
        def register() -> int:
            return registry.register(Submission(checkpoint, FAMILY, submission="abc", at=1.0, metrics={"top1": 0.5}))

        assert registry.find_submission(FAMILY, "abc") is None
        assert (register(), register()) == (1, 1)
        assert registry.find_submission(FAMILY, "abc") == 1
        assert registry.register(Submission(checkpoint, FAMILY, submission="xyz")) == 2

    def test_is_promoted_once(self, three: Registry, checkpoint: Path) -> None:
        add_versions(three, checkpoint, 1)
        assert three.promote_judged(FAMILY, 4, reason="passed", judged_against=3, parent=3)
        three.rollback(FAMILY)
        assert not three.promote_judged(FAMILY, 4, reason="passed", judged_against=3, parent=3)
        assert three.champion_version(FAMILY) == 3

    def test_a_person_moved_the_champion_meanwhile(
        self, three: Registry, checkpoint: Path, mlflow_settings: Settings
    ) -> None:
        add_versions(three, checkpoint, 1)
        client_of(mlflow_settings).set_registered_model_alias(MODEL, "champion", "2")
        with pytest.raises(InvalidInputError, match="judged when champion was version 3, and it is version 2 by now"):
            three.promote_judged(FAMILY, 4, reason="passed", judged_against=3, parent=1)
        with pytest.raises(InvalidInputError, match="trained from version 3, which was rejected"):
            three.promote_judged(FAMILY, 4, reason="passed", judged_against=2, parent=3)
        assert three.champion_version(FAMILY) == 2


def test_what_the_run_shows(registry: Registry, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "top_k.png").write_bytes(b"png")
    version = registry.register(
        Submission(
            checkpoint,
            FAMILY,
            figures=[tmp_path / "top_k.png"],
            report={"devices": {}},
            table={"device": ["cpu", "gpu"], "k": [1, 5]},
            page="**passed the gate**",
        )
    )
    row = registry.show(FAMILY, version)
    client = registry._client
    listed = {str(item.path) for item in client.list_artifacts(row.run_id)}
    assert listed >= {"figures", "report.json", "gate.json", "gate.md"}
    table = json.loads(Path(client.download_artifacts(row.run_id, "gate.json", str(tmp_path))).read_text())
    assert table == {"columns": ["device", "k"], "data": [["cpu", 1], ["gpu", 5]]}
    tags = client.get_run(row.run_id).data.tags
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "gate.json", "type": "table"}]  # as log_table does
    assert tags["mlflow.note.content"] == "**passed the gate**"
    assert client.get_model_version(MODEL, str(version)).description == "**passed the gate**"
