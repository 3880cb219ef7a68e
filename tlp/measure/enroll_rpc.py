"""Enrolling boards behind a TVM RPC tracker: the way there is walked step by step, and the step that fails is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from storage import Device, DeviceState, MeasurementState
from storage.names import validate_name
from tlp.core.errors import DeviceError, InvalidInputError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.settings import Settings
from tlp.fleet.counts import validate_count
from tlp.measure import MeasureOutcome
from tlp.measure.endpoint import RpcEndpoint
from tlp.measure.enroll import probe_input, require_free_name

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
    def label(self) -> str:
        """`step 3 of 7, server free`."""
        return f"step {list(Step).index(self) + 1} of {len(Step)}, {self.value}"


# The step of the runner → ours. A connection is part of the upload.
_STEPS = {
    "build": Step.COMPILED,
    "reference": Step.COMPILED,
    "queue": Step.FREE,
    "upload": Step.UPLOADED,
    "run": Step.RUN,
    "check": Step.CORRECT,
}


def rpc_device(
    settings: Settings,
    name: str,
    *,
    target: str | Mapping[str, Any] | None,
    tracker: str,
    key: str,
    cc: str | None = None,
    min_samples: int | None = None,
) -> Device:
    """The row a remote device would get, without facts; nothing is connected or stored.

    Args:
        settings: gives the default of `min_samples`.
        name: device name.
        target: JSON text or mapping, with `num-cores` for a CPU: this machine's count says nothing about a board's.
        tracker: `HOST:PORT`.
        key: of the boards at the tracker.
        cc: C++ compiler that links for the boards; None: see `tlp.measure.rpc.linker`.
        min_samples: OK samples before the device becomes a task.

    Raises:
        InvalidInputError: one of them cannot be used as it stands.
    """
    from tlp.measure.tracker import parse_address
    from tlp.programs import targets

    validate_name("device", name)
    parse_address(tracker)
    again = f"tlp device enroll {name} --tracker {tracker} --key {key or 'KEY'}"
    if not key or any(c.isspace() or c == ":" for c in key):
        raise InvalidInputError(f"key {key!r} cannot be a tracker's: no blanks, no colons", next_command=again)
    example = f"""{again} --target '{{"kind": "llvm", "mcpu": "cortex-a72", "num-cores": 4}}'"""
    if target is None:
        raise InvalidInputError(
            "a remote device needs its target: what it is cannot be seen from here", next_command=example
        )
    wanted = validate_count(
        "min_samples",
        settings.min_samples if min_samples is None else min_samples,
        next_command=f"{again} --min-samples 1000",
    )
    found = targets.normalise_target(target)
    is_tag = isinstance(target, str) and "/" in target  # TVM's tags of boards name the cores
    if found["kind"] == "llvm" and "num-cores" not in str(target) and not is_tag:
        raise InvalidInputError(
            f"target {target!r} does not say how many cores the board has (num-cores)", next_command=example
        )
    return Device(
        name=name,
        target=found,
        family=targets.family_of(found),
        min_samples=wanted,
        facts={},
        endpoint=RpcEndpoint(tracker=tracker, key=key, cc=cc).model_dump(),
        state=DeviceState.ENROLLED,
        enrolled_at=datetime.now(UTC),
    )


def enroll_rpc(
    fleet: Fleet,
    name: str,
    *,
    target: str | Mapping[str, Any] | None,
    tracker: str,
    key: str,
    cc: str | None = None,
    min_samples: int | None = None,
) -> Device:
    """Enroll the boards of one key as a device, after a kernel built here has run there with the right result.

    Raises:
        InvalidInputError: see `rpc_device`.
        AlreadyExistsError: the name is taken.
        DeviceError: a step of the way failed; the message names it.
    """
    require_free_name(fleet.store, name)
    device = rpc_device(fleet.settings, name, target=target, tracker=tracker, key=key, cc=cc, min_samples=min_samples)
    outcome, facts = walk(device, fleet.settings, say)
    fleet.store.add_device(
        replace(device, facts=facts), f"enrolled; probe kernel ran in {min(outcome.run_secs) * 1e6:.1f} us"
    )
    return fleet.store.get_device(name)


def walk(device: Device, settings: Settings, tell: Callable[[str], None]) -> tuple[MeasureOutcome, dict[str, Any]]:
    """All steps to a device and back; every one that works is told.

    Returns:
        The outcome of the probe kernel, which is OK, and what is known about the boards: `boards`, `tvm_host` and, from
        our board server, `cpu, architecture, cores_logical, memory_bytes, system, python, tvm`.

    Raises:
        DeviceError: a step failed.
    """
    from tlp.measure.tracker import TrackerClient

    endpoint = RpcEndpoint.model_validate(device.endpoint)
    tracker, key = endpoint.tracker, endpoint.key
    serve = f"{BOARD_SERVER} --tracker {tracker} --key {key}"
    with _step(device, Step.TRACKER), TrackerClient(tracker, TRACKER_TIMEOUT_S) as client:
        queues = client.queues()
        tell(f"{Step.TRACKER.label}: {tracker} answers")
        queue = queues.get(key)
        if queue is None or not queue.total:
            known = ", ".join(sorted(name for name, found in queues.items() if found.total)) or "none"
            raise _failed(device, Step.KEY, f"no board is registered as {key!r}; keys there: {known}", serve)
        tell(f"{Step.KEY.label}: {queue.total} of key {key!r}")
        end = time.monotonic() + min(settings.queue_timeout_s, LONGEST_WAIT_S)
        while not queue.free:
            if time.monotonic() > end:
                raise _failed(
                    device,
                    Step.FREE,
                    f"{queue.total} boards of key {key!r}, none free, {queue.pending} requests waiting",
                    f"python -m tvm.exec.query_rpc_tracker --host {tracker.rpartition(':')[0]} "
                    f"--port {tracker.rpartition(':')[2]}",
                )
            time.sleep(POLL_S)
            queue = client.queue(key)
        tell(f"{Step.FREE.label}: {queue.free} of {queue.total}")
    outcome, facts = _run_probe(device, settings, tell)
    return outcome, {"boards": queue.total, **facts}


def _run_probe(
    device: Device, settings: Settings, tell: Callable[[str], None]
) -> tuple[MeasureOutcome, dict[str, Any]]:
    from importlib.metadata import version

    patient = min(settings.queue_timeout_s, LONGEST_WAIT_S)
    limits = settings.model_copy(update={"queue_timeout_s": patient, "device_max_losses": 2, "build_workers": 1})
    steps: list[Step] = [Step.COMPILED]

    def entered(_key: str, name: str) -> None:
        done = steps[-1]
        if name == "checked":
            tell(f"{Step.CORRECT.label}: as the reference has it")
            steps.append(Step.CORRECT)
        elif (step := _STEPS[name]) is not done and step is not Step.FREE:
            if list(Step).index(step) > list(Step).index(done):
                tell(f"{done.label}: done")
            steps.append(step)

    try:
        with RpcEndpoint.model_validate(device.endpoint).open_runner(limits, entered) as runner:
            (outcome,) = runner.measure([probe_input(device.target, check=True)])
            facts = dict(runner.facts)
    except DeviceError as exc:
        raise _failed(device, steps[-1], exc.message, exc.next_command or "tlp doctor") from exc
    if outcome.state is not MeasurementState.OK:
        hint = {
            Step.COMPILED: f"tlp device enroll {device.name} --cc COMPILER --help",
            Step.RUN: f"tlp device enroll {device.name} --target MCPU --help",
        }
        raise _failed(device, steps[-1], f"{outcome.state} {outcome.error}", hint.get(steps[-1], "tlp doctor"))
    if steps[-2:] != [Step.CORRECT, Step.CORRECT]:
        raise _failed(device, Step.CORRECT, "the result could not be compared, see the log", "tlp doctor")
    return outcome, {"tvm_host": version("apache-tvm"), **facts}


@contextmanager
def _step(device: Device, step: Step) -> Iterator[None]:
    """A DeviceError of the body gets the name of the step, if it has none yet."""
    try:
        yield
    except DeviceError as exc:
        if exc.message.startswith("step "):
            raise
        raise _failed(device, step, exc.message, exc.next_command or "tlp doctor") from exc


def _failed(device: Device, step: Step, why: str, next_command: str) -> DeviceError:
    return DeviceError(f"{step.label}, failed for device {device.name!r}: {why}", next_command=next_command)
