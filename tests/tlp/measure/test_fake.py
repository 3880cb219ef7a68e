from __future__ import annotations

from storage import MeasurementState
from tlp.measure import MeasureInput
from tlp.measure.fake import FakeRunner


def inputs(n: int, target: str = "a") -> list[MeasureInput]:
    return [MeasureInput(f"p{i}", "{}", {"kind": "llvm", "mcpu": target}, ()) for i in range(n)]


def test_same_seed_same_outcomes_whatever_the_order() -> None:
    forward = {o.key: o for o in FakeRunner(3).measure(inputs(20))}
    backward = {o.key: o for o in FakeRunner(3).measure(reversed(inputs(20)))}
    assert forward == backward
    assert forward != {o.key: o for o in FakeRunner(4).measure(inputs(20))}
    assert forward != {o.key: o for o in FakeRunner(3).measure(inputs(20, "b"))}


def test_faults_and_latencies_as_asked_for() -> None:
    runner = FakeRunner(fail_every=3, hang_on={"p0"}, latency=lambda job: 0.5, repeat=2)
    outcomes = list(runner.measure(inputs(6)))
    assert [o.state for o in outcomes] == [
        MeasurementState.TIMEOUT,
        MeasurementState.OK,
        MeasurementState.RUN_ERROR,
        MeasurementState.OK,
        MeasurementState.OK,
        MeasurementState.RUN_ERROR,
    ]
    assert len(outcomes[1].run_secs) == 2
    assert all(abs(s - 0.5) < 0.01 for s in outcomes[1].run_secs)
