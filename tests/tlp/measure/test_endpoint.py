"""From what the store says about a device to the runner that reaches it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage import DeviceState
from tests.contract.store import example_device
from tlp.core.errors import DeviceError, UserError
from tlp.core.settings import Settings
from tlp.measure.endpoint import KINDS, RpcEndpoint, UnknownEndpoint, endpoint_of, open_runner, require_measurable
from tlp.measure.fake import FakeRunner

RPC = {"kind": "rpc", "tracker": "10.0.0.1:9190", "key": "rpi4", "cc": None}


def device(endpoint, state=DeviceState.SERVING):
    return replace(example_device("box"), endpoint=endpoint, state=state)


def test_every_kind_goes_into_the_store_and_comes_back():
    examples = {"local": {}, "rpc": {"tracker": "t:1", "key": "k", "cc": "g++"}, "dataset": {}, "fake": {"seed": 3}}
    assert examples.keys() == KINDS.keys()
    for kind, facts in examples.items():
        endpoint = KINDS[kind](**facts)
        assert endpoint.model_dump() == {"kind": kind, **facts}
        assert endpoint_of(device(endpoint.model_dump())) == endpoint
    assert [kind for kind in KINDS if not device({"kind": kind}).has_hardware] == ["dataset"]
    assert [kind for kind in KINDS if KINDS[kind].is_local] == ["local"]
    assert RpcEndpoint(tracker="10.0.0.1:9190", key="rpi4").model_dump() == RPC


def test_a_runner_is_opened_unless_the_device_is_out_of_work():
    fake = {"kind": "fake", "seed": 1}
    assert isinstance(open_runner(device(fake), Settings()), FakeRunner)
    assert isinstance(open_runner(device(fake, DeviceState.QUARANTINED), Settings(), quarantined=True), FakeRunner)
    for state in (DeviceState.QUARANTINED, DeviceState.RETIRED):
        with pytest.raises(UserError, match=f"is {state.value}") as caught:
            open_runner(device(fake, state), Settings())
        assert caught.value.next_command == "tlp device resume box"
    with pytest.raises(UserError, match="no hardware to measure on"):
        require_measurable(device({"kind": "dataset"}))


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ({"kind": "quantum", "qubits": 5}, "'quantum', this release knows local, rpc, dataset, fake"),
        ({}, "endpoint kind 'None'"),
        ({"kind": ["local"]}, "endpoint kind"),
        ({"kind": "rpc", "tracker": "10.0.0.1:9190"}, "key: Field required"),
        ({"kind": "rpc", "tracker": None, "key": "k"}, "tracker: Input should be a valid string"),
    ],
)
def test_what_another_release_stored_is_listed_but_not_opened(stored, why):
    box = device(stored)
    endpoint = endpoint_of(box)
    assert isinstance(endpoint, UnknownEndpoint) and box.has_hardware and not endpoint.is_local
    with pytest.raises(DeviceError, match="device 'box' has ") as caught:
        open_runner(box, Settings())
    assert why in caught.value.message
    assert caught.value.next_command == "tlp device show box"


def test_fields_that_a_later_release_added_are_let_be():
    assert endpoint_of(device(RPC | {"rack": 4})) == RpcEndpoint(tracker="10.0.0.1:9190", key="rpi4")
