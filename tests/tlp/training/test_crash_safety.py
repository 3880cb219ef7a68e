"""Kill -9 between any two steps of train → log → register → alias → history, on a real MLflow and a real store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.synthetic import fill_store
from storage import open_store
from tlp.core import faults as _faults
from tlp.core.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> list[dict[str, Any]]:
    """One state per place, as the start after the kill left it."""
    settings = Settings(home=tmp_path_factory.mktemp("crashing"))
    settings.mlflow_dir.mkdir()
    (settings.mlflow_dir / "mlflow.db").write_bytes(mlflow_template.read_bytes())
    fill_store(
        open_store(settings.store_url), networks=("net", "held"), workloads_per_network=2, programs=8, min_samples=8
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.tlp.training.crashing", str(settings.home)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    started = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["place"] for line in started] == list(_faults.PLACES)
    assert all(line["started"] == 0 for line in started), done.stderr
    return started


def test_every_place_is_reached(lines: list[dict[str, Any]]) -> None:
    assert {line["place"]: line["died"] for line in lines} == dict.fromkeys(_faults.PLACES, -signal.SIGKILL)


@pytest.mark.parametrize("place", _faults.PLACES)
def test_the_next_start_closes_everything(lines: list[dict[str, Any]], place: str) -> None:
    index = _faults.PLACES.index(place)
    state = lines[index]
    # what was on disk was registered and promoted, once, and not trained again; what was in memory only is lost
    versions = list(range(1, index + 1))
    assert state["trainings"] == index + 1
    assert state["versions"] == versions
    assert state["moves"] == [[str(version), "pipeline"] for version in versions]
    assert state["champion"] == (versions[-1] if versions else None)
    # one run per version, none open, neither here nor there
    assert state["mlflow_runs"] == ["FINISHED"] * len(versions)
    assert (state["running"], state["unrecorded"], state["kept"], state["left_on_disk"]) == (0, 0, [], [])
    assert state["device"] == ("serving" if versions else "enrolled")
