"""What each device lacks of measurements, and how a night's budget is split among those that lack some.

A device lacks

1. what its `min_samples` are more than its OK samples, unless a bootstrap with `--min-samples auto` found before that
   more would not help;
2. programs for the gate: `gate_min_programs` of each of `gate_min_tasks` held-out tasks, those first that lack least.

Workloads whose design spaces were used up do not count: there is nothing left to measure of them.

The split is water-filling: equal parts, and what a device does not need is left to the others, in equal parts again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from storage import Device, MeasurementStore, Network, ReasonCode, Run, RunKind, RunState
from tlp.core.fleet import Fleet
from tlp.measure.endpoint import endpoint_of
from tlp.pipeline.night._common import why_no_work
from tlp.training.data.holdout import choose_holdout
from tlp.training.saturation import saturated

MEASURING: Final = (RunKind.MEASURE, RunKind.BOOTSTRAP)
_AT_WORK: Final = (*MEASURING, RunKind.TUNE)  # these have the device's lock
_DATASET: Final = "dataset"


@dataclass(frozen=True)
class Lack:
    """What a device lacks.

    Attributes:
        quota: OK samples of any workload.
        gate: programs of the workloads `held_out`.
        until_flat: its quota is `auto`: it ends when more samples would not help.
        reason: one sentence with the numbers.
        numbers: what the sentence was made from.
        machines: what its programs run on.
        last_at: when it was measured last; "" if never.
    """

    device: str
    quota: int
    gate: int
    held_out: tuple[str, ...]
    until_flat: bool
    reason: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    machines: frozenset[str] = frozenset()
    last_at: str = ""

    @property
    def need(self) -> int:
        """OK samples in all; 0: nothing is to be measured."""
        return self.quota + self.gate

    def to_json(self) -> dict[str, Any]:
        """JSON values; `due` if it lacks something that can be measured."""
        keys = ("device", "quota", "gate", "need", "until_flat", "reason")
        row = {key: getattr(self, key) for key in keys} | {"due": self.need > 0, "numbers": dict(self.numbers)}
        return row | {"machines": sorted(self.machines)}


def look(fleet: Fleet, *, device: str | None = None, probe: bool = False) -> tuple[list[Lack], dict[str, str]]:
    """What every device lacks, or the one named, longest not measured first; and why others are left out, by name.

    With `probe`, quarantined devices whose probe is due are probed. Raises NotFoundError: no such device.
    """
    devices = fleet.store.list_devices() if device is None else [fleet.store.get_device(device)]
    working = {run.device: run for run in fleet.store.list_runs(state=RunState.RUNNING) if run.kind in _AT_WORK}
    lacks: list[Lack] = []
    left_out: dict[str, str] = {}
    for row in devices:
        why = why_no_work(fleet, row, probe=probe)
        if why is None and row.name in working:
            why = f"run {working[row.name].run_id[:8]} ({working[row.name].kind}) is at work on it"
        if why is not None:
            left_out[f"device {row.name}"] = why
        else:
            lacks.append(replace(lacking(fleet, row), machines=endpoint_of(row).machines()))
    return sorted(lacks, key=lambda lack: (lack.last_at, lack.device)), left_out


def split(needs: Sequence[int], budget: int) -> list[int]:
    """Water-filling: nobody gets more than it needs, nor more than one program more than another that lacks more.

    Args:
        needs: programs each lacks, 0 or more.
        budget: programs in all; below 0 is as 0.
    """
    shares, left = [0] * len(needs), max(budget, 0)
    for done, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        shares[index] = min(needs[index], left // (len(needs) - done))
        left -= shares[index]
    return shares


def lanes(lacks: Sequence[Lack]) -> list[list[Lack]]:
    """Devices that share a machine, also by way of a third one, in one lane; in their order."""
    found: list[tuple[frozenset[str], list[Lack]]] = []
    for lack in lacks:
        joined = [lane for lane in found if lane[0] & lack.machines]
        found = [lane for lane in found if lane not in joined]
        members = [member for _, of in joined for member in of] + [lack]
        found.append((lack.machines.union(*(lane[0] for lane in joined)), members))
    place = {lack.device: index for index, lack in enumerate(lacks)}
    ordered = [sorted(members, key=lambda lack: place[lack.device]) for _, members in found]
    return sorted(ordered, key=lambda lane: place[lane[0].device])


def lacking(fleet: Fleet, device: Device) -> Lack:
    """What one device lacks now."""
    store, name = fleet.store, device.name
    measured = [run for kind in MEASURING for run in store.list_runs(kind=kind, device=name)]
    networks = [row for row in store.list_networks() if not row.source.startswith(f"{_DATASET}:")]
    used_up = _used_up(measured, networks)
    open_ids = {task.workload_id for row in networks for task in row.tasks} - used_up
    have = store.device_counts()[name].samples_ok
    numbers: dict[str, Any] = {"samples": have, "min_samples": device.min_samples}
    missing, reasons = max(device.min_samples - have, 0), [f"{have} of {device.min_samples} samples"]
    if missing and saturated(store, name) is not None:
        missing = 0
        reasons.append("more would not help")
    if missing and not open_ids:
        missing = 0
        reasons.append("nothing more to measure: tlp network add")
    gate, held_out = _for_the_gate(fleet, name, open_ids, numbers)
    reasons.append(
        f"{numbers['gate_tasks']} of {numbers['gate_min_tasks']} held-out tasks have {numbers['of']} programs"
    )
    if numbers["gate_tasks"] < numbers["gate_min_tasks"] and not gate:
        reasons.append("no other can be measured: tlp network add NAME --holdout")
    return Lack(
        name,
        missing,
        gate,
        held_out,
        _until_flat(store, name, measured),
        f"{name}: {', '.join(reasons)}",
        numbers,
        last_at=max((run.started_at.isoformat() for run in measured), default=""),
    )


def _for_the_gate(
    fleet: Fleet, device: str, open_ids: Collection[str], numbers: dict[str, Any]
) -> tuple[int, tuple[str, ...]]:
    """Programs that held-out tasks lack before the gate can judge on this device, and those tasks' workloads."""
    tasks, wanted = fleet.settings.gate_min_tasks, fleet.settings.gate_min_programs
    held_out = sorted(choose_holdout(fleet.store).workload_ids)
    frame = fleet.store.programs_with_latency(devices=[device], workload_ids=held_out)
    programs = dict(frame.group_by("workload_id").len().iter_rows())
    enough = sum(programs.get(key, 0) >= wanted for key in held_out)
    numbers |= {"gate_tasks": enough, "gate_min_tasks": tasks, "of": wanted}
    short = sorted((wanted - programs.get(key, 0), key) for key in held_out if programs.get(key, 0) < wanted)
    chosen = [(lack, key) for lack, key in short if key in open_ids][: max(tasks - enough, 0)]
    return sum(lack for lack, _ in chosen), tuple(key for _, key in chosen)


def _used_up(measured: Sequence[Run], networks: Sequence[Network]) -> set[str]:
    """Workloads whose design spaces had no more programs when a run wanted some."""
    ids: set[str] = set()
    for run in measured:
        if run.code is not ReasonCode.EXHAUSTED:
            continue
        names, chosen = run.params.get("networks"), run.params.get("workload_ids")
        then = [row for row in networks if row.added_at <= run.started_at and (names is None or row.name in names)]
        ids.update(chosen if chosen is not None else (task.workload_id for row in then for task in row.tasks))
    return ids


def _until_flat(store: MeasurementStore, device: str, measured: Sequence[Run]) -> bool:
    """Whether the last bootstrap of a device was one that asks whether its samples are enough."""
    for run in sorted(measured, key=lambda run: run.started_at, reverse=True):
        if run.kind is RunKind.BOOTSTRAP and "until_flat" in run.params:
            return bool(run.params["until_flat"])
    return any("enough" in run.result for run in store.list_runs(kind=RunKind.EVALUATE, device=device))
