"""The contract's tests of flagged measurements, canaries, qualities of rounds and landing files."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from storage import (
    Canary,
    CanaryState,
    MeasurementBatch,
    MeasurementStore,
    RoundQuality,
    RunState,
)
from storage.errors import InvalidInputError
from tests.contract.store.examples import AT, Scene, everything


def canary(number: int, device: str = "cpu0", state: CanaryState = CanaryState.STEADY, **changes: Any) -> Canary:
    """The `number`-th canary of a device, `number` seconds after the first."""
    at = AT + timedelta(seconds=number)
    row = Canary(f"{device}-{number}", device, None, at, state, 1e-3, None, 1e-3, "as it was", {"tvm": "0.25"})
    return replace(row, **changes)


def round_quality(scene: Scene, visit: int = 0, **changes: Any) -> RoundQuality:
    """A round of eight programs."""
    workload_id = scene.workload.workload_id
    row = RoundQuality(
        scene.run_id, scene.device, "7", workload_id, AT, visit, 8, (10, 9, 5), (6.0, 7.5, 5.0), 4, {1: 0.8, 5: 1.0}
    )
    return replace(row, **changes)


class QualityContract:
    """Tests of what tells good measurements and models from bad ones."""

    # -- flagged measurements ---------------------------------------------------------------------------------
    def test_flagged_rows_are_kept_and_left_out_of_training(self, scene: Scene) -> None:
        store = scene.store
        rows = [
            replace(scene.ok("unknown", 0), canary_off=None),
            replace(scene.ok("steady", 1), canary_off=False),
            replace(scene.ok("off", 2), canary_off=True),
            replace(scene.failed("failed", 3), canary_off=True),
            replace(scene.ok("steady again", 4), canary_off=False),
        ]
        assert store.add_measurements(scene.batch(rows, range(5))) == 5
        assert store.measurements()["canary_off"].to_list() == [None, False, True, True, False]
        assert store.samples()["seq"].to_list() == [1, 2, 5]
        assert store.samples(flagged=True)["seq"].to_list() == [1, 2, 3, 5]
        for flagged in (False, True):
            parts = list(store.iter_samples(batch_rows=1, flagged=flagged))
            assert pl.concat(parts).rows() == store.samples(flagged=flagged).rows()
        assert store.sample_languages() == {"cpu0": {"metaschedule": 3}}
        counts = store.device_counts()["cpu0"]
        assert (counts.samples_ok, counts.samples_failed, counts.samples_flagged) == (3, 1, 1)
        assert store.watermark() == 5
        assert len(store.measured_program_ids("cpu0", scene.workload.workload_id)) == 5

    def test_frames_may_leave_the_flag_out_and_carry_it(self, scene: Scene) -> None:
        scene.add(1e-3, 2e-3)
        rows = scene.store.measurements().drop("seq", "workload_id", "sketch_id")
        first = rows.drop("canary_off").with_columns(measurement_id="a-" + pl.col("measurement_id"))
        second = rows.with_columns(measurement_id="b-" + pl.col("measurement_id"), canary_off=pl.lit(True))
        assert scene.store.add_measurement_frames(scene.store.programs(), first) == 2
        assert scene.store.add_measurement_frames(scene.store.programs(), second) == 2
        assert scene.store.measurements()["canary_off"].to_list() == [None] * 4 + [True] * 2

    def test_best_programs_take_flagged_rows_only_where_there_is_nothing_better(self, scene: Scene) -> None:
        store = scene.store
        flagged = [replace(scene.ok(f"f{i}", n, s), canary_off=True) for i, (n, s) in enumerate([(0, 1e-6), (1, 3e-6)])]
        store.add_measurements(scene.batch(flagged, [0, 1]))
        wanted = [scene.workload.workload_id]
        best = store.best_programs("cpu0", wanted, top=9)
        assert best.select("latency_s", "canary_off").rows() == [(1e-6, True), (3e-6, True)]
        steady = [scene.ok("s0", 2, 5e-3), replace(scene.ok("s1", 1, 6e-3), canary_off=False)]
        store.add_measurements(scene.batch(steady, [1, 2]))
        best = store.best_programs("cpu0", wanted, top=9)
        assert best.select("latency_s", "canary_off").rows() == [(5e-3, False), (6e-3, False), (1e-6, True)]

    # -- canaries ---------------------------------------------------------------------------------------------
    def test_canaries_come_back_as_they_were(self, scene: Scene) -> None:
        store = scene.store
        assert store.canaries() == []
        rows = [
            canary(0, state=CanaryState.REFERENCE, dispersion=0.02, reference_s=None, run_id=scene.run_id),
            canary(1, state=CanaryState.OFF, latency_s=None, reason="it did not run"),
        ]
        store.add_canaries(rows)
        store.add_canaries([replace(rows[0], latency_s=9.0)])  # known: left alone
        Scene(store, "other").store.add_canaries([canary(5, "other")])
        assert store.canaries(device="cpu0") == rows[::-1]
        assert [c.canary_id for c in store.canaries(limit=2)] == ["other-5", "cpu0-1"]
        assert store.canaries(device="nowhere") == []

    def test_canaries_come_with_their_batch_or_not_at_all(self, scene: Scene) -> None:
        store, before = scene.store, everything(scene.store)
        good = MeasurementBatch([scene.sketch], [scene.program(0)], [scene.ok("a", 0)], [canary(0)])
        for broken in (
            replace(good, measurements=[replace(scene.ok("a", 0), latency_s=math.nan)]),
            replace(good, canaries=[canary(0), canary(1, "nowhere")]),
            replace(good, canaries=[canary(0, latency_s=-1.0)]),
            replace(good, canaries=[canary(0, latency_s=math.inf)]),
            replace(good, canaries=[canary(0, dispersion=-0.1)]),
            replace(good, canaries=[canary(0, at=AT.replace(tzinfo=None))]),
        ):
            with pytest.raises(InvalidInputError):
                store.add_measurements(broken)
            assert (everything(store), store.canaries()) == (before, [])
        assert store.add_measurements(good) == 1
        assert store.add_measurements(good) == 0
        assert store.canaries() == [canary(0)]

    def test_the_reference_changes_only_when_a_person_says_so(self, scene: Scene) -> None:
        store, reference = scene.store, CanaryState.REFERENCE
        assert store.canary_reference("cpu0") is None
        first = canary(1, state=reference)
        store.add_canaries([canary(0), first, canary(2), canary(3, state=reference)])
        assert store.canary_reference("cpu0") == first
        store.add_canaries([canary(4, state=CanaryState.REBASE, latency_s=None, reference_s=None)])
        assert store.canary_reference("cpu0") is None
        store.add_canaries([canary(3, state=reference, canary_id="late")])  # handed in late: from before
        assert store.canary_reference("cpu0") is None
        second = canary(6, state=reference)
        store.add_canaries([second, canary(7, state=reference)])
        assert store.canary_reference("cpu0") == second

    # -- quality of rounds ------------------------------------------------------------------------------------
    def test_round_qualities_come_back_as_they_were(self, store: MeasurementStore) -> None:
        first, second = Scene(store, "a"), Scene(store, "b")
        rows = [
            round_quality(first),
            round_quality(first, 1, version="8", canary_off=True),
            round_quality(second, 2, pairs=(), pairs_right=(), best_of={}, canary_off=False),
        ]
        store.add_round_qualities([])
        store.add_round_qualities(rows[:2])
        store.add_round_qualities(rows[2:])
        assert store.round_qualities() == rows
        assert store.round_qualities(device="a", version="8") == rows[1:2]
        assert store.round_qualities(run_id=second.run_id) == rows[2:]

    def test_shadows_are_kept_apart_and_come_with_their_round(self, store: MeasurementStore) -> None:
        scene = Scene(store)
        live, shadow = round_quality(scene), round_quality(scene, version="6")
        store.add_round_qualities([live], [shadow])
        assert (store.round_qualities(), store.round_qualities(shadow=True)) == ([live], [shadow])
        assert store.round_qualities(version="7", shadow=True) == []
        with pytest.raises(InvalidInputError):
            store.add_round_qualities([live], [replace(shadow, ties=-1)])
        assert len(store.round_qualities()) == 1, "both or none"

    @pytest.mark.parametrize(
        "change",
        [
            {"pairs_right": (11.0, 0.0, 0.0)},
            {"pairs_right": (1.0,)},
            {"pairs": (-1, 0, 0), "pairs_right": (0.0, 0.0, 0.0)},
            {"ties": -1},
            {"best_of": {1: 1.5}},
            {"best_of": {1: math.nan}},
            {"pairs_right": (math.nan, 0.0, 0.0)},
        ],
    )
    def test_counts_that_cannot_be_are_refused(self, scene: Scene, change: dict[str, Any]) -> None:
        with pytest.raises(InvalidInputError, match="cannot be"):
            scene.store.add_round_qualities([round_quality(scene), round_quality(scene, **change)])
        assert scene.store.round_qualities() == []

    # -- landing files ----------------------------------------------------------------------------------------
    def test_landed_rows_may_be_of_a_finished_run_and_their_files_are_noted_with_them(self, scene: Scene) -> None:
        store = scene.store
        store.add_measurements(scene.batch([scene.ok("early", 0)], [0]))
        rows = store.measurements().drop("seq", "workload_id", "sketch_id")
        late, programs = rows.with_columns(measurement_id=pl.lit("late")), store.programs()
        store.finish_run(scene.run_id, RunState.DONE, "done")
        with pytest.raises(InvalidInputError, match="finished"):
            store.add_measurement_frames(programs, late)
        broken = late.with_columns(device=pl.lit("nowhere"))
        with pytest.raises(InvalidInputError, match="nowhere"):
            store.add_measurement_frames(programs, broken, landed=["file-1"])
        assert store.landed_files(["file-1"]) == set()
        assert store.add_measurement_frames(programs, late, landed=["file-1"], canaries=[canary(0)]) == 1
        assert store.add_measurement_frames(programs, late, landed=["file-1", "file-2"], canaries=[canary(0)]) == 0
        assert store.landed_files(["file-1", "file-2", "file-3"]) == {"file-1", "file-2"}
        assert store.samples()["measurement_id"].to_list() == ["early", "late"]
        assert store.canaries() == [canary(0)]
