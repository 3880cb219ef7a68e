"""A synthetic fleet: real sketch structure (tiled matmul), invented devices whose latencies follow from the decisions.

For tests and demonstrations of training, evaluation and the gate where measuring would take hours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from storage import (
    Device,
    DeviceState,
    Measurement,
    MeasurementBatch,
    MeasurementState,
    MeasurementStore,
    Network,
    NetworkTask,
    Program,
    RunKind,
    RunState,
    Sketch,
    Workload,
    stable_id,
)
from tlp.language.sketch import LANGUAGE

_AT = datetime(2025, 1, 1, tzinfo=UTC)
_UNROLL = [0, 16, 64, 512]


def matmul_sketch(workload_id: str, *, cache_write: bool) -> Sketch:
    """MetaSchedule's SSRSRS tiling of a matmul: 11 decisions, with or without a cache write."""
    loops = ["l2", "l3", "l4"]
    program: list[list[Any]] = [
        ["GetSBlock", [], ["T_matmul_NT", "main"], ["b0"]],
        ["GetSBlock", [], ["root", "main"], ["b1"]],
        ["Annotate", ["b0", '"SSRSRS"'], ["meta_schedule.tiling_structure"], []],
        ["GetLoops", ["b0"], [], loops],
    ]
    tiles: list[list[str]] = []
    for loop, ways in zip(loops, (4, 4, 2), strict=True):
        factors = [f"v{loop}{i}" for i in range(ways)]
        tile = [f"{loop}{i}" for i in range(ways)]
        program.append(["SamplePerfectTile", [loop], [ways, 64], factors])
        program.append(["Split", [loop, *factors], [1, 0], tile])
        tiles.append(tile)
    i, j, k = tiles
    program.append(["Reorder", [i[0], j[0], i[1], j[1], k[0], i[2], j[2], k[1], i[3], j[3]], [], []])
    if cache_write:
        program.append(["CacheWrite", ["b0", []], [0, "global"], ["b9"]])
        program.append(["ReverseComputeAt", ["b9", j[1]], [1, -1], []])
    program.append(["Annotate", ["b1", 16], ["meta_schedule.parallel"], []])
    program.append(["SampleCategorical", [], [_UNROLL, [0.25] * 4], ["v90"]])
    program.append(["Annotate", ["b1", "v90"], ["meta_schedule.unroll_explicit"], []])
    return Sketch.make(workload_id, LANGUAGE, json.dumps(program, separators=(",", ":")), 11)


def _factors(rng: np.random.Generator, exponent: int, ways: int) -> list[int]:
    """2^exponent as a product of `ways` powers of two."""
    cuts = np.sort(rng.integers(0, exponent + 1, ways - 1))
    parts = np.diff(np.concatenate([[0], cuts, [exponent]]))
    return [int(2**part) for part in parts]


def latency_s(decisions: Sequence[int], size: float, level: int) -> float:
    """Latency of a program on a device of vector level 2 to 4: worst away from one best inner tile per level.

    Args:
        decisions: a `matmul_sketch` vector.
        size: log2 of the workload's operations.
        level: best inner tile is 2^level wide and 2 high; unrolling by 16 is best.
    """
    i, j, k = (np.log2(np.maximum(part, 1)) for part in (decisions[0:4], decisions[4:8], decisions[8:10]))
    penalty = abs(j[3] - level) + 0.7 * abs(i[3] - 1.0) + 0.3 * abs(k[1] - 3.0) + 0.2 * abs(decisions[10] - 1)
    return float(2.0 ** (size - 34.0) * np.exp(0.5 * penalty))


def fill_store(
    store: MeasurementStore,
    *,
    devices: Sequence[str] = ("x86-64-v2", "x86-64-v3"),
    networks: Sequence[str] = ("net_a", "net_b", "held"),
    holdout: Sequence[str] = ("held",),
    workloads_per_network: int = 4,
    programs: int = 24,
    seed: int = 0,
    noise: float = 0.02,
    min_samples: int = 100,
) -> None:
    """Fill a store with devices, networks and measurements; the same arguments give the same rows.

    Args:
        store: an empty store.
        devices: `x86-64-v2` to `-v4` by name; every program is measured on all of them.
        networks: names; each has its own workloads.
        holdout: those of them that are held out.
        workloads_per_network: tasks per network.
        programs: programs per workload.
        seed: of decisions and noise.
        noise: relative spread of a measurement.
        min_samples: of the devices.
    """
    rng = np.random.default_rng(seed)
    for name in devices:
        target = {"kind": "llvm", "mcpu": name, "num-cores": 1}
        store.add_device(
            Device(name, target, "x86_64", min_samples, {}, {"kind": "dataset"}, DeviceState.ENROLLED, _AT), "synthetic"
        )
    run = store.start_run(RunKind.IMPORT, device=None, params={}, owner={})
    for network in networks:
        shapes = [rng.integers(4, 9, 3) for _ in range(workloads_per_network)]
        workloads = [_workload(network, index, shape) for index, shape in enumerate(shapes)]
        tasks = tuple(NetworkTask(w.workload_id, w.name, 1 + i % 3) for i, w in enumerate(workloads))
        store.add_network(Network(network, network in holdout, "synthetic", _AT, tasks), workloads)
        for workload, exponents in zip(workloads, shapes, strict=True):
            sketches = [matmul_sketch(workload.workload_id, cache_write=flag) for flag in (False, True)]
            made: list[Program] = []
            measured: list[Measurement] = []
            for index in range(programs):
                decisions = [
                    *_factors(rng, int(exponents[0]), 4),
                    *_factors(rng, int(exponents[1]), 4),
                    *_factors(rng, int(exponents[2]), 2),
                    int(rng.integers(len(_UNROLL))),
                ]
                program = Program.make(sketches[index % 2], decisions)
                made.append(program)
                for device in devices:
                    seconds = latency_s(decisions, float(exponents.sum()), int(device[-1]))
                    seconds *= 1.0 + noise * float(rng.standard_normal())
                    key = stable_id("synthetic", str(seed), program.program_id, device, str(index))
                    measured.append(
                        Measurement(key, program.program_id, device, run, _AT, MeasurementState.OK, (seconds,), seconds)
                    )
            store.add_measurements(MeasurementBatch(sketches, list({p.program_id: p for p in made}.values()), measured))
    store.finish_run(run, RunState.DONE, "synthetic")


def matmul_context(rows: int, columns: int, inner: int) -> dict[str, Any]:
    """Context of a workload `T_matmul_NT`: `(rows, inner)` × `(columns, inner)`, float32."""
    sizes = [rows, columns, inner]
    accesses = [
        {
            "buffer": name,
            "write": name == "C",
            "num_bytes": 4,
            "shape": [sizes[a], sizes[b]],
            "dims": [[[a, 1]], [[b, 1]]],
        }
        for name, a, b in (("C", 0, 1), ("A", 0, 2), ("B", 1, 2))
    ]
    block = {
        "name": "T_matmul_NT",
        "extents": sizes,
        "reductions": [2],
        "operations": {"add": 1, "multiply": 1},
        "accesses": accesses,
    }
    return {"flop": 2.0 * rows * columns * inner, "arithmetic": [block]}


def _workload(network: str, index: int, exponents: npt.NDArray[np.int64]) -> Workload:
    name = f"{network}_matmul_{index}"
    context = matmul_context(*(int(2**exponent) for exponent in exponents))
    return Workload(stable_id("synthetic-workload", name), name, "{}", str(index), context)
