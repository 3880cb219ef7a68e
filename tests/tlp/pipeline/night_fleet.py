"""A home with three registered versions of a tiny untrained model, a fake device it serves, and small networks.

    python -m tests.tlp.pipeline.night_fleet AFTER ARGUMENTS…

is the command line, killed by SIGKILL when the fake device is about to measure its AFTER-th program.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from storage import Device, DeviceState, MeasurementStore, Network, NetworkTask, open_store
from tests.tlp.small_fleet import TARGET, workload
from tlp.core.registry import Submission
from tlp.core.settings import Settings
from tlp.language.vocabulary import Vocabulary
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.registry import Registry

FAMILY, DEVICE = "x86_64", "cpu"
NETWORKS = {"one": ("dense_16_64", "dense_64_64"), "two": ("dense_32_32",)}
SMALL = TLPConfig(heads=(DEVICE,), words=64, dims=(8,), attention_heads=2, head_dims=(8,))
ENVIRONMENT = {
    "TLP_TUNE_BATCH": "4",
    "TLP_TUNE_POPULATION": "16",
    "TLP_TUNE_GENERATIONS": "1",
    "TLP_TUNE_REMEASURE": "0",
    "TLP_TUNE_TRIALS": "16",
    "TLP_TORCH_THREADS": "1",
    "TLP_CANARY": "false",
}


def make(home: Path, mlflow_template: Path) -> None:
    """Register three versions, promote the first; a device and two networks."""
    settings = Settings(home=home, torch_threads=1)
    settings.mlflow_dir.mkdir(parents=True)
    shutil.copy(mlflow_template, settings.mlflow_dir / "mlflow.db")
    store = open_store(settings.store_url)
    store.add_device(device(), "for a test")
    for name, members in NETWORKS.items():
        add_network(store, name, members)
    torch.manual_seed(0)
    manifest = Manifest(FAMILY, SMALL.encoder_version, (DEVICE,), {}, {DEVICE: 1}, 1, (), "joint", None, (0,))
    folder = Checkpoint(SMALL, Vocabulary(), manifest, MTLTLP(SMALL).state_dict()).save(home / "checkpoint")
    registry = Registry(settings, store)
    for _ in range(3):
        registry.register(Submission(folder, FAMILY))
    registry.promote(FAMILY, 1, reason="for a test")


def device(name: str = DEVICE, kind: str = "fake", state: DeviceState = DeviceState.SERVING) -> Device:
    return Device(name, TARGET, FAMILY, 10, {}, {"kind": kind}, state, datetime.now(UTC))


def add_network(
    store: MeasurementStore, name: str, members: tuple[str, ...], source: str = "torch:tests:net", holdout: bool = False
) -> None:
    made = [workload(member) for member in members]
    tasks = tuple(NetworkTask(w.workload_id, w.name, 1 + i) for i, w in enumerate(made))
    store.add_network(Network(name, holdout, source, datetime.now(UTC), tasks), made)


def main() -> None:
    from tlp.cli import main as command_line
    from tlp.measure.fake import FakeRunner

    left = int(sys.argv.pop(1))
    measure = FakeRunner._outcome

    def dying(self, number, job):  # type: ignore[no-untyped-def]
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return measure(self, number, job)

    FakeRunner._outcome = dying  # type: ignore[method-assign]
    command_line()


if __name__ == "__main__":
    main()
