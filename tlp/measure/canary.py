"""The canary: a fixed kernel measured before each batch, so that a drifting machine is not taken for a drifting model.

The first time, the kernel is measured `REFERENCE_RUNS` times on the device: the median is its **reference**, the robust
standard deviation between them its dispersion; a machine too restless for one (`canary_max_dispersion`) gets none yet,
and nothing is known of what it measures. Every later canary is compared with that: **off** is further away than
`canary_tolerance` + `canary_dispersions` · dispersion, in either direction. What is off once is measured
`CONFIRM_RUNS` times more, and the median of all decides: one hiccup is no drift.

Batches measured while it is off are kept and flagged (`Measurement.canary_off`). The reference is never moved by the
program: `tlp device resume NAME --rebase-canary` is how a person says that the machine is meant to be as it is now.
"""

from __future__ import annotations

import logging
import math
import statistics
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from typing import Any, Final

from storage import Canary, CanaryState, Device, MeasurementState, MeasurementStore
from tlp.core.fleet import Fleet
from tlp.core.settings import Settings
from tlp.measure.contract import MeasureInput, MeasureOutcome, Runner
from tlp.measure.worker import dispersion, kept

log = logging.getLogger(__name__)

CANARY_KEY: Final = "canary"
KERNEL: Final = "matmul-256-1"  # raise the last number when `canary_input` changes: latencies of two cannot be compared
REFERENCE_RUNS: Final = 5
CONFIRM_RUNS: Final = 2
REFERENCE_TRIES: Final = 3  # per run
RECENT: Final = 100  # canaries `summary` and `noise_floor` look at
NEWEST_MEASUREMENTS: Final = 200  # measurements `noise_floor` looks at
MEASURABLE_KINDS: Final = ("llvm", "c")
_SIZE: Final = 256


def canary_input(target: Mapping[str, Any]) -> MeasureInput:
    """The kernel for a CPU target: float32 C = A · B of 256 x 256, rows over all threads, columns vectorised.

    It uses every core the device's programs use, so that a neighbour on any of them shows.
    """
    args = tuple(("float32", (_SIZE, _SIZE)) for _ in range(3))
    return MeasureInput(CANARY_KEY, _module_json(), dict(target), args)


@lru_cache(maxsize=1)
def _module_json() -> str:
    import tvm
    from tvm import te

    shape = (_SIZE, _SIZE)
    a, b = te.placeholder(shape, "float32", "A"), te.placeholder(shape, "float32", "B")
    axis = te.reduce_axis((0, _SIZE), "k")
    c = te.compute(shape, lambda i, j: te.sum(a[i, axis] * b[axis, j], axis=axis), "C")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b, c]).with_attr("global_symbol", "main"))
    block = schedule.get_sblock("C")
    row, column, inner = schedule.get_loops(block)
    outer, lanes = schedule.split(column, [None, 16])
    schedule.reorder(row, outer, inner, lanes)
    schedule.parallel(row)
    schedule.vectorize(lanes)
    return str(tvm.ir.save_json(schedule.mod))


def tolerance(settings: Settings, dispersion: float | None) -> float:
    """How far, relative to its reference, a canary may be away: 0.16 for ±16%."""
    return settings.canary_tolerance + settings.canary_dispersions * (dispersion or 0.0)


def rebase(store: MeasurementStore, device: str, reason: str) -> None:
    """Let the device's next canary be the reference. Raises NotFoundError."""
    store.get_device(device)
    now = datetime.now(UTC)
    store.add_canaries([Canary(uuid.uuid4().hex, device, None, now, CanaryState.REBASE, None, None, None, reason)])


