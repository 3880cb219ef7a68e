"""What to type after an error of the store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage import DuckDBStore, MeasurementStore, RunKind, RunState
from storage.errors import ErrorCode
from storage.names import validate_name
from tests.contract.store import Scene, example_device, example_network, example_workload
from tlp.core.errors import TlpError, UserError
from tlp.core.next_steps import COMMANDS, next_command


def test_every_code_has_a_command() -> None:
    assert set(COMMANDS) == set(ErrorCode)


def test_an_errors_own_command_comes_first() -> None:
    assert next_command(UserError("no", next_command="ls", code=ErrorCode.NO_DEVICES)) == "ls"
    assert next_command(UserError("no")) is None


@pytest.mark.parametrize(
    ("call", "command"),
    [
        (lambda s: s.add_device(example_device("cpu0"), "again"), "tlp device show cpu0"),
        (lambda s: s.get_device("x"), "tlp device list"),
        (lambda s: s.add_network(example_network("net", [example_workload()]), []), "tlp network list"),
        (lambda s: s.get_network("x"), "tlp network list"),
        (lambda s: s.get_workloads(["x"]), "tlp network list"),
        (lambda s: s.get_run("x"), "tlp status"),
        (lambda s: s.finish_run("x", RunState.DONE, ""), "tlp status"),
        (lambda _: validate_name("network", "A B"), "tlp network list"),
        (lambda _: DuckDBStore().get_device("x"), "tlp device enroll this-cpu"),
        (lambda _: DuckDBStore().get_network("x"), "tlp network add resnet_18 --builtin resnet_18"),
    ],
)
def test_errors_of_the_store_lead_to_a_command(call: Callable[[MeasurementStore], object], command: str) -> None:
    store = DuckDBStore()
    Scene(store)
    store.add_network(example_network("net", [example_workload()]), [])
    with pytest.raises(TlpError) as raised:
        call(store)
    assert next_command(raised.value) == command


def test_measurements_of_a_device_that_is_not_enrolled() -> None:
    scene, empty = Scene(DuckDBStore()), DuckDBStore()
    empty.add_workloads([scene.workload])
    scene.run_id = empty.start_run(RunKind.MEASURE, device=None, params={}, owner={})
    with pytest.raises(TlpError) as raised:
        empty.add_measurements(scene.batch([scene.ok("a", 0)], [0]))
    assert next_command(raised.value) == "tlp device enroll cpu0"
