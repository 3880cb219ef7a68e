"""The contract of `MeasurementStore` as tests, for every backend; needs pytest and hypothesis.

class TestMyStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path): return MyStore(tmp_path)
"""

from __future__ import annotations

import pytest

from storage import MeasurementStore
from tests.contract.store.catalog import CatalogContract
from tests.contract.store.examples import (
    AT,
    Scene,
    everything,
    example_device,
    example_network,
    example_sketch,
    example_workload,
    failed,
    ok,
)
from tests.contract.store.quality import QualityContract
from tests.contract.store.samples import SampleContract

__all__ = [
    "AT",
    "Scene",
    "StoreContract",
    "everything",
    "example_device",
    "example_network",
    "example_sketch",
    "example_workload",
    "failed",
    "ok",
]


class StoreContract(CatalogContract, SampleContract, QualityContract):
    """Derive, and give the fixture `store`: an empty store."""

    @pytest.fixture
    def store(self) -> MeasurementStore:
        """The store under test; to be overridden."""
        raise NotImplementedError

    @pytest.fixture
    def scene(self, store: MeasurementStore) -> Scene:
        """A store that is ready to take measurements."""
        return Scene(store)