def summary(store: MeasurementStore, device: str) -> dict[str, Any] | None:
    """The newest canary of a device for `tlp status`, and `checks` and `off` of the last `RECENT`; None: none yet."""
    recent = store.canaries(device=device, limit=RECENT)
    if not recent:
        return None
    newest = recent[0]
    in_a_row = next((i for i, row in enumerate(recent) if row.state is not CanaryState.OFF), len(recent))
    measured = [row for row in recent if row.state is not CanaryState.REBASE]
    return {
        "state": newest.state.value,
        "at": newest.at,
        "latency_s": newest.latency_s,
        "reference_s": newest.latency_s if newest.state is CanaryState.REFERENCE else newest.reference_s,
        "reason": newest.reason,
        "off_in_a_row": in_a_row,
        "checks": len(measured),
        "off": sum(row.state is CanaryState.OFF for row in measured),
    }


def noise_floor(store: MeasurementStore, device: str) -> dict[str, Any] | None:
    """What measuring a program again differs by, for `tlp device show`; None without repeats and canaries.

    Keys (relative robust standard deviations, `worker.dispersion`; None where nothing tells):
        dispersion, outliers: within a measurement, the median over the newest `measurements` OK ones of at least two
            repeats; and the part of their repeats that was left out.
        canary_dispersion: between the measurements that made the canary's reference: seconds apart.
        canary_recent_dispersion: between the newest `canaries` since that reference: minutes to days apart.
    """
    rows = store.measurements(device=device, states=[MeasurementState.OK], newest=NEWEST_MEASUREMENTS)
    repeats = [run_secs for run_secs in rows["run_secs"].to_list() if len(run_secs) > 1]
    stay = [kept(run_secs) for run_secs in repeats]
    total = sum(map(len, repeats))
    reference = store.canary_reference(device)
    canaries = store.canaries(device=device, limit=RECENT) if reference is not None else []
    since = next((i for i, row in enumerate(canaries) if row.state is CanaryState.REFERENCE), len(canaries))
    seconds = [row.latency_s for row in canaries[: since + 1] if row.latency_s is not None]
    if not repeats and reference is None:
        return None
    return {
        "dispersion": statistics.median(map(dispersion, stay)) if stay else None,
        "measurements": len(repeats),
        "outliers": 1.0 - sum(map(len, stay)) / total if total else None,
        "canary_dispersion": reference.dispersion if reference is not None else None,
        "canary_recent_dispersion": dispersion(seconds) if len(seconds) > 1 else None,
        "canaries": len(seconds),
    }


