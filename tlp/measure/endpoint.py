"""How a device is reached: one class per kind of device, and the table of them.

To add a kind: write its `Runner` in a new file, and its `Endpoint` with a line in `KINDS` here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar, Final, Literal

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from storage import Device, DeviceState
from tlp.core.errors import DeviceError, UserError
from tlp.core.settings import Settings
from tlp.measure import Runner
from tlp.measure.contract import Limits
from tlp.measure.fake import FakeRunner
from tlp.measure.local import LocalRunner
from tlp.measure.rpc import RpcRunner
from tlp.measure.tracker import TrackerClient

HERE: Final = "this machine"
_TRACKER_S: Final = 5.0  # longest wait for a tracker that is asked where its boards are


class Endpoint(BaseModel):
    """How a device is reached, as the store keeps it in `Device.endpoint`; `kind` names the class in `KINDS`."""

    model_config = ConfigDict(frozen=True)
    is_local: ClassVar[bool] = False  # whether that is this machine
    kind: str

    def open_runner(self, settings: Settings) -> Runner:
        """A runner with the limits of `settings`, to be closed by the caller. DeviceError if there is none."""
        raise NotImplementedError

    def machines(self) -> frozenset[str]:
        """What its programs run on: devices that share a machine must not be measured at the same time."""
        return frozenset()


class LocalEndpoint(Endpoint):
    """Worker processes on this machine."""

    is_local = True
    kind: Literal["local"] = "local"

    def open_runner(self, settings: Settings) -> Runner:
        """Processes of this machine, as many as `measure_workers`."""
        return LocalRunner(Limits.from_settings(settings), workers=settings.measure_workers)

    def machines(self) -> frozenset[str]:
        """This one."""
        return frozenset({HERE})


class RpcEndpoint(Endpoint):
    """The boards of one key behind the TVM RPC tracker at `HOST:PORT`; `cc` as of `RpcRunner`."""

    kind: Literal["rpc"] = "rpc"
    tracker: str
    key: str
    cc: str | None = None

    def open_runner(self, settings: Settings, on_step: Callable[[str, str], None] | None = None) -> RpcRunner:
        """One for all boards of the key; `on_step` as of `RpcRunner`."""
        return RpcRunner(
            self.tracker,
            self.key,
            Limits.from_settings(settings),
            cc=self.cc,
            build_workers=settings.build_workers or max(1, (os.cpu_count() or 1) - 1),
            queue_timeout_s=settings.queue_timeout_s,
            upload_timeout_s=settings.upload_timeout_s,
            max_losses=settings.device_max_losses,
            on_step=on_step,
        )

    def machines(self) -> frozenset[str]:
        """Addresses of the boards, as the tracker knows them; if it does not answer, the key stands for them."""
        try:
            with TrackerClient(self.tracker, _TRACKER_S) as client:
                hosts = client.hosts(self.key)
        except DeviceError:
            hosts = frozenset()
        ours = {address.address for of in psutil.net_if_addrs().values() for address in of}
        return frozenset(HERE if host in ours else host for host in hosts) or frozenset({f"{self.key}@{self.tracker}"})


class DatasetEndpoint(Endpoint):
    """A platform of an imported data set: it has samples and no hardware."""

    kind: Literal["dataset"] = "dataset"

    def open_runner(self, settings: Settings) -> Runner:
        """Raises DeviceError."""
        raise DeviceError("a platform of an imported data set has no hardware", next_command="tlp device list")


class FakeEndpoint(Endpoint):
    """The shipped fake, for rehearsals and tests."""

    kind: Literal["fake"] = "fake"
    seed: int = 0

    def open_runner(self, settings: Settings) -> Runner:
        """The fake with this seed."""
        return FakeRunner(seed=self.seed)

    def machines(self) -> frozenset[str]:
        """One of its own for each seed."""
        return frozenset({f"fake {self.seed}"})


class UnknownEndpoint(Endpoint):
    """What another release stored and this one cannot read: its device can be listed, not measured."""

    device: str
    problem: str

    def open_runner(self, settings: Settings) -> Runner:
        """Raises DeviceError, with what cannot be read."""
        raise DeviceError(f"device {self.device!r} {self.problem}", next_command=f"tlp device show {self.device}")


KINDS: Final[dict[str, type[Endpoint]]] = {
    "local": LocalEndpoint,
    "rpc": RpcEndpoint,
    "dataset": DatasetEndpoint,
    "fake": FakeEndpoint,
}


def endpoint_of(device: Device) -> Endpoint:
    """The endpoint of a device; an `UnknownEndpoint`, which opens no runner, if this release cannot read it."""
    kind = str(device.endpoint.get("kind"))
    problem = f"has endpoint kind {kind!r}, this release knows {', '.join(KINDS)}"
    if kind in KINDS:
        try:
            return KINDS[kind].model_validate(dict(device.endpoint))
        except ValidationError as exc:
            wrong = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())
            problem = f"has an endpoint of kind {kind} that is damaged: {wrong}"
    return UnknownEndpoint(kind=kind, device=device.name, problem=problem)


def open_runner(device: Device, settings: Settings, *, quarantined: bool = False) -> Runner:
    """A runner for that device, to be closed by the caller; with `quarantined` also for a quarantined one, to probe it.

    Raises:
        UserError: the device cannot be measured: a data-set platform, retired, quarantined.
        DeviceError: an endpoint that this release cannot read.
    """
    if not (quarantined and device.state is DeviceState.QUARANTINED):
        require_measurable(device)
    return endpoint_of(device).open_runner(settings)


def require_measurable(device: Device) -> None:
    """Raise UserError if new programs cannot be measured on that device."""
    if not device.has_hardware:
        why = f"device {device.name!r} is a platform of an imported data set, there is no hardware to measure on"
        raise UserError(why, next_command="tlp device list")
    if device.state in (DeviceState.RETIRED, DeviceState.QUARANTINED):
        why = f"device {device.name!r} is {device.state.lower()}"
        raise UserError(why, next_command=f"tlp device resume {device.name}")
