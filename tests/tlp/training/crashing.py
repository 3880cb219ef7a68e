"""Run by `test_crash_safety.py` in a process of its own: a training that dies at every place, and the start after it.

    python -m tests.tlp.training.crashing HOME

Prints one JSON line per place. Torch and MLflow are imported once; every training and every start is a fork that uses
them first, so that it dies and begins as a process of its own would.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from storage import DeviceState, RunKind, RunState, open_store
from tests.fleets import fleet_of
from tests.tlp.training.steps import run_retrain
from tlp.core import faults as _faults
from tlp.core.settings import Settings
from tlp.fleet import locks, runs, states
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.pipeline import train as pipeline
from tlp.registry import Registry, kept
from tlp.training import reproduce, submit
from tlp.training.data.dataset import Dataset
from tlp.training.judge.verdict import GateVerdict, Verdict
from tlp.training.learn.strategy import JointStrategy, new_network
from tlp.training.learn.trainer import OnEpoch, TrainOptions

DEVICE, FAMILY = "x86-64-v3", "x86_64"
SMALL = TLPConfig(heads=(), words=64, dims=(8,), attention_heads=2, head_dims=(8,))


class Untrained(JointStrategy):
    """Weights as they are drawn; notes that it was asked."""

    name = "untrained"

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def train(
        self,
        dataset: Dataset,
        options: TrainOptions,
        *,
        parent: Checkpoint | None = None,
        parent_version: str | None = None,
        config: TLPConfig | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> Checkpoint:
        with self.notes.open("a") as file:
            file.write("trained\n")
        network = new_network(dataset, replace(SMALL, heads=dataset.device_names))
        trainings = len(self.notes.read_text().splitlines())
        with torch.no_grad():  # the same weights again would not be promoted
            for weights in network.parameters():
                weights.mul_(1.0 + trainings / 64)
        manifest = Manifest(
            family=FAMILY,
            encoder_version=dataset.encoder.version,
            heads=dataset.device_names,
            targets={device.name: dict(device.target) for device in dataset.devices},
            samples=dict(dataset.samples),
            watermark=dataset.watermark,
            holdout=dataset.holdout.networks,
            strategy=self.name,
            parent=parent_version,
            seeds=(0,),
            curves={"train_loss": [1.0, 0.5]},
        )
        return Checkpoint(network.config, dataset.vocabulary, manifest, network.state_dict())


def train(settings: Settings) -> None:
    """What `tlp train` does once it is decided."""
    store = open_store(settings.store_url)
    runs.reap(store)
    with (
        locks.train_lock(settings, FAMILY),
        runs.open_run(store, RunKind.TRAIN, device=DEVICE) as run,
        states.device_activity(store, DEVICE, DeviceState.TRAINING, f"run {run.run_id}"),
    ):
        registry = Registry(settings, store)
        run_retrain(
            fleet_of(settings, store, registry),
            device=DEVICE,
            force=True,
            strategy=Untrained(settings.home / "trainings"),
        )


def start(settings: Settings) -> None:
    """What every flow begins with; writes down what is there afterwards."""
    store = open_store(settings.store_url)
    runs.reap(store)
    pipeline.reconcile(fleet_of(settings, store))
    registry = Registry(settings, store)
    found = registry._client.search_runs([registry._experiment_id()])
    state = {
        "champion": registry.champion_version(FAMILY),
        "versions": sorted(v.version for v in registry.list_versions(FAMILY)),
        "moves": [(e.to_version, e.by.value) for e in registry.history(FAMILY)],
        "mlflow_runs": sorted(r.info.status for r in found),
        "running": len(store.list_runs(state=RunState.RUNNING)),
        "device": store.get_device(DEVICE).state.value,
        "kept": kept.names(settings),
        "left_on_disk": sorted(p.name for p in settings.pending_dir.glob("*")),
        "trainings": len((settings.home / "trainings").read_text().splitlines()),
        "unrecorded": len(registry.reconcile()),
    }
    (settings.home / "state.json").write_text(json.dumps(state))


def forked(work: Callable[[Settings], None], settings: Settings, dies_at: str = "") -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ[_faults.VARIABLE] = dies_at
            work(settings)
            code = 0
        except BaseException:  # noqa: BLE001  # a fork must not go on as its parent
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _warm_up() -> None:
    """What every fork would load again, seconds each; starts no thread and opens no file of the home."""
    import mlflow.models
    import mlflow.pyfunc
    import mlflow.store.model_registry.sqlalchemy_store
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    from mlflow.utils import requirements_utils

    requirements_utils._init_modules_to_packages_map()
    with torch.device("meta"):
        MTLTLP(replace(SMALL, heads=("a",)))


def main() -> None:
    _warm_up()
    settings = Settings(home=Path(sys.argv[1]), torch_threads=1, registry_patience_s=0.0)

    def passing(*_args: Any, **_more: Any) -> GateVerdict:
        return GateVerdict(Verdict.PASSED, ("for a test",))

    def drawing(*_args: Any) -> list[Path]:
        return []

    submit.judge = passing
    reproduce._asked_in_a_process = reproduce._answer  # a process each, with torch and MLflow
    submit.plots.draw_all = drawing  # seconds, and not what this is about
    for place in _faults.PLACES:
        died = forked(train, settings, place)
        started = forked(start, settings)
        state = json.loads((settings.home / "state.json").read_text()) if started == 0 else {}
        print(json.dumps({"place": place, "died": died, "started": started, **state}), flush=True)


if __name__ == "__main__":
    main()
