from __future__ import annotations

from pathlib import Path

import pytest

from bench.synthetic import fill_store
from storage import DuckDBStore
from tlp.core.settings import Settings
from tlp.training.data.dataset import Dataset, build_dataset

DEVICES = ("x86-64-v2", "x86-64-v3")


@pytest.fixture(scope="session")
def store() -> DuckDBStore:
    """Two devices, two networks to train on, one held out. Do not write to it."""
    made = DuckDBStore()
    fill_store(made)
    return made


@pytest.fixture
def quick(tmp_path: Path) -> Settings:
    """Settings of a training of a few seconds."""
    return Settings(
        home=tmp_path / "home",
        train_epochs=10,
        train_batch_groups=2,
        train_learning_rate=4e-3,
        torch_threads=1,
        gate_bootstrap=200,
    )


@pytest.fixture(scope="session")
def dataset(store: DuckDBStore) -> Dataset:
    return build_dataset(store, DEVICES)
