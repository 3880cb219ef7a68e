"""From a device's endpoint to the runner that reaches it."""

from __future__ import annotations

from storage import Device, DeviceState
from tlp.core.errors import DeviceError, UserError
from tlp.core.settings import Settings
from tlp.measure import Runner


def open_runner(device: Device, settings: Settings, *, quarantined: bool = False) -> Runner:
    """A runner for that device, to be closed by the caller.

    `{"kind": "local"}` gives worker processes on this machine; `{"kind": "rpc", "tracker": "host:port", "key": …,
    "cc": … | null}` the boards of a TVM RPC tracker; `{"kind": "fake", "seed": n}` the shipped fake, for rehearsals and
    tests; `{"kind": "dataset"}` devices have samples but no hardware.

    Args:
        device: the device.
        settings: limits and evaluator settings.
        quarantined: also for a device that is quarantined: to probe it.

    Raises:
        UserError: the device cannot be measured: a data-set platform, retired, quarantined.
        DeviceError: an endpoint kind that this release does not know.
    """
    if not (quarantined and device.state is DeviceState.QUARANTINED):
        require_measurable(device)
    kind = device.endpoint.get("kind")
    if kind == "local":
        from tlp.measure.local import LocalRunner

        return LocalRunner.from_settings(settings)
    if kind == "rpc":
        from tlp.measure.rpc import RpcRunner

        return RpcRunner.from_settings(device.endpoint, settings)
    if kind == "fake":
        from tlp.measure.fake import FakeRunner

        return FakeRunner(seed=int(device.endpoint.get("seed", 0)))
    raise DeviceError(
        f"device {device.name!r} has endpoint kind {kind!r}, this release knows local, rpc and dataset",
        next_command=f"tlp device show {device.name}",
    )


def require_measurable(device: Device) -> None:
    """Raise UserError if new programs cannot be measured on that device."""
    if device.endpoint.get("kind") == "dataset":
        raise UserError(
            f"device {device.name!r} is a platform of an imported data set, there is no hardware to measure on",
            next_command="tlp device list",
        )
    if device.state is DeviceState.RETIRED:
        raise UserError(f"device {device.name!r} is retired", next_command=f"tlp device resume {device.name}")
    if device.state is DeviceState.QUARANTINED:
        raise UserError(f"device {device.name!r} is quarantined", next_command=f"tlp device resume {device.name}")
