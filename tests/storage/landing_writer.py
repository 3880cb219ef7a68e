"""A process that hands batches in: `landing_writer.py FOLDER WRITER RUN_ID BATCHES ROWS`; prints `ack N` after each.

Batch N has the measurements `WRITER-N-0`, `WRITER-N-1`, …
"""

from __future__ import annotations

import sys
from pathlib import Path

from storage import MeasurementBatch, Program
from storage.landing import LandingFolder
from tests.contract.store import example_sketch, example_workload, ok


def main() -> None:
    folder, writer, run_id = LandingFolder(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
    batches, rows = int(sys.argv[4]), int(sys.argv[5])
    sketch = example_sketch(example_workload(0))
    print("ready", flush=True)
    for n in range(batches):
        programs = [Program.make(sketch, (n * rows + i, ord(writer))) for i in range(rows)]
        measurements = [ok(f"{writer}-{n}-{i}", program, "cpu0", run_id) for i, program in enumerate(programs)]
        folder.hand_in(MeasurementBatch([sketch], programs, measurements))
        print(f"ack {n}", flush=True)


if __name__ == "__main__":
    main()
