"""A process that commits batches to a store and says so: `writer.py STORE DEVICE BATCHES ROWS`.

Prints `ready`, then `ack N` after each commit. Batch N has the measurements `DEVICE-N-0`, `DEVICE-N-1`, … With BATCHES
0 it goes on until it is killed.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from storage import DuckDBStore
from tests.contract.store import Scene


def main() -> None:
    path, device, batches, rows = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    scene = Scene(DuckDBStore(path), device, number=sum(map(ord, device)))
    print("ready", flush=True)
    for n in range(batches) if batches else itertools.count():
        numbers = range(n * rows, (n + 1) * rows)
        measurements = [scene.ok(f"{device}-{n}-{i}", number) for i, number in enumerate(numbers)]
        stored = scene.store.add_measurements(scene.batch(measurements, numbers))
        assert stored == rows, stored
        print(f"ack {n}", flush=True)


if __name__ == "__main__":
    main()
