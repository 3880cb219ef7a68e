"""New ids for sketches and programs of releases that wrote a target's numbers into their sketches.

Such a sketch had another id on every device with other cores. Here the numbers become placeholders, by the rules that
the language has had since (`tlp.language.constants`; these statements stay as they are, for the rows of that time), and
sketches and programs get the ids of what is left. Programs that turn out to be the same are merged.

A sketch is changed if the devices that measured it agree on the numbers. All others stay as they are.
"""

from __future__ import annotations

import duckdb
import polars as pl

_THREADS = f"[[32,64,128,256,512,1024],[{','.join(['0.16666666666666666'] * 6)}]]"
_GPU_UNROLL = f"[[0,16,32,64,128,256,512,1024],[{','.join(['0.125'] * 8)}]]"

SKETCHES_SQL = f"""
    CREATE TEMP TABLE rekeyed_sketches AS
    WITH constants AS (
        SELECT name AS device, CASE WHEN family IN ('cuda', 'rocm', 'metal', 'opencl', 'vulkan', 'webgpu') THEN {{
                'gpu': true, 'parallel': '', 'width': '', 'innermost': '64', 'unroll': '{_GPU_UNROLL}',
                'low': coalesce(target ->> '$.thread_warp_size', '1'),
                'high': coalesce(target ->> '$.max_threads_per_block', target ->> '$.max_num_threads', '1024')
            }} ELSE {{
                'gpu': false,
                'parallel': (CASE family WHEN 'aarch64' THEN 8 ELSE 16 END
                    * coalesce(CAST(target ->> '$."num-cores"' AS BIGINT), 1))::VARCHAR,
                'width': CASE family WHEN 'aarch64' THEN '32' ELSE '64' END,
                'innermost': CASE family WHEN 'aarch64' THEN '32' ELSE '64' END,
                'unroll': CASE family WHEN 'aarch64' THEN '[[0,8,32,256],[0.25,0.25,0.25,0.25]]'
                    ELSE '[[0,16,64,512],[0.25,0.25,0.25,0.25]]' END,
                'low': '', 'high': ''
            }} END AS c
        FROM old_devices
    ), used AS (
        SELECT sketch_id, any_value(c) AS c
        FROM (SELECT DISTINCT sketch_id, device FROM old_uses) JOIN constants USING (device)
        GROUP BY sketch_id HAVING count(DISTINCT c) = 1
    ), abstract AS (
        SELECT s.sketch_id AS old_id, s.workload_id, s.language, s.decision_width, regexp_replace(
            replace(replace(replace(replace(replace(replace(s.instructions_json,
                ',' || c.parallel || '],["meta_schedule.parallel"]', ',"$parallel"],["meta_schedule.parallel"]'),
                ',' || c.width || '],["meta_schedule.vectorize"]', ',"$vectorize"],["meta_schedule.vectorize"]'),
                ',' || c.low || '],["meta_schedule.thread_extent_low_inclusive"]',
                ',"$thread_low"],["meta_schedule.thread_extent_low_inclusive"]'),
                ',' || c.high || '],["meta_schedule.thread_extent_high_inclusive"]',
                ',"$thread_high"],["meta_schedule.thread_extent_high_inclusive"]'),
                '["SampleCategorical",[],' || c.unroll, '["SampleCategorical",[],["$unroll"]'),
                CASE WHEN c.gpu AND c.high = '1024' THEN '["SampleCategorical",[],{_THREADS}' ELSE chr(1) END,
                '["SampleCategorical",[],["$threads"]'),
            '(\\["Sample(?:Perfect|Partitioned)Tile",\\[[^\\]]*\\],\\[[^\\]]*),' || c.innermost || '\\]',
            '\\1,"$innermost"]', 'g') AS instructions_json
        FROM old_sketches s JOIN used u USING (sketch_id)
        WHERE s.language = 'metaschedule'
    )
    SELECT old_id, left(sha256('sketch' || chr(0) || workload_id || chr(0) || language || chr(0) || instructions_json
        || chr(0)), 32) AS sketch_id, workload_id, language, instructions_json, decision_width
    FROM abstract
"""
"""`old_sketches`, `old_devices` and `old_uses` (sketch_id, device) → sketches with their old and new ids."""

