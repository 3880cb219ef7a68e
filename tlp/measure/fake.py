"""A runner without hardware: deterministic, for tests and for rehearsals of the loop."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Container, Iterator

from storage import MeasurementState
from tlp.core.errors import DeviceLostError
from tlp.measure.canary import CANARY_KEY
from tlp.measure.contract import GuardedRunner, MeasureInput, MeasureOutcome
from tlp.measure.worker import Timing, time_program


class FakeRunner(GuardedRunner):
    """Keeps the contract of `Runner` without building or running anything; outcomes come in the order of the inputs.

    Args:
        seed: another seed, other latencies.
        fail_every: every n-th input of a `measure` call is a RUN_ERROR; 0: none.
        fail_on, hang_on: keys whose outcome is a RUN_ERROR, or a TIMEOUT (nothing waits).
        latency: seconds of an input; default: between 10 µs and 10 ms, fixed by seed, key and target.
        repeat, extra_repeats, max_dispersion: as of `tlp.measure.worker.Timing`.
        spread: width of the repeats around the latency, relative; the same for the same input, whatever it is.
        lost: asked before every program whether the device is gone now; then DeviceLostError is raised.
        slowdown: how many programs were measured before (canaries not counted) → factor on the latency, of canaries,
            too: a machine that drifts.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        fail_every: int = 0,
        fail_on: Container[str] = frozenset(),
        hang_on: Container[str] = frozenset(),
        latency: Callable[[MeasureInput], float] | None = None,
        repeat: int = 3,
        extra_repeats: int = 0,
        max_dispersion: float = 0.1,
        spread: float = 0.01,
        slowdown: Callable[[int], float] | None = None,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._seed, self._spread, self._lost = seed, spread, lost
        self._fail_every, self._fail_on, self._hang_on = fail_every, fail_on, hang_on
        self._latency = latency or (lambda job: 10.0 ** (3.0 * self._unit(job, "latency") - 5.0))
        self._timing = Timing(repeat=repeat, extra_repeats=extra_repeats, max_dispersion=max_dispersion)
        self._slowdown = slowdown or (lambda _programs: 1.0)
        self._programs = 0

    def _measure(self, inputs: Iterator[MeasureInput]) -> Iterator[MeasureOutcome]:
        for number, job in enumerate(inputs, start=1):
            if self._lost():
                raise DeviceLostError("the device does not answer (fake)", next_command="tlp doctor")
            outcome = self._outcome(number, job)
            self._programs += job.key != CANARY_KEY
            yield outcome

    def _outcome(self, number: int, job: MeasureInput) -> MeasureOutcome:
        if job.key in self._hang_on:
            return MeasureOutcome(job.key, MeasurementState.TIMEOUT, (), "run took longer than 10 s (fake)", 0.0, 10.0)
        if job.key in self._fail_on or (self._fail_every and number % self._fail_every == 0):
            return MeasureOutcome(job.key, MeasurementState.RUN_ERROR, (), "failed on purpose (fake)", 0.0, 0.0)
        latency_s = self._latency(job) * self._slowdown(self._programs)
        places = itertools.count()

        def evaluate(repeat: int) -> list[float]:
            units = [self._unit(job, f"repeat {next(places)}") for _ in range(repeat)]
            return [latency_s * (1.0 + self._spread * (unit - 0.5)) for unit in units]

        run_secs = tuple(time_program(lambda: None, evaluate, self._timing, 0.0, clock=lambda: 0.0))
        return MeasureOutcome(job.key, MeasurementState.OK, run_secs, None, 0.0, math.fsum(run_secs))

    def _unit(self, job: MeasureInput, purpose: str) -> float:
        """A number in [0, 1) that depends on the seed, the input and the purpose."""
        text = f"{self._seed}\0{job.key}\0{sorted(job.target.items(), key=lambda kv: kv[0])}\0{purpose}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
