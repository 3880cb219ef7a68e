"""Enrolling a device: its target is found or checked, then proved by really running a kernel on it."""

from __future__ import annotations

from collections.abc import Mapping
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
from tlp.measure.endpoint import LocalEndpoint, open_runner

_PROBE_SIZE = 64
_PROBE_LANES = 16  # 512 bits of float32: a CPU without the vectors its target promises dies here and not in a search


def probe_input(target: Mapping[str, Any], *, check: bool = False) -> MeasureInput:
    """A small kernel for that target: C[i] = A[i] * B[i] + A[i] over 64 x 16 float32, vectorised or on GPU threads.

    Args:
        target: the target.
        check: have its result compared with a reference.
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


def local_device(
    settings: Settings, name: str, *, target: str | Mapping[str, Any] | None = None, min_samples: int | None = None
) -> Device:
    """The row a local device of that target would get; nothing is measured or stored.

    Args:
        settings: gives the default of `min_samples`.
        name: device name.
        target: JSON text, mapping, tag or mcpu; None: what this machine is.
        min_samples: OK samples before the device becomes a task.

    Raises:
        InvalidInputError: the name does not fit, LLVM does not know the target or it is no CPU's, `min_samples` is no
            count.
    """
    import tlp.programs.targets as targets

    validate_name("device", name)
    wanted = validate_count(
        "min_samples",
        settings.min_samples if min_samples is None else min_samples,
        next_command=f"tlp device enroll {name} --min-samples 1000",
    )
    found = targets.detect_local_target() if target is None else targets.normalise_target(target)
    if found["kind"] != "llvm":
        raise InvalidInputError(
            f"target kind {found['kind']!r} cannot be measured: this release measures CPUs, kind 'llvm'",
            next_command=f"tlp device enroll {name}",
        )
    return Device(
        name=name,
        target=found,
        family=targets.family_of(found),
        min_samples=wanted,
        facts=targets.host_facts(),
        endpoint=LocalEndpoint().model_dump(),
        state=DeviceState.ENROLLED,
        enrolled_at=datetime.now(UTC),
    )


def require_free_name(store: MeasurementStore, name: str) -> None:
    """Raise AlreadyExistsError if a device of that name is enrolled."""
    try:
        existing = store.get_device(name)
    except NotFoundError:
        return
    raise AlreadyExistsError(
        f"device {name!r} is enrolled already, since {existing.enrolled_at:%Y-%m-%d}, as {existing.target.get('mcpu')}",
        next_command=f"tlp device show {name}",
    )


def enroll(
    fleet: Fleet,
    name: str,
    *,
    target: str | Mapping[str, Any] | None = None,
    min_samples: int | None = None,
    runner: Runner | None = None,
) -> Device:
    """Enroll this machine under `name`, after a kernel compiled for the target has run on it.

    Args:
        store: gets the row.
        settings: time-outs and defaults.
        name: device name.
        target: see `local_device`.
        min_samples: see `local_device`.
        runner: what runs the kernel; None: the one of a local device.

    Raises:
        InvalidInputError: see `local_device`; or this machine cannot run code for the target.
        AlreadyExistsError: the name is taken.
        DeviceError: no worker process could be started.
    """
    validate_name("device", name)
    require_free_name(fleet.store, name)
    device = local_device(fleet.settings, name, target=target, min_samples=min_samples)
    say(f"{name}: compiling a small kernel for {device.target.get('mcpu', device.target['kind'])} and running it")
    if runner is None:
        with open_runner(device, fleet.settings) as local:
            outcome = probe(device.target, local)
    else:
        outcome = probe(device.target, runner)
    if outcome.state is not MeasurementState.OK:
        raise InvalidInputError(
            f"this machine cannot run code for target {dict(device.target)}: {outcome.state} {outcome.error}",
            next_command=f"tlp device enroll {name}",
        )
    fleet.store.add_device(device, f"enrolled; probe kernel ran in {min(outcome.run_secs) * 1e6:.1f} us")
    return fleet.store.get_device(name)


def enroll_once(
    fleet: Fleet,
    name: str,
    *,
    target: str | Mapping[str, Any] | None = None,
    min_samples: int | None = None,
) -> Device:
    """The device of that name, enrolled now if it is not: what a bootstrap that may be repeated needs.

    Raises:
        AlreadyExistsError: it is enrolled with another target or quota than the one given.
    """
    try:
        found = fleet.store.get_device(name)
    except NotFoundError:
        return enroll(fleet, name, target=target, min_samples=min_samples)
    if min_samples is not None and min_samples != found.min_samples:
        raise AlreadyExistsError(
            f"device {name!r} is enrolled already, with min_samples {found.min_samples} and not {min_samples}",
            next_command=f"tlp bootstrap {name}",
        )
    if target is not None:
        from tlp.programs.targets import normalise_target

        if normalise_target(target) != dict(found.target):
            raise AlreadyExistsError(
                f"device {name!r} is enrolled already, as {dict(found.target)} and not {target}",
                next_command=f"tlp bootstrap {name}",
            )
    return found