PROGRAMS_SQL = """
    CREATE TEMP TABLE rekeyed_programs AS
    SELECT p.program_id AS old_id, left(sha256('program' || chr(0) || s.sketch_id || chr(0)
        || array_to_string(p.decisions, ',') || chr(0)), 32) AS program_id, s.sketch_id
    FROM old_programs p JOIN rekeyed_sketches s ON s.old_id = p.sketch_id
"""
"""`old_programs` → programs whose id changes: old id, new id, new sketch."""

MIGRATION_SQL = f"""
    CREATE TEMP VIEW old_sketches AS SELECT * FROM sketches;
    CREATE TEMP VIEW old_devices AS SELECT name, family, target FROM devices;
    CREATE TEMP VIEW old_programs AS SELECT * FROM programs;
    CREATE TEMP VIEW old_uses AS
        SELECT DISTINCT p.sketch_id, m.device FROM programs p JOIN measurements m USING (program_no);
    {SKETCHES_SQL};
    {PROGRAMS_SQL};
    DELETE FROM sketches WHERE sketch_id IN (SELECT old_id FROM rekeyed_sketches);
    INSERT INTO sketches BY NAME
        SELECT DISTINCT ON (sketch_id) sketch_id, workload_id, language, instructions_json, decision_width
        FROM rekeyed_sketches WHERE sketch_id NOT IN (SELECT sketch_id FROM sketches);
    UPDATE programs SET program_id = r.program_id, sketch_id = r.sketch_id, id_hash = md5_number_lower(r.program_id)
        FROM rekeyed_programs r WHERE programs.program_id = r.old_id;
    CREATE TEMP TABLE merged_programs AS
        SELECT program_no, first_no FROM
            (SELECT program_no, min(program_no) OVER (PARTITION BY program_id) AS first_no FROM programs)
        WHERE program_no <> first_no;
    UPDATE measurements SET program_no = m.first_no FROM merged_programs m WHERE measurements.program_no = m.program_no;
    DELETE FROM programs WHERE program_no IN (SELECT program_no FROM merged_programs);
    UPDATE tuning_results SET best_program_id = r.program_id
        FROM rekeyed_programs r WHERE best_program_id = r.old_id;
    DROP VIEW old_sketches; DROP VIEW old_devices; DROP VIEW old_programs; DROP VIEW old_uses;
    DROP TABLE rekeyed_sketches; DROP TABLE rekeyed_programs; DROP TABLE merged_programs;
"""
"""The tables of a store, in one transaction."""


def rekey_frames(
    devices: pl.DataFrame, sketches: pl.DataFrame, programs: pl.DataFrame, measurements: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Rows of a file that an earlier release wrote, as today's.

    Args:
        devices: name, family, target (JSON text) of those that measured.
        sketches, programs, measurements: columns of `Sketch`, `Program` and `Measurement`.

    Returns:
        Sketches, programs and measurements under today's ids, each once, in their order.
    """
    with duckdb.connect() as con:
        for name, frame in (("old_devices", devices), ("old_sketches", sketches), ("old_programs", programs)):
            con.register(name, frame.to_arrow())
        uses = (
            measurements.select("program_id", "device")
            .unique()
            .join(programs.select("program_id", "sketch_id"), on="program_id")
        )
        con.register("old_uses", uses.select("sketch_id", "device").to_arrow())
        con.execute(SKETCHES_SQL)
        con.execute(PROGRAMS_SQL)
        changed, moved = con.table("rekeyed_sketches").pl(), con.table("rekeyed_programs").pl()
    own = pl.concat(
        [changed.select(sketches.columns), sketches.join(changed, left_on="sketch_id", right_on="old_id", how="anti")]
    )
    sketch_of = dict(zip(moved["old_id"], moved["sketch_id"], strict=True))
    program_of = dict(zip(moved["old_id"], moved["program_id"], strict=True))
    renamed = programs.with_columns(
        pl.coalesce(
            pl.col("program_id").replace_strict(sketch_of, default=None, return_dtype=pl.String), "sketch_id"
        ).alias("sketch_id"),
        pl.col("program_id").replace(program_of),
    )
    return (
        own.unique("sketch_id", maintain_order=True),
        renamed.unique("program_id", maintain_order=True),
        measurements.with_columns(pl.col("program_id").replace(program_of)),
    )
