"""Enrolling a device: its target is detected or checked, then proved by running a kernel on it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from storage import Device, DeviceState, MeasurementState, MeasurementStore
from storage.names import validate_name
from tlp.core.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.settings import Settings
from tlp.fleet.counts import validate_count
from tlp.measure import Check, MeasureInput, MeasureOutcome, Runner
from tlp.measure.endpoint import Endpoint, LocalEndpoint, open_runner
from tlp.programs import targets

_PROBE_SIZE = 64
_PROBE_LANES = 16  # 512 bits of float32: a CPU without the vectors its target promises dies here and not in a search


def probe_input(target: Mapping[str, Any], *, check: bool = False) -> MeasureInput:
    """A small kernel for that target: C[i] = A[i] * B[i] + A[i] over 64 x 16 float32, vectorised or on GPU threads.

    With `check` its result is compared with a reference.
    """
    import tvm
    from tvm import te

    shape = (_PROBE_SIZE * _PROBE_LANES,)
    a, b = te.placeholder(shape, "float32", "A"), te.placeholder(shape, "float32", "B")
    c = te.compute(shape, lambda i: a[i] * b[i] + a[i], "C")
    plain = tvm.IRModule({"main": te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")})
    schedule = tvm.s_tir.Schedule(plain)
    (loop,) = schedule.get_loops(schedule.get_sblock("C"))
    outer, inner = schedule.split(loop, [None, _PROBE_LANES])
    if target["kind"] == "llvm":
        schedule.vectorize(inner)
    else:
        schedule.bind(outer, "blockIdx.x")
        schedule.bind(inner, "threadIdx.x")
    args = tuple(("float32", shape) for _ in range(3))
    module = tvm.ir.save_json(schedule.mod)
    wanted = Check(module, tvm.ir.save_json(plain), "probe", args) if check else None
    return MeasureInput("probe", module, dict(target), args, wanted)


def probe(target: Mapping[str, Any], runner: Runner) -> MeasureOutcome:
    """Build and run the probe kernel; DeviceError if the runner itself does not work."""
    (outcome,) = runner.measure([probe_input(target)])
    return outcome


def new_device(
    settings: Settings,
    name: str,
    target: Mapping[str, Any],
    endpoint: Endpoint,
    *,
    min_samples: int | None,
    next_command: str,
) -> Device:
    """The row a device would get, without facts; nothing is stored.

    Args:
        settings: gives the default of `min_samples`.
        name: device name.
        target: as `targets.normalise_target` returns it.
        endpoint: how it is reached.
        min_samples: OK samples before the device becomes a task; None: the setting.
        next_command: a command with an acceptable `min_samples`.

    Raises:
        InvalidInputError: `min_samples` is no count.
    """
    wanted = settings.min_samples if min_samples is None else min_samples
    return Device(
        name=name,
        target=target,
        family=targets.family_of(target),
        min_samples=validate_count("min_samples", wanted, next_command=next_command),
        facts={},
        endpoint=endpoint.model_dump(),
        state=DeviceState.ENROLLED,
        enrolled_at=datetime.now(UTC),
    )


def local_device(
    settings: Settings, name: str, *, target: str | Mapping[str, Any] | None = None, min_samples: int | None = None
) -> Device:
    """The row a local device would get; nothing is measured or stored.

    Args:
        target: JSON text, mapping, tag or mcpu; None: what this machine is.
        settings, name, min_samples: see `new_device`.

    Raises:
        InvalidInputError: the name does not fit, LLVM does not know the target or it is no CPU's, `min_samples` is no
            count.
    """
    validate_name("device", name)
    known = targets.detect_local_target() if target is None else targets.normalise_target(target)
    if known["kind"] != "llvm":
        raise InvalidInputError(
            f"target kind {known['kind']!r} cannot be measured: this release measures CPUs, kind 'llvm'",
            next_command=f"tlp device enroll {name}",
        )
    example = f"tlp device enroll {name} --min-samples 1000"
    device = new_device(settings, name, known, LocalEndpoint(), min_samples=min_samples, next_command=example)
    return replace(device, facts=targets.host_facts())


def require_free_name(store: MeasurementStore, name: str) -> None:
    """Raise AlreadyExistsError if a device of that name is enrolled, InvalidInputError if none can have it."""
    validate_name("device", name)
    with suppress(NotFoundError):
        existing = store.get_device(name)
        raise AlreadyExistsError(
            f"device {name!r} is enrolled already, since {existing.enrolled_at:%Y-%m-%d}, "
            f"as {existing.target.get('mcpu')}",
            next_command=f"tlp device show {name}",
        )


def add(store: MeasurementStore, device: Device, outcome: MeasureOutcome) -> Device:
    """Store a device on which the probe kernel has run."""
    store.add_device(device, f"enrolled; probe kernel ran in {min(outcome.run_secs) * 1e6:.1f} us")
    return store.get_device(device.name)


def enroll(
    fleet: Fleet, name: str, *, target: str | Mapping[str, Any] | None = None, min_samples: int | None = None
) -> Device:
    """Enroll this machine under `name`, after a kernel compiled for the target has run on it; see `local_device`.

    Raises:
        InvalidInputError: see `local_device`; or this machine cannot run code for the target.
        AlreadyExistsError: the name is taken.
        DeviceError: no worker process could be started.
    """
    require_free_name(fleet.store, name)
    device = local_device(fleet.settings, name, target=target, min_samples=min_samples)
    say(f"{name}: compiling a small kernel for {device.target.get('mcpu', device.target['kind'])} and running it")
    with open_runner(device, fleet.settings) as runner:
        outcome = probe(device.target, runner)
    if outcome.state is not MeasurementState.OK:
        raise InvalidInputError(
            f"this machine cannot run code for target {dict(device.target)}: {outcome.state} {outcome.error}",
            next_command=f"tlp device enroll {name}",
        )
    return add(fleet.store, device, outcome)


def enroll_once(
    fleet: Fleet, name: str, *, target: str | Mapping[str, Any] | None = None, min_samples: int | None = None
) -> Device:
    """The device of that name, enrolled now if it is not: what a bootstrap that may be repeated needs.

    Raises:
        AlreadyExistsError: it is enrolled with another target or quota than the one given.
    """
    try:
        device = fleet.store.get_device(name)
    except NotFoundError:
        return enroll(fleet, name, target=target, min_samples=min_samples)
    difference = None
    if min_samples is not None and min_samples != device.min_samples:
        difference = f"with min_samples {device.min_samples} and not {min_samples}"
    elif target is not None and targets.normalise_target(target) != dict(device.target):
        difference = f"as {dict(device.target)} and not {target}"
    if difference is not None:
        raise AlreadyExistsError(
            f"device {name!r} is enrolled already, {difference}", next_command=f"tlp bootstrap {name}"
        )
    return device
