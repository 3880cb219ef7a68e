"""DuckDB backend: programs and measurements. Columns in, columns out; no Python loop over rows in SQL's place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from storage._duckdb_catalog import insert_canaries, insert_sketches, note_landed
from storage.checks import checked_canary
from storage.connection import Connector, MemoryConnector
from storage.contract import MeasurementStore
from storage.errors import ErrorCode, InvalidInputError
from storage.frames import (
    BEST_COLUMNS,
    MEASUREMENT_SCHEMA,
    OUTCOME_COLUMNS,
    PROGRAM_SCHEMA,
    SAMPLE_COLUMNS,
    check_programs,
    check_value_or_error,
    conform,
    rows_frame,
)
from storage.rows import Canary, MeasurementBatch, Sketch
from storage.states import MeasurementState
from storage.table import Connection, names, next_number

_OK = str(MeasurementState.OK)
# The columns of a measurement are those of its dataclass, but for two that are stored in another way.
_STORED = {"program_id": "program_no", "at": "at_utc"}
_INSERTED = {"program_id": "n.program_no", "at": "(m.at AT TIME ZONE 'UTC')"}
_OWN = [name for name in MEASUREMENT_SCHEMA if name not in _STORED]
_JOINED = f"""
    SELECT m.seq, m.at_utc AS at, p.program_id, p.workload_id, p.sketch_id, p.decisions,
        {", ".join(f"m.{name}" for name in _OWN)}
    FROM measurements m JOIN programs p ON p.program_no = m.program_no