class CanaryWatch:
    """Measures a device's canary and says what it means; used by one run, between its batches.

    The caller stores the canaries: it hands `take()` in with the next batch. For a target that is no CPU's, and with
    `settings.canary` off, `check` finds nothing. `runner` must not be measuring meanwhile.
    """

    def __init__(self, fleet: Fleet, device: Device, run_id: str, runner: Runner) -> None:
        self._device, self._run_id, self._runner, self._settings = device, run_id, runner, fleet.settings
        self._enabled = fleet.settings.canary and device.target.get("kind") in MEASURABLE_KINDS
        self._reference = fleet.store.canary_reference(device.name) if self._enabled else None
        self._pending: list[Canary] = []
        self._failures = 0
        self.off: bool | None = None
        self.checks = self.off_checks = 0

    def check(self) -> bool | None:
        """Measure the canary now: whether it is off; None if nothing is known. DeviceError as of `Runner.measure`.

        The answer stays in `off` until the next check.
        """
        if not self._enabled or (self._reference is None and self._failures >= REFERENCE_TRIES):
            return None
        row = self._compare() if self._reference is not None else self._first()
        self._pending.append(row)
        if row.state is CanaryState.REFERENCE:
            self._reference = row
        self._failures += row.state is CanaryState.FAILED
        self.off = None if row.state is CanaryState.FAILED else row.state is CanaryState.OFF
        self.checks += 1
        if self.off:
            self.off_checks += 1
            if self.off_checks == 1:
                log.warning("device %s: %s; what is measured now is flagged", self._device.name, row.reason)
        return self.off

    def take(self) -> list[Canary]:
        """Canaries since the last call, for the batch they belong to."""
        taken, self._pending = self._pending, []
        return taken

    def give_back(self, canaries: Sequence[Canary]) -> None:
        """Return what `take` gave when its batch could not be stored."""
        self._pending = [*canaries, *self._pending]

    def _measure(self, count: int) -> Iterator[MeasureOutcome]:
        job = canary_input(self._device.target)
        for _ in range(count):  # one by one: nothing else may run on the device meanwhile
            yield from self._runner.measure([job])

    def _first(self) -> Canary:
        outcomes = list(self._measure(REFERENCE_RUNS))
        seconds = _latencies(outcomes)
        if not seconds:
            reason = f"the canary does not run here: {outcomes[-1].state}: {outcomes[-1].error}"
            return self._row(CanaryState.FAILED, None, None, None, reason)
        latency_s, spread, limit = statistics.median(seconds), dispersion(seconds), self._settings.canary_max_dispersion
        numbers = f"{_ms(latency_s)}, dispersion {spread:.1%} of {len(seconds)} measurements"
        if spread > limit:
            reason = f"too restless for a reference: {numbers}, at most {limit:.0%} is allowed"
            return self._row(CanaryState.FAILED, latency_s, spread, None, reason)
        reason = f"reference {numbers}: ±{tolerance(self._settings, spread):.0%} of that is steady"
        return self._row(CanaryState.REFERENCE, latency_s, spread, None, reason)

    def _compare(self) -> Canary:
        assert self._reference is not None
        reference_s = self._reference.latency_s
        assert reference_s is not None  # a REFERENCE has one
        allowed = tolerance(self._settings, self._reference.dispersion)

        def off(latency_s: float) -> bool:
            return abs(latency_s / reference_s - 1.0) > allowed

        outcomes = list(self._measure(1))
        seconds = _latencies(outcomes)
        if not seconds or off(seconds[0]):
            outcomes += self._measure(CONFIRM_RUNS)
            seconds = _latencies(outcomes)
        if not seconds:
            reason = f"the canary did not run: {outcomes[-1].state}: {outcomes[-1].error}; {self._explanation()}"
            return self._row(CanaryState.OFF, None, None, reference_s, reason)
        latency_s = statistics.median(seconds)
        change = f"{latency_s / reference_s - 1.0:+.0%}, allowed ±{allowed:.0%}"
        numbers = f"{_ms(latency_s)} against the reference of {_ms(reference_s)} ({change})"
        if off(latency_s):
            reason = f"the canary is off, {numbers}: {self._explanation()}"
            return self._row(CanaryState.OFF, latency_s, None, reference_s, reason)
        return self._row(CanaryState.STEADY, latency_s, None, reference_s, numbers)

    def _explanation(self) -> str:
        """What the facts of the reference say about a difference."""
        assert self._reference is not None
        before, now = self._reference.facts, _facts(self._device, self._settings)
        both = sorted(now.keys() & before.keys())
        changed = [f"{key} {before[key]} → {now[key]}" for key in both if before[key] != now[key]]
        if changed:
            return f"not the machine but what measures it changed: {', '.join(changed)}"
        return f"TVM ({now['tvm']}) and target are the same, so it is the machine (clock, heat, a neighbour)"

    def _row(
        self, state: CanaryState, latency_s: float | None, spread: float | None, reference_s: float | None, reason: str
    ) -> Canary:
        where = (uuid.uuid4().hex, self._device.name, self._run_id, datetime.now(UTC))
        facts = _facts(self._device, self._settings)
        return Canary(*where, state, latency_s, spread, reference_s, reason, facts)


def _latencies(outcomes: Sequence[MeasureOutcome]) -> list[float]:
    return [outcome.latency_s for outcome in outcomes if outcome.latency_s is not None]


def _facts(device: Device, settings: Settings) -> dict[str, Any]:
    return {
        "kernel": KERNEL,
        "tvm": metadata.version("apache-tvm"),
        "target": dict(device.target),
        "number": settings.measure_number,
        "repeat": settings.measure_repeat,
        "warmup": settings.measure_warmup,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if math.isfinite(seconds) else f"{seconds} s"
