"""Enrolling boards behind a TVM RPC tracker: the way there is walked step by step, and the step that fails is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from importlib.metadata import version
from typing import Any

from storage import Device, MeasurementState
from storage.names import validate_name
from tlp.core.errors import DeviceError, InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.settings import Settings
from tlp.measure.contract import MeasureOutcome
from tlp.measure.endpoint import RpcEndpoint
from tlp.measure.enroll import add, new_device, probe_input, require_free_name
from tlp.measure.tracker import Queue, TrackerClient, parse_address
from tlp.programs import targets

LONGEST_WAIT_S = 30.0  # for a free board: enrolling is a person's command
TRACKER_TIMEOUT_S = 5.0
POLL_S = 0.5
BOARD_SERVER = "python \"$(python -c 'import tlp.measure.board as b; print(b.__file__)')\""


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


# The step of the runner → ours. A connection is part of the upload.
_STEPS = {
    "build": Step.COMPILED,
    "reference": Step.COMPILED,
    "queue": Step.FREE,
    "upload": Step.UPLOADED,
    "run": Step.RUN,
    "check": Step.CORRECT,
}


class StepError(DeviceError):
    """A step of the way to a device failed."""

    def __init__(self, device: Device, step: Step, why: str, next_command: str | None) -> None:
        message = f"{step.label}, failed for device {device.name!r}: {why}"
        super().__init__(message, next_command=next_command or "tlp doctor")


def rpc_device(
    settings: Settings,
    name: str,
    endpoint: RpcEndpoint,
    *,
    target: str | Mapping[str, Any] | None,
    min_samples: int | None = None,
) -> Device:
    """The row a remote device would get, without facts; nothing is connected or stored.

    Args:
        target: JSON text or mapping, with `num-cores` for a CPU: this machine's count says nothing about a board's.
        settings, name, endpoint, min_samples: see `tlp.measure.enroll.new_device`.

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
        raise InvalidInputError(
            "a remote device needs its target: what it is cannot be seen from here", next_command=example
        )
    known = targets.normalise_target(target)
    is_tag = isinstance(target, str) and "/" in target  # TVM's tags of boards name the cores
    if known["kind"] == "llvm" and "num-cores" not in str(target) and not is_tag:
        raise InvalidInputError(
            f"target {target!r} does not say how many cores the board has (num-cores)", next_command=example
        )
    more = f"{again} --min-samples 1000"
    return new_device(settings, name, known, endpoint, min_samples=min_samples, next_command=more)


def enroll_rpc(
    fleet: Fleet,
    name: str,
    endpoint: RpcEndpoint,
    *,
    target: str | Mapping[str, Any] | None,
    min_samples: int | None = None,
) -> Device:
    """Enroll the boards of one key as a device, after a kernel built here has run there with the right result.

    Raises:
        InvalidInputError: see `rpc_device`.
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
        self._tell = tell
        self.step = Step.COMPILED
        self.is_correct = False

    def __call__(self, _key: str, name: str) -> None:
        if name == "checked":
            self.is_correct = True
            self._tell(f"{Step.CORRECT.label}: as the reference has it")
            return
        step = _STEPS[name]
        if step is Step.FREE:  # it was free a moment ago
            return
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