"""


class SampleTables(MeasurementStore):
    """The part of `DuckDBStore` that keeps programs and their measurements."""

    _connector: Connector | MemoryConnector

    # -- writing ----------------------------------------------------------------------------------------------
    def add_measurements(self, batch: MeasurementBatch) -> int:
        return self.add_measurement_frames(
            rows_frame(batch.programs, PROGRAM_SCHEMA, "programs"),
            rows_frame(batch.measurements, MEASUREMENT_SCHEMA, "measurements"),
            sketches=batch.sketches,
            canaries=batch.canaries,
        )

    def add_measurement_frames(
        self,
        programs: pl.DataFrame,
        measurements: pl.DataFrame,
        *,
        sketches: Sequence[Sketch] = (),
        canaries: Sequence[Canary] = (),
        landed: Sequence[str] = (),
    ) -> int:
        programs = conform(programs, PROGRAM_SCHEMA, "programs").unique("program_id", keep="first", maintain_order=True)
        measurements = conform(measurements, MEASUREMENT_SCHEMA, "measurements")
        check_programs(programs)
        check_value_or_error(measurements)
        measurements = measurements.unique("measurement_id", keep="first", maintain_order=True)
        checked_canaries = [checked_canary(canary) for canary in canaries]
        with self._connector.writing() as con:
            con.register("new_programs", programs.with_row_index("row").to_arrow())
            con.register("new_measurements", measurements.with_row_index("row").to_arrow())
            _check_runs(con, finished=bool(landed))
            _check_devices(con)
            insert_sketches(con, sketches)
            _insert_programs(con)
            insert_canaries(con, checked_canaries)
            note_landed(con, landed)
            return _insert_measurements(con)

    # -- reading ----------------------------------------------------------------------------------------------
    def programs(self, *, devices: Sequence[str] | None = None) -> pl.DataFrame:
        with self._connector.reading() as con:
            return _frame(
                con,
                """
                SELECT program_id, sketch_id, workload_id, decisions FROM programs
                WHERE ? OR program_no IN (
                    SELECT program_no FROM measurements WHERE device IN (SELECT unnest(?::VARCHAR[])))
                ORDER BY program_no
                """,
                [devices is None, list(devices or ())],
            )

    def watermark(self) -> int:
        with self._connector.reading() as con:
            return next_number(con, "measurements", "seq") - 1

    def samples(
        self,
        *,
        devices: Sequence[str] | None = None,
        watermark: int | None = None,
        after: int = 0,
        workload_ids: Sequence[str] | None = None,
        flagged: bool = False,
    ) -> pl.DataFrame:
        condition, params = _sample_condition(devices, watermark, after, flagged, workload_ids)
        with self._connector.reading() as con:
            return _outcomes(con, condition, params, SAMPLE_COLUMNS)

    def iter_samples(
        self,
        *,
        devices: Sequence[str] | None = None,
        watermark: int | None = None,
        after: int = 0,
        batch_rows: int = 100_000,
        flagged: bool = False,
    ) -> Iterator[pl.DataFrame]:
        if batch_rows < 1:
            raise InvalidInputError(f"batch_rows is {batch_rows}; at least 1")
        newest = self.watermark()
        last = newest if watermark is None else min(watermark, newest)
        return self._frames_between(devices, after, last, batch_rows, flagged)

    def _frames_between(
        self, devices: Sequence[str] | None, after: int, last: int, batch_rows: int, flagged: bool
    ) -> Iterator[pl.DataFrame]:
        while after < last:
            condition, params = _sample_condition(devices, last, after, flagged)
            with self._connector.reading() as con:
                # The numbers first: cheap, and the rows are then one range, of which only that part is read.
                row = con.execute(
                    f"""
                    SELECT max(seq) FROM (
                        SELECT m.seq FROM measurements m WHERE {condition} ORDER BY m.seq LIMIT {int(batch_rows)})
                    """,
                    params,
                ).fetchone()
                if row is None or row[0] is None:
                    return
                frame = _outcomes(con, *_sample_condition(devices, row[0], after, flagged), SAMPLE_COLUMNS)
            after = row[0]
            yield frame

    def programs_with_latency(
        self,
        *,
        devices: Sequence[str],
        watermark: int | None = None,
        workload_ids: Sequence[str] | None = None,
    ) -> pl.DataFrame:
        condition, params = _sample_condition(devices, watermark, 0, workload_ids=workload_ids)
        with self._connector.reading() as con:
            # The medians first: the lists of decisions stay out of the grouping.
            return _frame(
                con,
                f"""
                WITH timed AS (
                    SELECT m.device, m.program_no, median(m.latency_s) AS latency_s, count(*) AS samples,
                        min(m.seq) AS seq
                    FROM measurements m JOIN programs p ON p.program_no = m.program_no WHERE {condition}
                    GROUP BY m.device, m.program_no
                )
                SELECT t.device, p.workload_id, p.sketch_id, p.program_id, p.decisions, t.latency_s, t.samples, t.seq
                FROM timed t JOIN programs p ON p.program_no = t.program_no
                """,
                params,
            ).sort("workload_id", "program_id", "device")

    def sample_languages(self, *, watermark: int | None = None) -> dict[str, dict[str, int]]:
        condition, params = _sample_condition(None, watermark, 0)
        with self._connector.reading() as con:
            languages: dict[str, dict[str, int]] = {name: {} for name in sorted(names(con, "devices"))}
            rows = con.execute(
                f"""
                SELECT m.device, s.language, count(*) FROM measurements m
                JOIN programs p ON p.program_no = m.program_no JOIN sketches s ON s.sketch_id = p.sketch_id
                WHERE {condition} GROUP BY ALL ORDER BY ALL
                """,
                params,
            ).fetchall()
        for device, language, count in rows:
            languages[device][language] = count
        return languages

    def measurements(
        self,
        *,
        device: str | None = None,
        run_id: str | None = None,
        states: Sequence[str] | None = None,
        newest: int | None = None,
    ) -> pl.DataFrame:
        condition = "TRUE"
        params: list[Any] = []
        for column, value in (("m.device", device), ("m.run_id", run_id)):
            if value is not None:
                condition += f" AND {column} = ?"
                params.append(value)
        if states is not None:
            condition += " AND m.state IN (SELECT unnest(?::VARCHAR[]))"
            params.append([str(state) for state in states])
        if newest is not None:
            condition += " ORDER BY m.seq DESC LIMIT ?"
            params.append(newest)
        with self._connector.reading() as con:
            return _outcomes(con, condition, params, OUTCOME_COLUMNS)

    def measured_program_ids(self, device: str, workload_id: str) -> set[str]:
        with self._connector.reading() as con:
            rows = con.execute(
                """
                SELECT program_id FROM programs
                WHERE workload_id = ? AND program_no IN (SELECT program_no FROM measurements WHERE device = ?)
                """,
                [workload_id, device],
            ).fetchall()
        return {row[0] for row in rows}

    def best_programs(self, device: str, workload_ids: Sequence[str], *, top: int = 1) -> pl.DataFrame:
        with self._connector.reading() as con:
            return _frame(
                con,
                f"""
                WITH timed AS (
                    SELECT p.workload_id, p.program_id, p.sketch_id, p.program_no,
                        bool_and(m.canary_off IS TRUE) AS canary_off,
                        coalesce(median(m.latency_s) FILTER (m.canary_off IS NOT TRUE),
                            median(m.latency_s)) AS latency_s
                    FROM measurements m JOIN programs p ON p.program_no = m.program_no
                    WHERE m.device = ? AND m.state = ? AND p.workload_id IN (SELECT unnest(?::VARCHAR[]))
                    GROUP BY p.workload_id, p.program_id, p.sketch_id, p.program_no
                ), ranked AS (
                    SELECT *, row_number() OVER (
                        PARTITION BY workload_id ORDER BY canary_off, latency_s, program_no) AS rank FROM timed
                ), wanted AS (
                    SELECT u.workload_id, min(u.place) AS place
                    FROM (SELECT unnest(?::VARCHAR[]) AS workload_id, generate_subscripts(?::VARCHAR[], 1) AS place) u
                    GROUP BY u.workload_id
                )
                SELECT {", ".join(f"r.{c}" if c != "decisions" else "p.decisions" for c in BEST_COLUMNS)}
                FROM ranked r
                JOIN programs p ON p.program_no = r.program_no
                JOIN wanted w ON w.workload_id = r.workload_id
                WHERE r.rank <= ?
                ORDER BY w.place, r.rank
                """,
                [device, _OK, *([list(workload_ids)] * 3), top],
            )


def _frame(con: Connection, query: str, params: list[Any]) -> pl.DataFrame:
    """The rows of a query, `?` standing for `params` in order.

    The values travel as variables of the connection: given as parameters of `con.sql`, the result is first built row by
    row (5 times slower), and `con.execute` has no frames in DuckDB 2.
    """
    first, *rest = query.split("?")
    text = first
    for number, (value, part) in enumerate(zip(params, rest, strict=True)):
        con.execute(f"SET VARIABLE p{number} = ?", [value])
        text += f"getvariable('p{number}'){part}"
    frame: pl.DataFrame = con.sql(text).pl()
    return frame


def _sample_condition(
    devices: Sequence[str] | None,
    watermark: int | None,
    after: int,
    flagged: bool = False,
    workload_ids: Sequence[str] | None = None,
) -> tuple[str, list[Any]]:
    condition = "m.state = ? AND m.seq > ?"
    params: list[Any] = [_OK, after]
    if not flagged:
        condition += " AND m.canary_off IS NOT TRUE"
    if watermark is not None:
        condition += " AND m.seq <= ?"
        params.append(watermark)
    for column, wanted in (("m.device", devices), ("p.workload_id", workload_ids)):
        if wanted is not None:
            condition += f" AND {column} IN (SELECT unnest(?::VARCHAR[]))"
            params.append(list(wanted))
    return condition, params


def _outcomes(con: Connection, condition: str, params: list[Any], columns: Sequence[str]) -> pl.DataFrame:
    wanted = ", ".join(f'"{column}"' for column in columns)
    frame = _frame(con, f"SELECT {wanted} FROM ({_JOINED} WHERE {condition})", params)
    # Sorted here: DuckDB would carry the lists through its sort (4 times slower).
    return frame.sort("seq").with_columns(pl.col("at").dt.replace_time_zone("UTC"))


def _check_runs(con: Connection, *, finished: bool) -> None:
    """Raise unless every run is known and, if `finished` ones will not do, still open."""
    rows = con.execute(
        """
        SELECT n.run_id, r.run_id IS NOT NULL, o.state
        FROM (SELECT DISTINCT run_id FROM new_measurements) n
        LEFT JOIN runs r ON r.run_id = n.run_id LEFT JOIN run_outcomes o ON o.run_id = n.run_id
        """
    ).fetchall()
    for run_id, known, outcome in rows:
        if not known:
            raise InvalidInputError(f"measurements of the unknown run {run_id!r}")
        if outcome is not None and not finished:
            raise InvalidInputError(f"run {run_id} is finished ({outcome}) and takes no more measurements")


def _check_devices(con: Connection) -> None:
    rows = con.execute(
        "SELECT DISTINCT device FROM new_measurements WHERE device NOT IN (SELECT name FROM devices)"
    ).fetchall()
    if rows:
        raise InvalidInputError(
            f"measurements of the unknown device {rows[0][0]!r}", code=ErrorCode.DEVICE_NOT_ENROLLED, name=rows[0][0]
        )


def _insert_programs(con: Connection) -> None:
    """Leaves the table `numbered` (program_id, program_no): every program of the batch that the store has now."""
    con.execute(
        """
        CREATE TEMP TABLE wanted AS SELECT program_id, md5_number_lower(program_id) AS id_hash
        FROM (SELECT program_id FROM new_programs UNION SELECT program_id FROM new_measurements)
        """
    )
    # Two steps: the hashes of all programs are scanned, their texts only where a hash was met.
    con.execute("CREATE TEMP TABLE met AS SELECT program_no FROM programs SEMI JOIN wanted USING (id_hash)")
    con.execute(
        """
        CREATE TEMP TABLE numbered AS SELECT p.program_id, p.program_no FROM programs p
        JOIN met USING (program_no) SEMI JOIN wanted USING (program_id)
        """
    )
    con.execute(
        """
        CREATE TEMP TABLE fresh AS SELECT (?::BIGINT) + row_number() OVER (ORDER BY "row") - 1 AS program_no,
            md5_number_lower(program_id) AS id_hash, program_id, sketch_id, workload_id, decisions
        FROM new_programs ANTI JOIN numbered USING (program_id)
        """,
        [next_number(con, "programs", "program_no")],
    )
    rows = con.execute(
        """
        SELECT f.program_id, f.sketch_id, s.sketch_id IS NOT NULL, s.workload_id = f.workload_id, len(f.decisions),
               s.decision_width
        FROM fresh f LEFT JOIN sketches s ON s.sketch_id = f.sketch_id
        WHERE s.sketch_id IS NULL OR s.workload_id <> f.workload_id OR len(f.decisions) <> s.decision_width
        ORDER BY f.program_no LIMIT 1
        """
    ).fetchall()
    for program_id, sketch_id, known, same_workload, given, width in rows:
        if not known:
            raise InvalidInputError(f"program {program_id} has the unknown sketch {sketch_id}")
        if not same_workload:
            raise InvalidInputError(f"program {program_id} and its sketch {sketch_id} name different workloads")
        raise InvalidInputError(f"program {program_id} has {given} decisions, its sketch {sketch_id} takes {width}")
    con.execute("INSERT INTO programs SELECT * FROM fresh")
    con.execute("INSERT INTO numbered SELECT program_id, program_no FROM fresh")


def _insert_measurements(con: Connection) -> int:
    rows = con.execute(
        'SELECT program_id FROM new_measurements ANTI JOIN numbered USING (program_id) ORDER BY "row" LIMIT 1'
    ).fetchall()
    if rows:
        raise InvalidInputError(f"measurements of the unknown program {rows[0][0]!r}")
    con.execute(
        """
        CREATE TEMP TABLE seen AS SELECT seq FROM measurements
        SEMI JOIN (SELECT md5_number_lower(measurement_id) AS id_hash FROM new_measurements) USING (id_hash)
        """
    )
    con.execute("CREATE TEMP TABLE stored AS SELECT measurement_id FROM measurements JOIN seen USING (seq)")
    row = con.execute(
        f"""
        INSERT INTO measurements (seq, id_hash, {", ".join(_STORED.get(name, name) for name in MEASUREMENT_SCHEMA)})
        SELECT (?::BIGINT) + row_number() OVER (ORDER BY m."row") - 1, md5_number_lower(m.measurement_id),
            {", ".join(_INSERTED.get(name, f"m.{name}") for name in MEASUREMENT_SCHEMA)}
        FROM new_measurements m JOIN numbered n USING (program_id) ANTI JOIN stored USING (measurement_id)
        """,
        [next_number(con, "measurements", "seq")],
    ).fetchone()
    return int(row[0]) if row else 0
