"""Programs per second and core that the Ansor encoder makes from sketch + decisions.

    python bench/encode_ansor.py [--json]

Programs are the real ones of tests/data/ansor, each sketch's decisions repeated to the number asked for, as a training
set has them: many programs, few sketches. Peer: the plain reference encoder, one program at a time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from storage import Sketch
from tlp.language.ansor import from_steps
from tlp.language.ansor_encoder import CPU_VERSION, GPU_VERSION, LAYOUTS, AnsorEncoder, ansor_vocabulary

DATA = Path(__file__).parents[1] / "tests" / "data" / "ansor"
LOGS = {CPU_VERSION: "v0.6-conv2d-1k-x86.json.gz", GPU_VERSION: "v0.6-conv2d-rtx3080.log"}


def programs(name: str, count: int) -> dict[Sketch, np.ndarray[Any, Any]]:
    """About `count` programs, by sketch."""
    raw = (DATA / name).read_bytes()
    lines = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode().splitlines()
    pairs = [from_steps("bench", json.loads(line)["i"][1][1]) for line in lines if not line.startswith("#")]
    groups: dict[Sketch, list[tuple[int, ...]]] = {}
    for sketch, program in pairs:
        groups.setdefault(sketch, []).append(program.decisions)
    times = max(1, count // len(pairs))
    return {sketch: np.repeat(np.array(rows, np.int32), times, axis=0) for sketch, rows in groups.items()}


def per_second(count: int, work: Callable[[], object]) -> int:
    """Best of five, by CPU time."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return round(count / best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for (version, cropped), (length, width) in LAYOUTS.items():
        encoder = AnsorEncoder(ansor_vocabulary(), version=version, length=length, width=width)
        groups = programs(LOGS[version], 20_000)
        total = sum(map(len, groups.values()))

        def vectorised(encoder: AnsorEncoder = encoder, groups: dict[Sketch, Any] = groups) -> None:
            for sketch, decisions in groups.items():
                encoder.encode(sketch, decisions)

        plain = [(sketch, row.tolist()) for sketch, decisions in groups.items() for row in decisions[:5]][:200]

        def reference(encoder: AnsorEncoder = encoder, plain: list[Any] = plain) -> None:
            for sketch, decisions in plain:
                encoder.encode_reference(sketch, decisions)

        rows.append(
            {
                "version": version,
                "cropped": cropped,
                "shape": [length, width],
                "sketches": len(groups),
                "programs_per_cpu_s": per_second(total, vectorised),
                "peer_reference_per_cpu_s": per_second(len(plain), reference),
            }
        )
    if options.json:
        print(json.dumps({"layouts": rows}))
        return
    print(f"{'version':14}{'L x E':>10}{'sketches':>10}{'programs/s':>14}{'reference/s':>14}")
    for row in rows:
        shape = "{} x {}".format(*row["shape"])
        print(
            f"{row['version']:14}{shape:>10}{row['sketches']:10}"
            f"{row['programs_per_cpu_s']:14,}{row['peer_reference_per_cpu_s']:14,}"
        )


if __name__ == "__main__":
    main()
