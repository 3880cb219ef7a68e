"""Whether a device makes a training due, and which devices train together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage import Device, MeasurementStore
from tlp.model.checkpoint import Manifest
from tlp.model.nearest import similarity
from tlp.runs import OUT_OF_WORK
from tlp.settings import Settings

MAX_AUXILIARIES = 3  # the paper: two or three tasks help, a fourth auxiliary costs accuracy


@dataclass(frozen=True)
class Decision:
    """Whether a device makes a training due.

    Attributes:
        train: it does.
        reason: one sentence with the numbers.
        numbers: what the sentence was made from.
    """

    train: bool
    reason: str
    numbers: Mapping[str, int]


def new_samples(store: MeasurementStore, device: str, watermark: int) -> int:
    """OK samples of a device since a watermark."""
    return sum(frame.height for frame in store.iter_samples(devices=[device], after=watermark))


def decide(
    store: MeasurementStore, settings: Settings, device: str, champion: Manifest | None, *, force: bool = False
) -> Decision:
    """Whether `device` makes a training due.

    A device without a head needs its `min_samples`; one with a head needs `retrain_min_new_samples` (or its
    `min_samples`, if that is less) since the champion's watermark. `force` needs one sample.

    Raises:
        NotFoundError: no such device.
    """
    row = store.get_device(device)
    have = store.device_counts()[device].samples_ok
    numbers = {"samples": have, "min_samples": row.min_samples}
    if row.state in OUT_OF_WORK:
        return Decision(False, f"{device} is {row.state} and gets no new work", numbers)
    if have == 0:
        return Decision(False, f"{device} has no samples yet", numbers)
    if force:
        return Decision(True, f"asked for, with {have} samples of {device}", numbers)
    if champion is None or device not in champion.heads:
        if have >= row.min_samples:
            return Decision(True, f"{device} is a new task: {have} samples, {row.min_samples} needed", numbers)
        lacking = row.min_samples - have
        return Decision(
            False,
            f"{device} has {have} of {row.min_samples} samples, {lacking} lacking",
            numbers | {"lacking": lacking},
        )
    needed = min(settings.retrain_min_new_samples, row.min_samples)
    new = new_samples(store, device, champion.watermark)
    numbers |= {"new_samples": new, "needed": needed, "watermark": champion.watermark}
    since = f"{new} new samples of {device} since watermark {champion.watermark}, {needed} needed"
    return Decision(new >= needed, since, numbers)


def choose_devices(store: MeasurementStore, device: Device, champion: Manifest | None) -> list[str]:
    """Devices to train together: the champion's heads that the store has, the device, and auxiliaries of its family.

    Auxiliaries are the most similar targets with their quota full, at most `MAX_AUXILIARIES`; a champion's heads all
    stay. Sorted by name.
    """
    counts = store.device_counts()
    family = [d for d in store.list_devices() if d.family == device.family and counts[d.name].samples_ok > 0]
    names = {d.name for d in family}
    chosen = {device.name} | (names & set(champion.heads) if champion else set())
    free = MAX_AUXILIARIES - (len(chosen) - 1)
    ready = [d for d in family if d.name not in chosen and counts[d.name].samples_ok >= d.min_samples]
    ready.sort(key=lambda d: (similarity(device.target, d.target), counts[d.name].samples_ok, d.name), reverse=True)
    return sorted(chosen | {d.name for d in ready[: max(free, 0)]})
