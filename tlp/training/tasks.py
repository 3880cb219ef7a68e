"""Which devices of a family a training is about: the device, its auxiliaries, and heads that are kept.

The default recipe is the paper's: two or three tasks of one ISA (MTL-TLP, table of task counts: the target alone 0.665,
with one auxiliary 0.874, with two 0.890, with three 0.875). A family of ten devices does not train ten tasks: the
champion's other heads stay in the new version and are kept (`tlp.training.learn.strategy`), and the gate judges all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from storage import Device, MeasurementStore
from tlp.model.checkpoint import Manifest
from tlp.model.nearest import rank_correlations, similarity, x86_level
from tlp.training.data.holdout import bucket

MAX_AUXILIARIES = 2
COMPARED_WORKLOADS = 32  # of a device, for its rank correlation with others: reading more would not change the order


class Role(StrEnum):
    """What a device is in a training."""

    FOCUS = "device"
    AUXILIARY = "auxiliary"
    KEPT = "kept"


@dataclass(frozen=True)
class Task:
    """A head of the model that a training makes.

    Attributes:
        samples: OK samples in the language.
        correlation: Spearman's, with the focus on programs both have measured; None: there are none.
    """

    device: str
    role: Role
    samples: int
    correlation: float | None
    why: str

    def to_json(self) -> dict[str, Any]:
        """`{"device", "role", "samples", "correlation", "why"}`."""
        return asdict(self) | {"role": self.role.value}


def choose_tasks(
    store: MeasurementStore,
    device: Device,
    devices: Iterable[Device],
    champion: Manifest | None,
    samples: Mapping[str, int],
    auxiliaries: int | None = MAX_AUXILIARIES,
) -> list[Task]:
    """The heads of the next version, the focus first, then auxiliaries by nearness, then what is kept by name.

    Auxiliaries are the nearest `auxiliaries` (by ISA, then by rank correlation; None: all) among the champion's heads
    with samples and the devices of the family whose quota of samples is full. Kept are the champion's other heads whose
    device the store has.

    `samples` are those in the language of the model.
    """
    heads = set(champion.heads) if champion else set()
    family = [d for d in devices if d.family == device.family and d.name != device.name]
    able = [d for d in family if samples[d.name] and (d.name in heads or samples[d.name] >= d.min_samples)]
    rhos = correlations(store, device.name, [d.name for d in able])

    def nearness(d: Device) -> tuple[Any, ...]:
        return similarity(device.target, d.target, rhos.get(d.name)), samples[d.name], d.name

    ranked = sorted(able, key=nearness, reverse=True)
    nearest = ranked[:auxiliaries]
    tasks = [Task(device.name, Role.FOCUS, samples[device.name], None, "the training is for it")]
    for place, d in enumerate(nearest, 1):
        why = f"nearest {place} of {len(able)}: {_nearness(device, d, rhos.get(d.name))}"
        tasks.append(Task(d.name, Role.AUXILIARY, samples[d.name], rhos.get(d.name), why))
    why = f"head of the champion, not among the {len(nearest)} nearest"
    kept = sorted({d.name for d in family if d.name in heads} - {d.name for d in nearest})
    return tasks + [Task(name, Role.KEPT, samples[name], rhos.get(name), why) for name in kept]


def _nearness(device: Device, other: Device, correlation: float | None) -> str:
    levels = [x86_level(d.target) for d in (device, other)]
    if device.family != "x86_64":
        isa = f"ISA family {device.family}"
    elif levels[0] == levels[1]:
        isa = f"the same ISA x86-64-v{levels[0]}"
    else:
        isa = f"ISA x86-64-v{levels[1]} beside x86-64-v{levels[0]}"
    return isa if correlation is None else f"{isa}, rank correlation {correlation:.2f}"


def correlations(store: MeasurementStore, device: str, others: list[str]) -> Mapping[str, float]:
    """Spearman's rank correlation of a device with others on programs that both have measured, workload by workload.

    At most `COMPARED_WORKLOADS` of the device's workloads are read, chosen by hash. Devices without enough programs in
    common are left out.
    """
    workloads = {task.workload_id for network in store.list_networks() for task in network.tasks}
    if not workloads or not others:
        return {}
    compared = sorted(workloads, key=lambda w: bucket(w, 1 << 62, "correlation"))[:COMPARED_WORKLOADS]
    names = [device, *others]
    frame = (
        store.programs_with_latency(devices=names, workload_ids=compared)
        .pivot("device", index=["workload_id", "program_id"], values="latency_s")
        .sort("workload_id", "program_id")
    )
    measured = [name for name in names if name in frame.columns]
    if device not in measured:
        return {}
    workload = frame["workload_id"].rle_id().to_numpy().astype(np.int64)
    rhos = rank_correlations(workload, frame.select(measured).to_numpy(), measured.index(device))
    return {name: float(rho) for name, rho in zip(measured, rhos, strict=True) if name != device and not np.isnan(rho)}
