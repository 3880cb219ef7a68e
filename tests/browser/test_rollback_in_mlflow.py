"""A person rolls back in MLflow's own page, in a real browser on a real server, while a tuning run is going on."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage import Device, DeviceState, DuckDBStore, Network, NetworkTask, RunKind
from tests.browser import mlflow_pages
from tests.conftest import ServedRegistry
from tests.fleets import fleet_of
from tests.tlp.search.conftest import TARGET, dense
from tests.tlp.training.crashing import Untrained
from tests.tlp.training.steps import run_retrain
from tlp.cli.model import _event
from tlp.core import secrets
from tlp.core.errors import InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.requests import TuneRequest
from tlp.core.settings import Settings
from tlp.measure import session
from tlp.measure.fake import FakeRunner
from tlp.model.checkpoint import Checkpoint
from tlp.pipeline import train as pipeline
from tlp.registry import Registry
from tlp.search import providers, tuning
from tlp.search.report import TuningProgress
from tlp.search.samplers import random_programs
from tlp.training.data.dataset import Dataset
from tlp.training.learn.trainer import TrainOptions

FAMILY, DEVICE, MODEL = "inbrowser", "c", "mtl-tlp-inbrowser"
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]


class Watched(Untrained):
    """Says which version a training started from."""

    parent: str | None = None

    def train(self, dataset: Dataset, options: TrainOptions, **more: object) -> Checkpoint:
        self.parent = more.get("parent_version")  # type: ignore[assignment]
        made = super().train(dataset, options, **more)  # type: ignore[arg-type]
        return dataclasses.replace(made, manifest=dataclasses.replace(made.manifest, family=FAMILY))


@pytest.fixture
def store() -> DuckDBStore:
    made, now = DuckDBStore(), datetime.now(UTC)
    made.add_device(Device(DEVICE, TARGET, FAMILY, 8, {}, {"kind": "fake"}, DeviceState.SERVING, now), "for a test")
    workloads = [dense(16, 32, 16), dense(32, 64, 32)]
    for name, holdout, workload in zip(("net", "held"), (False, True), workloads, strict=True):
        made.add_network(
            Network(name, holdout, "dataset:test", now, (NetworkTask(workload.workload_id, "task", 1),)), [workload]
        )
    return made


@pytest.mark.usefixtures("browser")
def test_a_roll_back_in_the_page_is_obeyed(
    store: DuckDBStore, settings: Settings, mlflow_server: ServedRegistry, tmp_path: Path
) -> None:
    served = settings.model_copy(
        update={"mlflow_uri": mlflow_server.url, "tune_batch": 4, "tune_population": 16, "tune_generations": 1}
    )
    runner = FakeRunner()
    run = store.start_run(RunKind.MEASURE, device=DEVICE, params={}, owner={})
    session.measure_device(
        Fleet(served, store, Registry(served, store)),
        store.get_device(DEVICE),
        samples=16,
        run_id=run,
        sampler=random_programs(TARGET, 0),
        runner=runner,
    )
    registry = Registry(served, store)
    strategy = Watched(tmp_path / "trainings")

    def retrain() -> str | None:
        """The two stages of the flow `retrain`."""
        pipeline.reconcile(Fleet(served, store, registry))
        result = run_retrain(fleet_of(served, store, registry), device=DEVICE, force=True, strategy=strategy)
        assert result.version is not None
        return strategy.parent

    assert retrain() is None
    registry.promote(FAMILY, 1, reason="for a test")
    assert retrain() == "1"
    registry.promote(FAMILY, 2, reason="for a test")

    moved_at = 0

    def rolled_back(progress: TuningProgress) -> None:
        """In the middle of the run's first round a person opens the page."""
        nonlocal moved_at
        if moved_at:
            return
        moved_at = progress.trials
        url, login = secrets.split_login(mlflow_server.url)
        with mlflow_pages.open_page(login=login) as page:
            mlflow_pages.open_model(page, url, MODEL)
            mlflow_pages.move_alias(page, "champion", 1)

    fleet = Fleet(served, store, registry)
    report = tuning.tune(
        fleet,
        TuneRequest(network="net", device=DEVICE, trials=12),
        model=providers.open_provider("champion", fleet, store.get_device(DEVICE)),
        runner=runner,
        on_progress=rolled_back,
    )
    assert moved_at == 1
    assert report.model_versions == (("2", 0), ("1", 4))  # from the next round on
    assert report.degraded_events == 0

    assert retrain() == "1"  # the next training starts from it, and looks at the page first
    assert registry.show(FAMILY, 2).rejected
    with pytest.raises(InvalidInputError, match="was rejected"):
        registry.promote(FAMILY, 2, reason="nightly")
    (by_person,) = [event for event in registry.history(FAMILY) if event.by.value == "person"]
    assert _event(by_person) | {"at": None} == {  # a row of `tlp model history`
        "at": None,
        "model": MODEL,
        "alias": "champion",
        "from": "2",
        "to": "1",
        "by": "person",
        "reason": "moved in MLflow",
    }


def test_without_a_browser_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TLP_TEST_CHROMIUM", raising=False)
    with pytest.raises(mlflow_pages.NoBrowserError, match="apt-get install chromium"):
        mlflow_pages.find_chromium(str(tmp_path / "none"))
    program = tmp_path / "chromium"
    program.write_text("")
    program.chmod(0o755)
    assert mlflow_pages.find_chromium(str(tmp_path / "none")) == str(program)
