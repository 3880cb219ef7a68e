"""Where MLflow's files of a home lie: its rows say so with absolute paths, and homes are moved and copied.

Relative paths would follow the current directory of whoever reads, and `mlflow-artifacts:` needs a server at all times:
so the rows are written anew when a home is opened elsewhere than they say.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from tlp.core.settings import Settings

_COLUMNS: Final = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
_TIMEOUT_S: Final = 60.0


def artifact_root(settings: Settings) -> str:
    """The folder of MLflow's files of this home, as a URI."""
    return (settings.mlflow_dir / "artifacts").as_uri()


def follow_home(database: Path, experiments: Sequence[str], root: str) -> None:
    """Let the rows of these experiments name the files below `root`, in one transaction, if they lay elsewhere before.

    Raises sqlite3.Error.
    """
    marks = ", ".join("?" * len(experiments))
    chosen = f"name IN ({marks}) AND artifact_location <> ?"
    elsewhere = f"SELECT DISTINCT artifact_location FROM experiments WHERE {chosen}"
    with closing(sqlite3.connect(database, timeout=_TIMEOUT_S, isolation_level=None)) as connection:
        if connection.execute(elsewhere, (*experiments, root)).fetchone() is None:
            return
        connection.execute("BEGIN IMMEDIATE")
        for (old,) in connection.execute(elsewhere, (*experiments, root)).fetchall():
            start = len(old) + 1
            for table, column in _COLUMNS:
                below = f"{column} = ? OR substr({column}, 1, ?) = ?"
                moved = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {below}"
                connection.execute(moved, (root, start, old, start, f"{old}/"))
        connection.execute("COMMIT")
