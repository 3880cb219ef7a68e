"""Contract of programs and measurements."""

from __future__ import annotations

import math
import threading
import uuid
from dataclasses import replace
from datetime import datetime
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from storage import (
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Program,
    Sketch,
)
from storage.errors import InvalidInputError, TlpError
from tests.contract.store.examples import (
    AT,
    Scene,
    everything,
    example_sketch,
    example_workload,
    ok,
)

# Every example goes on with the store of the test, under new ids: making one on disk takes a tenth of a second. Each
# backend runs the same inherited test, and nothing is replayed between them.
_property = hypothesis_settings(
    max_examples=8,
    deadline=None,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
        HealthCheck.too_slow,
    ],
)

_BROKEN: dict[str, dict[str, Any]] = {
    "sentinel": {"latency_s": 1e10},
    "latency NaN": {"latency_s": math.nan},
    "latency infinite": {"latency_s": math.inf},
    "latency zero": {"latency_s": 0.0},
    "latency negative": {"latency_s": -1e-3},
    "no latency": {"latency_s": None},
    "no repeats": {"run_secs": ()},
    "repeat NaN": {"run_secs": (1e-3, math.nan)},
    "repeat infinite": {"run_secs": (1e-3, math.inf)},
    "repeat negative": {"run_secs": (1e-3, -1e-3)},
    "milliseconds": {"run_secs": (1.0, 1.1)},
    "OK with error": {"error": "but it failed"},
    "error with latency": {"state": MeasurementState.TIMEOUT, "error": "slow"},
    "error with repeats": {"state": MeasurementState.RUN_ERROR, "error": "crash", "latency_s": None},
    "error without reason": {"state": MeasurementState.BUILD_ERROR, "run_secs": (), "latency_s": None},
    "error with blank reason": {
        "state": MeasurementState.BUILD_ERROR,
        "run_secs": (),
        "latency_s": None,
        "error": "",
    },
    "no such state": {"state": "FINE"},
    "time without zone": {"at": datetime(2026, 1, 1)},
    "unknown device": {"device": "nowhere"},
    "unknown run": {"run_id": "0" * 32},
    "unknown program": {"program_id": "f" * 32},
}


