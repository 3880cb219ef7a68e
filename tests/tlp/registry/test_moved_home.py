"""A home that is copied or moved takes its versions with it, and writes nothing where it came from."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from storage import DuckDBStore
from tests.tlp.registry.helpers import FAMILY, add_versions
from tlp.core.registry import RunRecord
from tlp.core.settings import Settings
from tlp.registry import Registry, log_night


def registry_at(settings: Settings, home: Path) -> Registry:
    return Registry(settings.model_copy(update={"home": home}), DuckDBStore())


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def mentions(database: Path, text: str) -> list[str]:
    """Columns of any table in which that text stands."""
    with closing(sqlite3.connect(database)) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(table, row[1]) for table in tables for row in connection.execute(f"PRAGMA table_info('{table}')")]
        return [
            f"{table}.{column}"
            for table, column in columns
            if connection.execute(f"SELECT 1 FROM {table} WHERE instr({column}, ?)", (text,)).fetchone()
        ]


def test_a_copy_works_without_the_home_it_came_from(
    mlflow_settings: Settings, checkpoint: Path, tmp_path: Path
) -> None:
    first, second, third = tmp_path / "first", tmp_path / "second home", tmp_path / "third"
    mlflow_settings.home.rename(first)
    add_versions(registry_at(mlflow_settings, first), checkpoint, 1)
    log_night(mlflow_settings.model_copy(update={"home": first}), RunRecord(run_name="a night", report={"pairs": 1}))
    shutil.copytree(first, second)
    before = files(first)

    copy = registry_at(mlflow_settings, second)
    add_versions(copy, checkpoint, 1)  # the second version
    log_night(mlflow_settings.model_copy(update={"home": second}), RunRecord(run_name="another", report={"pairs": 2}))
    assert files(first) == before
    assert mentions(second / "mlflow" / "mlflow.db", str(first)) == []
    assert mentions(first / "mlflow" / "mlflow.db", str(second)) == []
    shutil.rmtree(first)
    for version in (1, 2):
        folder = copy.resolve(FAMILY, ref=version).checkpoint_dir
        assert folder.is_relative_to(second)
        assert {path.name for path in folder.iterdir()} == {path.name for path in checkpoint.iterdir()}

    second.rename(third)  # and on
    moved = registry_at(mlflow_settings, third)
    assert all(moved.resolve(FAMILY, ref=version).checkpoint_dir.is_relative_to(third) for version in (1, 2))
    runs = [run for run in moved._client.search_runs(["1", "2"]) if run.info.run_name in ("a night", "another")]
    assert [len(moved._client.list_artifacts(run.info.run_id)) for run in runs] == [1, 1]
