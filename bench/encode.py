"""Programs per second and core that the encoders make from sketch + decisions.

    python bench/encode.py [--json]

Programs are real ones (Ansor: tests/data/ansor; MetaSchedule: the starter data), each sketch's decisions repeated to
the number asked for, as a training set has them: many programs, few sketches. Peer: the plain reference encoder, one
program at a time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tlp
from storage import DuckDBStore, Sketch, import_parquet
from tests.references import ansor_encoding, metaschedule_encoding
from tlp.language import metaschedule_encoder as metaschedule
from tlp.language.ansor_encoder import CPU_VERSION, GPU_VERSION, LAYOUTS, AnsorEncoder
from tlp.language.constants import bind_all
from tlp.language.encoder import Encoder
from tlp.language.vocabulary import Vocabulary

DATA = Path(__file__).parents[1] / "tests" / "data" / "ansor"
LOGS = {CPU_VERSION: "v0.6-conv2d-1k-x86.json.gz", GPU_VERSION: "v0.6-conv2d-rtx3080.log"}
COUNT = 20_000
Groups = dict[Sketch, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Case:
    """An encoder, its plain reference, and programs by sketch."""

    encoder: Encoder
    groups: Groups
    reference: Callable[[Any, Sketch, list[int]], Any]


def repeated(groups: dict[Sketch, list[Any]]) -> Groups:
    """About `COUNT` programs."""
    times = max(1, COUNT // sum(map(len, groups.values())))
    return {sketch: np.repeat(np.array(rows, np.int32), times, axis=0) for sketch, rows in groups.items()}


def ansor_programs(name: str) -> Groups:
    raw = (DATA / name).read_bytes()
    lines = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode().splitlines()
    groups: dict[Sketch, list[Any]] = {}
    for line in lines:
        if not line.startswith("#"):
            sketch, program = ansor_encoding.from_steps("bench", json.loads(line)["i"][1][1])
            groups.setdefault(sketch, []).append(program.decisions)
    return repeated(groups)


def starter_programs() -> Groups:
    store = DuckDBStore()
    import_parquet(store, Path(tlp.__file__).parent / "data" / "starter")
    sketches = bind_all(store.get_sketches(), store.list_devices()[0])
    groups: dict[Sketch, list[Any]] = {}
    for sketch_id, decisions in store.programs().select("sketch_id", "decisions").iter_rows():
        groups.setdefault(sketches[sketch_id], []).append(decisions)
    # as many per sketch as training batches have
    fullest = sorted(groups, key=lambda sketch: -len(groups[sketch]))[:60]
    return repeated({sketch: groups[sketch] for sketch in fullest})


def cases() -> Iterator[Case]:
    for (version, _), (length, width) in LAYOUTS.items():
        ansor = AnsorEncoder(AnsorEncoder.first_vocabulary, version=version, length=length, width=width)
        yield Case(ansor, ansor_programs(LOGS[version]), ansor_encoding.encode_reference)
    groups = starter_programs()
    vocabulary = metaschedule.MetaScheduleEncoder.grow_vocabulary(Vocabulary(), groups)
    for version in metaschedule.ENCODER_VERSIONS:
        encoder = metaschedule.MetaScheduleEncoder(vocabulary, version=version)
        yield Case(encoder, groups, metaschedule_encoding.encode_reference)


def per_second(count: int, work: Callable[[], object]) -> int:
    """Best of five, by CPU time."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return round(count / best)


def measure(case: Case) -> dict[str, Any]:
    def vectorised() -> None:
        for sketch, decisions in case.groups.items():
            case.encoder.encode(sketch, decisions)

    plain = [(sketch, row.tolist()) for sketch, decisions in case.groups.items() for row in decisions[:5]][:200]

    def reference() -> None:
        for sketch, decisions in plain:
            case.reference(case.encoder, sketch, decisions)

    return {
        "version": case.encoder.version,
        "shape": [case.encoder.length, case.encoder.width],
        "sketches": len(case.groups),
        "programs_per_cpu_s": per_second(sum(map(len, case.groups.values())), vectorised),
        "peer_reference_per_cpu_s": per_second(len(plain), reference),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(case) for case in cases()]
    if options.json:
        print(json.dumps({"layouts": rows}))
        return
    print(f"{'version':22}{'L x E':>10}{'sketches':>10}{'programs/s':>14}{'reference/s':>14}")
    for row in rows:
        shape = "{} x {}".format(*row["shape"])
        print(
            f"{row['version']:22}{shape:>10}{row['sketches']:10}"
            f"{row['programs_per_cpu_s']:14,}{row['peer_reference_per_cpu_s']:14,}"
        )


if __name__ == "__main__":
    main()
