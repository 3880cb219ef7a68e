"""Enrolling again: what a bootstrap that may be repeated does, and what it refuses."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from storage import Device, DeviceState, MeasurementStore, open_store
from tests.fleets import fleet_of
from tlp.core.errors import AlreadyExistsError, InvalidInputError
from tlp.core.settings import Settings
from tlp.fleet.counts import MAX_PROGRAMS, validate_count
from tlp.measure import enroll

TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}


@pytest.fixture
def store() -> MeasurementStore:
    opened = open_store("duckdb::memory:")
    row = Device("cpu", TARGET, "x86_64", 6, {}, {"kind": "fake"}, DeviceState.ENROLLED, datetime.now(UTC))
    opened.add_device(row, "for a test")
    return opened


@pytest.mark.parametrize("same", [{}, {"min_samples": 6}, {"target": TARGET}])
def test_a_device_is_enrolled_once(store, same):
    assert enroll.enroll_once(fleet_of(Settings(), store), "cpu", **same) == store.get_device("cpu")


@pytest.mark.parametrize(
    ("other", "named"), [({"min_samples": 7}, "6 and not 7"), ({"target": "x86-64-v3"}, "not x86-64-v3")]
)
def test_a_device_enrolled_as_something_else_is_not_taken_for_it(store, other, named):
    with pytest.raises(AlreadyExistsError, match=named) as caught:
        enroll.enroll_once(fleet_of(Settings(), store), "cpu", **other)
    assert caught.value.next_command == "tlp bootstrap cpu"


def test_only_cpus_are_measured_here():
    with pytest.raises(InvalidInputError, match="'cuda'"):
        enroll.local_device(Settings(), "gpu", target={"kind": "cuda"})


@pytest.mark.parametrize("number", [0, -1, MAX_PROGRAMS + 1, 10**23])
def test_a_quota_is_a_count(number):
    with pytest.raises(InvalidInputError, match="min_samples"):
        enroll.local_device(Settings(), "cpu", min_samples=number)


def test_counts_have_two_ends():
    assert validate_count("samples", 1, next_command="x") == 1
    assert validate_count("samples", MAX_PROGRAMS, next_command="x") == MAX_PROGRAMS
