"""What every backend does with rows: checks of values, JSON text, time zones."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from storage.errors import ErrorCode, InvalidInputError, NotFoundError
from storage.names import validate_name
from storage.rows import Canary, Device, Network, RoundQuality, TuningResult, canonical_json
from storage.states import ReasonCode, RunState

_Row = TypeVar("_Row")
_FAMILY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # becomes a part of a model's name and of a file's
_UNKNOWN = {
    "device": (ErrorCode.DEVICE_UNKNOWN, ErrorCode.NO_DEVICES),
    "network": (ErrorCode.NETWORK_UNKNOWN, ErrorCode.NO_NETWORKS),
}


def not_found(what: str, name: str, existing: Iterable[str]) -> NotFoundError:
    """The error for an unknown device or network, with the names there are, the nearest first."""
    names, (unknown, none) = sorted(existing), _UNKNOWN[what]
    if not names:
        return NotFoundError(f"no {what} {name!r}: there is none yet", code=none)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    ordered = near + [n for n in names if n not in near]
    shown = ", ".join(ordered[:20]) + (f" and {len(ordered) - 20} more" if len(ordered) > 20 else "")
    return NotFoundError(f"no {what} {name!r}; there are: {shown}", code=unknown)


def json_text(what: str, value: Mapping[str, Any]) -> str:
    """Canonical JSON. Raises InvalidInputError for what JSON cannot hold (NaN included) and for what is no object."""
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{what} is not a JSON object: {value!r:.40}")
    try:
        return canonical_json(value)
    except (TypeError, ValueError) as exc:
        raise InvalidInputError(f"{what} cannot be written as JSON: {exc}") from exc


def json_value(text: str) -> dict[str, Any]:
    """A mapping from stored JSON text."""
    value: dict[str, Any] = json.loads(text)
    return value


def json_copy(what: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as it comes back from a store. Raises InvalidInputError as `json_text`."""
    return json_value(json_text(what, value))


def to_naive_utc(at: datetime) -> datetime:
    """UTC without time zone, as stored. Raises InvalidInputError for a datetime without time zone."""
    if at.tzinfo is None:
        raise InvalidInputError(f"the time {at.isoformat()} has no time zone")
    return at.astimezone(UTC).replace(tzinfo=None)


def to_utc(at: datetime) -> datetime:
    """A stored time as an aware one."""
    return at.replace(tzinfo=UTC)


def now_utc() -> datetime:
    """Now, aware."""
    return datetime.now(UTC)


def checked_device(device: Device) -> Device:
    """The device as any store returns it: JSON values copied, time in UTC. Raises InvalidInputError."""
    validate_name("device", device.name)
    if device.min_samples < 1:
        raise InvalidInputError(f"device {device.name} has min_samples {device.min_samples}; at least 1")
    if not _FAMILY.fullmatch(device.family):
        raise InvalidInputError(f"device {device.name} has no ISA family, {device.family!r} is none")
    return replace(
        device,
        enrolled_at=to_utc(to_naive_utc(device.enrolled_at)),
        target=json_copy(f"target of device {device.name}", device.target),
        facts=json_copy(f"facts of device {device.name}", device.facts),
        endpoint=json_copy(f"endpoint of device {device.name}", device.endpoint),
    )


def checked_network(network: Network) -> Network:
    """The network as any store returns it. Raises InvalidInputError: name, weights, a workload twice."""
    validate_name("network", network.name)
    if not network.tasks:
        raise InvalidInputError(f"network {network.name} has no tasks")
    seen: set[str] = set()
    for task in network.tasks:
        if task.weight < 1:
            raise InvalidInputError(f"task {task.task} of network {network.name} has weight {task.weight}; at least 1")
        if task.workload_id in seen:
            raise InvalidInputError(f"network {network.name} has the workload {task.workload_id} in two tasks")
        seen.add(task.workload_id)
    return replace(network, tasks=tuple(network.tasks), added_at=to_utc(to_naive_utc(network.added_at)))


def outcome_code(run_id: str, state: RunState) -> ReasonCode:
    """The code of a run that ended in `state` without saying more. Raises InvalidInputError if none ends so."""
    if not state.is_finished():
        raise InvalidInputError(f"run {run_id} cannot be finished as {state}")
    return ReasonCode.NOTHING_TO_DO if state is RunState.SKIPPED else ReasonCode(state.lower())


def checked_tuning_result(result: TuningResult) -> TuningResult:
    """The result as any store returns it. Raises InvalidInputError: a program without latency or the reverse."""
    program, latency_s = result.best_program_id, result.best_latency_s
    if (program is None) != (latency_s is None):
        raise InvalidInputError(f"a tuning result has the program {program} but the latency {latency_s} s")
    if latency_s is not None and not 0 < latency_s < float("inf"):
        raise InvalidInputError(f"a tuning result has the latency {latency_s} s")
    if result.trials < 0 or result.failed < 0:
        raise InvalidInputError(f"a tuning result has {result.trials} trials, {result.failed} failed")
    return in_utc(result)


def in_utc(row: _Row) -> _Row:
    """The row with its `at` in UTC. Raises InvalidInputError for a time without zone."""
    return replace(row, at=to_utc(to_naive_utc(row.at)))  # type: ignore[attr-defined, type-var]


def checked_canary(canary: Canary) -> Canary:
    """The canary as any store returns it. Raises InvalidInputError for numbers that cannot be."""
    for what, value, least in (
        ("latency", canary.latency_s, None),
        ("reference", canary.reference_s, None),
        ("dispersion", canary.dispersion, 0.0),
    ):
        if value is not None and not (math.isfinite(value) and (value > 0 or value == least)):
            raise InvalidInputError(f"a canary of device {canary.device} has the {what} {value}")
    facts = json_copy(f"facts of a canary of device {canary.device}", canary.facts)
    return replace(canary, at=to_utc(to_naive_utc(canary.at)), facts=facts)


def checked_round(quality: RoundQuality) -> RoundQuality:
    """The quality as any store returns it. Raises InvalidInputError for counts that cannot be."""
    counts = (quality.visit, quality.programs, quality.ties, *quality.pairs)
    right = zip(quality.pairs_right, quality.pairs, strict=False)
    if (
        min(counts) < 0
        or len(quality.pairs) != len(quality.pairs_right)
        or not all(0 <= got <= of for got, of in right)
        or not all(0 < ratio <= 1 for ratio in quality.best_of.values())
    ):
        raise InvalidInputError(f"the quality of a round on {quality.device} has counts that cannot be: {quality}")
    return replace(
        quality,
        at=to_utc(to_naive_utc(quality.at)),
        pairs=tuple(quality.pairs),
        pairs_right=tuple(map(float, quality.pairs_right)),
        best_of=dict(quality.best_of),
    )


def first_by(rows: Iterable[_Row], key: str) -> dict[str, _Row]:
    """Rows under their key, the first of equal ones, in order."""
    first: dict[str, _Row] = {}
    for row in rows:
        first.setdefault(getattr(row, key), row)
    return first
