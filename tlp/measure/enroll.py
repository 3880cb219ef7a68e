"""Enrolling a device: its target is detected or checked, then proved by running a kernel on it.

The way to boards behind a TVM RPC tracker is walked step by step, and the step that fails is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from typing import Any

from storage import Device, DeviceState, MeasurementState, MeasurementStore
from storage.names import validate_name
from tlp.core.errors import AlreadyExistsError, DeviceError, InvalidInputError, NotFoundError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.settings import Settings
from tlp.fleet.counts import validate_count
from tlp.measure import Check, MeasureInput, MeasureOutcome, Runner
from tlp.measure.endpoint import Endpoint, LocalEndpoint, RpcEndpoint, open_runner
from tlp.measure.tracker import Queue, TrackerClient, parse_address
from tlp.programs import targets

LONGEST_WAIT_S = 30.0  # for a free board: enrolling is a person's command
TRACKER_TIMEOUT_S = 5.0
POLL_S = 0.5
BOARD_SERVER = "python \"$(python -c 'import tlp.measure.board as b; print(b.__file__)')\""
Target = str | Mapping[str, Any]  # as a person gives it
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
    settings: Settings, name: str, target: Mapping[str, Any], endpoint: Endpoint, min_samples: int | None, again: str
) -> Device:
    """The row a device would get, without facts; nothing is stored.

    Args:
        target: as `targets.normalise_target` returns it.
        min_samples: OK samples before the device becomes a task; None: the setting.
        again: the command that enrolls it.

    Raises:
        InvalidInputError: `min_samples` is no count.
    """
    wanted = settings.min_samples if min_samples is None else min_samples
    count = validate_count("min_samples", wanted, next_command=f"{again} --min-samples 1000")
    family, how, now = targets.family_of(target), endpoint.model_dump(), datetime.now(UTC)
    return Device(name, target, family, count, {}, how, DeviceState.ENROLLED, now)


def local_device(
    settings: Settings, name: str, *, target: Target | None = None, min_samples: int | None = None
) -> Device:
    """The row a local device would get; nothing is measured or stored.

    Args:
        target: JSON text, mapping, tag or mcpu; None: what this machine is.

    Raises:
        InvalidInputError: the name does not fit, LLVM does not know the target or it is no CPU's, `min_samples` is no
            count.
    """
    validate_name("device", name)
    known = targets.detect_local_target() if target is None else targets.normalise_target(target)
    if known["kind"] != "llvm":
        why = f"target kind {known['kind']!r} cannot be measured: this release measures CPUs, kind 'llvm'"
        raise InvalidInputError(why, next_command=f"tlp device enroll {name}")
    device = new_device(settings, name, known, LocalEndpoint(), min_samples, f"tlp device enroll {name}")
    return replace(device, facts=targets.host_facts())


def require_free_name(store: MeasurementStore, name: str) -> None:
    """Raise AlreadyExistsError if a device of that name is enrolled, InvalidInputError if none can have it."""
    validate_name("device", name)
    with suppress(NotFoundError):
        existing = store.get_device(name)
        since = f"since {existing.enrolled_at:%Y-%m-%d}, as {existing.target.get('mcpu')}"
        raise AlreadyExistsError(
            f"device {name!r} is enrolled already, {since}", next_command=f"tlp device show {name}"
        )


def add(store: MeasurementStore, device: Device, outcome: MeasureOutcome) -> Device:
    """Store a device on which the probe kernel has run."""
    store.add_device(device, f"enrolled; probe kernel ran in {min(outcome.run_secs) * 1e6:.1f} us")
    return store.get_device(device.name)


def enroll(fleet: Fleet, name: str, *, target: Target | None = None, min_samples: int | None = None) -> Device:
    """Enroll this machine under `name`, after a kernel compiled for the target has run on it.

    Raises:
        InvalidInputError: `local_device` refuses it, or this machine cannot run code for the target.
        AlreadyExistsError: the name is taken.
        DeviceError: no worker process could be started.
    """
    require_free_name(fleet.store, name)
    device = local_device(fleet.settings, name, target=target, min_samples=min_samples)
    say(f"{name}: compiling a small kernel for {device.target.get('mcpu', device.target['kind'])} and running it")
    with open_runner(device, fleet.settings) as runner:
        outcome = probe(device.target, runner)
    if outcome.state is not MeasurementState.OK:
        why = f"this machine cannot run code for target {dict(device.target)}: {outcome.state} {outcome.error}"
        raise InvalidInputError(why, next_command=f"tlp device enroll {name}")
    return add(fleet.store, device, outcome)


def enroll_once(fleet: Fleet, name: str, *, target: Target | None = None, min_samples: int | None = None) -> Device:
    """The device of that name, enrolled now if it is not: what a bootstrap that may be repeated needs.

    Raises:
        AlreadyExistsError: it is enrolled with another target or quota than the one given.
    """
    try:
        device = fleet.store.get_device(name)
    except NotFoundError:
        return enroll(fleet, name, target=target, min_samples=min_samples)
    if min_samples is not None and min_samples != device.min_samples:
        difference = f"with min_samples {device.min_samples} and not {min_samples}"
    elif target is not None and targets.normalise_target(target) != dict(device.target):
        difference = f"as {dict(device.target)} and not {target}"
    else:
        return device
    raise AlreadyExistsError(f"device {name!r} is enrolled already, {difference}", next_command=f"tlp bootstrap {name}")


class Step(StrEnum):
    """The way to a board, in order."""

    TRACKER = "tracker reachable"
    KEY = "key known"
    FREE = "server free"
    COMPILED = "kernel cross-compiled"
    UPLOADED = "kernel uploaded"
    RUN = "kernel run"
    CORRECT = "result correct"

    @property
    def number(self) -> int:
        """Its place on the way, from 1."""
        return list(Step).index(self) + 1

    @property
    def label(self) -> str:
        """`step 3 of 7, server free`."""
        return f"step {self.number} of {len(Step)}, {self.value}"


# The step of the runner → ours. A connection is part of the upload; at `queue` the board was free a moment ago.
_STEPS = {
    "build": Step.COMPILED,
    "reference": Step.COMPILED,
    "upload": Step.UPLOADED,
    "run": Step.RUN,
    "check": Step.CORRECT,
}


class StepError(DeviceError):
    """A step of the way to a device failed."""

    def __init__(self, device: Device, step: Step, why: str, next_command: str | None) -> None:
        text = f"{step.label}, failed for device {device.name!r}: {why}"
        super().__init__(text, next_command=next_command or "tlp doctor")


def rpc_device(
    settings: Settings, name: str, endpoint: RpcEndpoint, *, target: Target | None, min_samples: int | None = None
) -> Device:
    """The row a remote device would get, without facts; nothing is connected or stored.

    Args:
        target: JSON text or mapping, with `num-cores` for a CPU: this machine's count says nothing about a board's.

    Raises:
        InvalidInputError: one of them cannot be used as it stands.
    """
    validate_name("device", name)
    tracker, key = endpoint.tracker, endpoint.key
    parse_address(tracker)
    again = f"tlp device enroll {name} --tracker {tracker} --key {key or 'KEY'}"
    if not key or any(c.isspace() or c == ":" for c in key):
        raise InvalidInputError(f"key {key!r} cannot be a tracker's: no blanks, no colons", next_command=again)
    example = f"""{again} --target '{{"kind": "llvm", "mcpu": "cortex-a72", "num-cores": 4}}'"""
    if target is None:
        why = "a remote device needs its target: what it is cannot be seen from here"
        raise InvalidInputError(why, next_command=example)
    known = targets.normalise_target(target)
    is_tag = isinstance(target, str) and "/" in target  # TVM's tags of boards name the cores
    if known["kind"] == "llvm" and "num-cores" not in str(target) and not is_tag:
        why = f"target {target!r} does not say how many cores the board has (num-cores)"
        raise InvalidInputError(why, next_command=example)
    return new_device(settings, name, known, endpoint, min_samples, again)


def enroll_rpc(
    fleet: Fleet, name: str, endpoint: RpcEndpoint, *, target: Target | None, min_samples: int | None = None
) -> Device:
    """Enroll the boards of one key as a device, after a kernel built here has run there with the right result.

    Raises:
        InvalidInputError: `rpc_device` refuses it.
        AlreadyExistsError: the name is taken.
        StepError: a step of the way failed; the message names it.
    """
    require_free_name(fleet.store, name)
    device = rpc_device(fleet.settings, name, endpoint, target=target, min_samples=min_samples)
    outcome, facts = walk(device, endpoint, fleet.settings, say)
    return add(fleet.store, replace(device, facts=facts), outcome)


def walk(
    device: Device, endpoint: RpcEndpoint, settings: Settings, tell: Callable[[str], None]
) -> tuple[MeasureOutcome, dict[str, Any]]:
    """All steps to a device and back; every one that works is told.

    Returns:
        The outcome of the probe kernel, which is OK, and what is known about the boards: `boards`, `tvm_host` and, from
        our board server, `cpu, architecture, cores_logical, memory_bytes, system, python, tvm`.

    Raises:
        StepError: a step failed.
    """
    patience_s = min(settings.queue_timeout_s, LONGEST_WAIT_S)
    try:
        with TrackerClient(endpoint.tracker, TRACKER_TIMEOUT_S) as client:
            boards = _wait_for_board(client, device, endpoint, patience_s, tell)
    except StepError:
        raise
    except DeviceError as exc:
        raise StepError(device, Step.TRACKER, exc.message, exc.next_command) from exc
    limits = {"queue_timeout_s": patience_s, "device_max_losses": 2, "build_workers": 1}
    outcome, facts = _run_probe(device, endpoint, settings.model_copy(update=limits), _Way(tell))
    return outcome, {"boards": boards, "tvm_host": version("apache-tvm"), **facts}


def _wait_for_board(
    client: TrackerClient, device: Device, endpoint: RpcEndpoint, patience_s: float, tell: Callable[[str], None]
) -> int:
    """How many boards the tracker has of that key, once one of them is free."""
    key, queues = endpoint.key, client.queues()
    tell(f"{Step.TRACKER.label}: {endpoint.tracker} answers")
    queue = queues.get(key, Queue(0, 0, 0))
    if not queue.total:
        known = ", ".join(sorted(name for name, other in queues.items() if other.total)) or "none"
        serve = f"{BOARD_SERVER} --tracker {endpoint.tracker} --key {key}"
        raise StepError(device, Step.KEY, f"no board is registered as {key!r}; keys there: {known}", serve)
    tell(f"{Step.KEY.label}: {queue.total} of key {key!r}")
    end = time.monotonic() + patience_s
    while not queue.free:
        if time.monotonic() > end:
            why = f"{queue.total} boards of key {key!r}, none free, {queue.pending} requests waiting"
            host, _, port = endpoint.tracker.rpartition(":")
            ask = f"python -m tvm.exec.query_rpc_tracker --host {host} --port {port}"
            raise StepError(device, Step.FREE, why, ask)
        time.sleep(POLL_S)
        queue = client.queue(key)
    tell(f"{Step.FREE.label}: {queue.free} of {queue.total}")
    return queue.total


class _Way:
    """Where the probe kernel is on its way: what a runner tells its steps to."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self.step, self.is_correct = tell, Step.COMPILED, False

    def __call__(self, _key: str, name: str) -> None:
        if name == "checked":
            self.is_correct = True
            self._tell(f"{Step.CORRECT.label}: as the reference has it")
            return
        step = _STEPS.get(name, self.step)
        if step.number > self.step.number:
            self._tell(f"{self.step.label}: done")
        self.step = step


def _run_probe(
    device: Device, endpoint: RpcEndpoint, limits: Settings, way: _Way
) -> tuple[MeasureOutcome, Mapping[str, Any]]:
    """The outcome of the probe kernel and what the board says about itself."""
    try:
        with endpoint.open_runner(limits, way) as runner:
            (outcome,) = runner.measure([probe_input(device.target, check=True)])
    except DeviceError as exc:
        raise StepError(device, way.step, exc.message, exc.next_command) from exc
    if outcome.state is not MeasurementState.OK:
        option = {Step.COMPILED: "--cc COMPILER", Step.RUN: "--target MCPU"}.get(way.step)
        fix = f"tlp device enroll {device.name} {option} --help" if option else None
        raise StepError(device, way.step, f"{outcome.state} {outcome.error}", fix)
    if not way.is_correct:
        raise StepError(device, Step.CORRECT, "the result could not be compared, see the log", None)
    return outcome, dict(runner.facts)