class SampleContract:
    """Tests of programs and measurements."""

    # -- measurements -----------------------------------------------------------------------------------------
    def test_empty_store(self, store: MeasurementStore) -> None:
        assert store.watermark() == 0
        assert store.add_measurements(MeasurementBatch([], [], [])) == 0
        assert store.samples().height == store.measurements().height == store.programs().height == 0
        assert list(store.iter_samples()) == []
        assert store.measured_program_ids("cpu0", "w") == set()
        assert store.best_programs("cpu0", ["w"]).height == 0

    def test_samples_columns_and_values(self, scene: Scene) -> None:
        scene.store.add_measurements(
            scene.batch([scene.ok("a", 0, 2e-3), scene.failed("b", 1), scene.ok("c", 1, 1e-3)], [0, 1])
        )
        frame = scene.store.samples()
        assert dict(frame.schema) == {
            "seq": pl.Int64(),
            "measurement_id": pl.String(),
            "device": pl.String(),
            "workload_id": pl.String(),
            "sketch_id": pl.String(),
            "program_id": pl.String(),
            "decisions": pl.List(pl.Int32()),
            "latency_s": pl.Float64(),
            "at": pl.Datetime("us", "UTC"),
        }
        workload_id, sketch_id = scene.workload.workload_id, scene.sketch.sketch_id
        assert frame.rows() == [
            (1, "a", "cpu0", workload_id, sketch_id, scene.program(0).program_id, [0, 1], 2e-3, AT),
            (3, "c", "cpu0", workload_id, sketch_id, scene.program(1).program_id, [1, 1], 1e-3, AT),
        ]
        assert scene.store.watermark() == 3

    def test_measurements_include_failures(self, scene: Scene) -> None:
        scene.add(1e-3, None)
        frame = scene.store.measurements()
        assert set(frame.columns) == (set(scene.store.samples().columns) - {"decisions"}) | {
            "run_id",
            "state",
            "error",
            "run_secs",
            "canary_off",
        }
        assert frame["state"].to_list() == ["OK", "TIMEOUT"]
        assert frame["error"].to_list() == [None, "longer than 10 s"]
        assert frame["run_secs"].to_list() == [list(scene.ok("", 0).run_secs), []]
        assert frame["latency_s"].to_list() == [1e-3, None]
        assert scene.store.measurements(device="other").height == 0
        assert scene.store.measurements(run_id=scene.run_id).height == 2
        assert scene.store.measurements(states=[MeasurementState.TIMEOUT])["seq"].to_list() == [2]
        assert scene.store.measurements(newest=1)["seq"].to_list() == [2]
        assert scene.store.measurements(newest=9)["seq"].to_list() == [1, 2]
        assert scene.store.measurements(states=[MeasurementState.OK], newest=1)["seq"].to_list() == [1]

    def test_samples_filters(self, store: MeasurementStore) -> None:
        first, second = Scene(store, "a", 1), Scene(store, "b", 2)
        first.add(1e-3, 2e-3)
        second.add(3e-3)
        assert store.samples(devices=["b"])["seq"].to_list() == [3]
        assert store.samples(devices=[]).height == 0
        assert store.samples(devices=["a", "b"], after=1)["seq"].to_list() == [2, 3]
        assert store.samples(watermark=2)["seq"].to_list() == [1, 2]
        assert store.samples(workload_ids=[second.workload.workload_id])["seq"].to_list() == [3]
        assert store.programs(devices=["b"])["workload_id"].to_list() == [second.workload.workload_id]
        assert store.programs().height == 3
        assert store.programs(devices=[]).height == 0

    def test_iter_samples_is_samples_in_parts(self, store: MeasurementStore) -> None:
        first, second = Scene(store, "a", 1), Scene(store, "b", 2)
        first.add(*[1e-3] * 5)
        second.add(None, 1e-3, None)
        first.add(None, *[1e-3] * 4)
        for devices in (None, ["a"], ["b"]):
            for rows in (1, 4, 100):
                parts = list(store.iter_samples(devices=devices, after=1, batch_rows=rows))
                assert all(1 <= part.height <= rows for part in parts)
                assert pl.concat(parts).rows() == store.samples(devices=devices, after=1).rows()
        rest = store.iter_samples(batch_rows=3)
        next(rest)
        second.add(1e-3)
        assert sum(part.height for part in rest) == 10 - 3, "what is added meanwhile is not part of it"
        with pytest.raises(InvalidInputError):
            store.iter_samples(batch_rows=0)

    def test_languages_of_samples(self, store: MeasurementStore) -> None:
        assert store.sample_languages() == {}
        Scene(store, "unused")
        scene = Scene(store, "used")
        scene.add(1e-3, None, 2e-3)
        mark = store.watermark()
        other = Sketch.make(scene.workload.workload_id, "ansor", "[]", 0)
        program = Program.make(other, [])
        store.add_measurements(MeasurementBatch([other], [program], [ok("foreign", program, "used", scene.run_id)]))
        assert store.sample_languages() == {"unused": {}, "used": {"ansor": 1, "metaschedule": 2}}
        assert store.sample_languages(watermark=mark) == {"unused": {}, "used": {"metaschedule": 2}}

    def test_batch_twice_is_stored_once(self, scene: Scene) -> None:
        batch = scene.batch([scene.ok("a", 0), scene.failed("b", 1)], [0, 1])
        assert scene.store.add_measurements(batch) == 2
        before = everything(scene.store)
        assert scene.store.add_measurements(batch) == 0
        assert everything(scene.store) == before
        grown = scene.batch([scene.ok("a", 0, 5.0), scene.ok("c", 2), scene.ok("c", 2)], [2])
        assert scene.store.add_measurements(grown) == 1
        assert scene.store.samples()["measurement_id"].to_list() == ["a", "c"]
        assert scene.store.samples()["latency_s"].to_list() == [1e-3, 1e-3]

    def test_known_programs_need_not_be_handed_in(self, scene: Scene) -> None:
        scene.store.add_measurements(scene.batch([], [0]))
        assert scene.store.add_measurements(MeasurementBatch([], [], [scene.ok("a", 0)])) == 1

    def test_broken_measurement_is_refused_and_nothing_of_the_batch_stored(self, scene: Scene) -> None:
        scene.add(1e-3)
        before = everything(scene.store)
        for kind, change in _BROKEN.items():
            rows = [scene.ok("good", 7), replace(scene.ok("bad", 8), **change), scene.ok("good too", 9)]
            try:
                scene.store.add_measurements(scene.batch(rows, [7, 8, 9]))
            except InvalidInputError:
                continue
            pytest.fail(f"{kind} was accepted")
        assert everything(scene.store) == before

    def test_broken_program_is_refused_and_nothing_of_the_batch_stored(self, scene: Scene) -> None:
        before = everything(scene.store)
        good, stranger = scene.program(0), example_sketch(example_workload(77))
        wide, elsewhere = Program.make(scene.sketch, (1, 2, 3)), replace(good, workload_id="elsewhere")
        lost = Program.make(example_sketch(scene.workload, 5), (1, 2, 3, 4, 5))
        huge = Program.make(scene.sketch, (2**40, 1))
        for sketches, program, reason in (
            ([scene.sketch], wide, "3 decisions"),
            ([scene.sketch], elsewhere, "different workloads"),
            ([scene.sketch], lost, "unknown sketch"),
            ([scene.sketch], huge, "wrong type"),
            ([scene.sketch, stranger], good, "workload"),
        ):
            rows = [replace(scene.ok("m", 0), program_id=program.program_id)]
            with pytest.raises(InvalidInputError, match=reason):
                scene.store.add_measurements(MeasurementBatch(sketches, [program], rows))
            assert everything(scene.store) == before

    def test_frames_follow_the_same_rules(self, scene: Scene) -> None:
        scene.add(1e-3, None)
        rows = scene.store.measurements().drop("seq", "workload_id", "sketch_id")
        programs = scene.store.programs()
        assert scene.store.add_measurement_frames(programs, rows) == 0
        renamed = rows.with_columns(measurement_id="again-" + pl.col("measurement_id"))
        assert scene.store.add_measurement_frames(programs, renamed) == 2
        with pytest.raises(InvalidInputError, match="latency_s"):
            scene.store.add_measurement_frames(programs, rows.drop("latency_s"))
        with pytest.raises(InvalidInputError, match="10000000000"):
            scene.store.add_measurement_frames(programs, renamed.with_columns(latency_s=pl.lit(1e10)))
        assert scene.store.watermark() == 4

    def test_measured_programs_and_best(self, store: MeasurementStore) -> None:
        mine, other = Scene(store, "a", 1), Scene(store, "b", 1)
        second = Scene(store, "a", 2)
        # Program 0 is fast once by chance; its median is what counts.
        mine.store.add_measurements(
            mine.batch(
                [mine.ok(f"m{i}", n, s) for i, (n, s) in enumerate([(0, 1e-6), (0, 5e-3), (0, 6e-3), (1, 2e-3)])]
                + [mine.failed("f", 2)],
                [0, 1, 2],
            )
        )
        other.store.add_measurements(other.batch([other.ok("o", 3, 1e-9)], [3]))
        second.add(7e-3)
        first_id, second_id = mine.workload.workload_id, second.workload.workload_id
        assert store.measured_program_ids("a", first_id) == {mine.program(n).program_id for n in (0, 1, 2)}
        assert store.measured_program_ids("b", second_id) == set()
        best = store.best_programs("a", [second_id, first_id, "unknown"], top=2)
        assert best.columns == ["workload_id", "program_id", "sketch_id", "decisions", "latency_s", "canary_off"]
        assert best.rows() == [
            (second_id, second.program(0).program_id, second.sketch.sketch_id, [0, 1], 7e-3, False),
            (first_id, mine.program(1).program_id, mine.sketch.sketch_id, [1, 1], 2e-3, False),
            (first_id, mine.program(0).program_id, mine.sketch.sketch_id, [0, 1], 5e-3, False),
        ]
        assert store.best_programs("a", [first_id])["decisions"].to_list() == [[1, 1]]

    def test_programs_with_latency(self, store: MeasurementStore) -> None:
        mine, other, second = Scene(store, "a", 1), Scene(store, "b", 1), Scene(store, "a", 2)
        rows = [mine.ok(f"m{i}", n, s) for i, (n, s) in enumerate([(0, 1e-6), (0, 5e-3), (1, 2e-3), (0, 6e-3)])]
        flagged = [replace(mine.ok("flagged", 1, 9.0), canary_off=True), replace(mine.ok("off", 4), canary_off=True)]
        mine.store.add_measurements(mine.batch([mine.failed("f", 2), *rows, *flagged], range(5)))
        other.store.add_measurements(other.batch([other.ok("o", 1, 3e-3)], [1]))
        mark = store.watermark()
        second.add(7e-3)
        mine.store.add_measurements(mine.batch([mine.ok("late", 1, 4e-3)], [1]))
        frame = store.programs_with_latency(devices=["a", "b"], watermark=mark)
        assert dict(frame.schema) == {
            **{name: pl.String() for name in ("device", "workload_id", "sketch_id", "program_id")},
            "decisions": pl.List(pl.Int32()),
            "latency_s": pl.Float64(),
            "samples": pl.Int64(),
            "seq": pl.Int64(),
        }
        workload_id, sketch_id = mine.workload.workload_id, mine.sketch.sketch_id
        ids = [mine.program(n).program_id for n in (0, 1)]
        wanted = [
            ("a", workload_id, sketch_id, ids[0], [0, 1], 5e-3, 3, 2),
            ("a", workload_id, sketch_id, ids[1], [1, 1], 2e-3, 1, 4),
            ("b", workload_id, sketch_id, ids[1], [1, 1], 3e-3, 1, 8),
        ]
        assert frame.rows() == sorted(wanted, key=lambda row: (row[3], row[0]))
        newest = store.programs_with_latency(devices=["a"], workload_ids=[workload_id])
        assert dict(newest.select("program_id", "latency_s").rows()) == {ids[0]: 5e-3, ids[1]: pytest.approx(3e-3)}
        both = store.programs_with_latency(devices=["a"])
        assert both["workload_id"].to_list() == sorted([workload_id, workload_id, second.workload.workload_id])
        assert store.programs_with_latency(devices=[]).height == 0

    # -- properties -------------------------------------------------------------------------------------------
    @_property
    @given(batches=st.lists(st.lists(st.integers(0, 8), max_size=6), max_size=4))
    def test_any_repetition_stores_every_measurement_once(self, scene: Scene, batches: list[list[int]]) -> None:
        prefix, start = uuid.uuid4().hex, scene.store.watermark()
        seen: list[str] = []
        for numbers in batches:
            rows = [scene.ok(f"{prefix}-{n}", n) for n in numbers]
            new = [i for i in dict.fromkeys(r.measurement_id for r in rows) if i not in seen]
            assert scene.store.add_measurements(scene.batch(rows, numbers)) == len(new)
            seen += new
        stored = scene.store.samples(after=start)
        assert stored["measurement_id"].to_list() == seen
        assert stored["seq"].to_list() == list(range(start + 1, start + 1 + len(seen)))

    @_property
    @given(batches=st.lists(st.lists(st.booleans(), max_size=4), min_size=2, max_size=3))
    def test_a_watermark_gives_the_same_rows_for_ever(self, scene: Scene, batches: list[list[bool]]) -> None:
        snapshots: dict[int, list[tuple[Any, ...]]] = {}
        for outcomes in batches:
            scene.add(*[1e-3 if good else None for good in outcomes])
            mark = scene.store.watermark()
            snapshots[mark] = scene.store.samples(watermark=mark).rows()
        for mark, rows in snapshots.items():
            assert scene.store.samples(watermark=mark).rows() == rows

    @_property
    @given(kind=st.sampled_from(sorted(_BROKEN)), place=st.integers(0, 3), good=st.integers(0, 3))
    def test_one_broken_row_anywhere_refuses_the_batch(self, scene: Scene, kind: str, place: int, good: int) -> None:
        rows = [scene.ok(uuid.uuid4().hex, n) for n in range(good)]
        rows.insert(min(place, good), replace(scene.ok(uuid.uuid4().hex, 99), **_BROKEN[kind]))
        with pytest.raises(InvalidInputError):
            scene.store.add_measurements(scene.batch(rows, [*range(good), 99]))
        assert (scene.store.watermark(), scene.store.programs().height) == (0, 0)

    # -- threads ----------------------------------------------------------------------------------------------
    def test_any_thread_may_use_it(self, scene: Scene) -> None:
        problems: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for i in range(3):
                    row = scene.ok(f"{number}-{i}", i)
                    assert scene.store.add_measurements(scene.batch([row], [i])) == 1
                    scene.store.samples()
            except (TlpError, AssertionError) as exc:  # a thread's exception would be lost
                problems.append(exc)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert scene.store.samples()["seq"].to_list() == list(range(1, 10))
