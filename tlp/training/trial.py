"""A trial: a version is the pin of one serving device while it tunes, and the champion scores the same programs.

The version proposes; both score every round (`RoundQuality`, the champion's as its shadow). Over the same programs
the two accuracies can be compared as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage import Device, DeviceState, MeasurementStore, ModelEvent, RoundQuality, VersionEvent, VersionState
from tlp.core.fleet import Fleet
from tlp.core.registry import Standing, pin_alias
from tlp.fleet import quality, states
from tlp.language.encoders import METASCHEDULE
from tlp.training.kinds import trained_kind


@dataclass(frozen=True)
class Result:
    """How a trial ended."""

    won: bool
    reason: str


def running(store: MeasurementStore, model: str | None = None) -> list[VersionEvent]:
    """The trials of a model (of all if None) that are not over, by their STAGED events."""
    newest = {(event.model, event.version): event for event in store.version_events(model=model)}
    return [event for event in newest.values() if event.state is VersionState.STAGED]


def is_asked_by_tuning(kind: str, language: str) -> bool:
    """Whether tuning uses such models by itself, so that one can be tried on a device."""
    return trained_kind(kind).has_strategies and language == METASCHEDULE


def pin_of(staged: VersionEvent) -> str:
    """The alias of the device that a version is tried on."""
    return pin_alias(str(staged.device))


def choose_device(store: MeasurementStore, heads: Sequence[str], first: str, standing: Standing) -> str | None:
    """A serving device that can be measured, that nobody pinned or held; the one trained for if it is among them."""
    rows = {device.name: device for device in store.list_devices()}
    for name in sorted({*heads} & rows.keys(), key=lambda name: (name != first, name)):
        said = name in standing.pins or name in standing.holds or f"rejected-{name}" in standing.tags
        if not said and rows[name].has_hardware and _is_serving(store, rows[name]):
            return name
    return None


def _is_serving(store: MeasurementStore, device: Device) -> bool:
    busy = device.state in states.BUSY
    state = states.state_before(store, device.name, *states.BUSY) if busy else device.state
    return state is DeviceState.SERVING


def was_pinned(staged: VersionEvent, events: Sequence[ModelEvent]) -> bool:
    """Whether the pin was set since the trial began, by the recorded moves."""
    pin = pin_of(staged)
    return any(e.alias == pin and e.to_version == staged.version and e.at >= staged.at for e in events)


def rounds(store: MeasurementStore, staged: VersionEvent, champion: int | None) -> list[tuple[RoundQuality, ...]]:
    """Rounds of a trial that both models scored, each with what the champion says of it, oldest first."""
    scored = store.round_qualities(device=staged.device, version=str(champion), shadow=True)
    shadows = {(row.run_id, row.workload_id, row.at): row for row in quality.usable(scored)}
    live = quality.usable(store.round_qualities(device=staged.device, version=staged.version))
    pairs = [(row, shadows.get((row.run_id, row.workload_id, row.at))) for row in live if row.at >= staged.at]
    return [(row, shadow) for row, shadow in pairs if shadow is not None]


def progress(fleet: Fleet, staged: VersionEvent) -> str:
    """`12 of 64`: rounds of a trial so far, whatever the champion is."""
    shadows = fleet.store.round_qualities(device=staged.device, shadow=True)
    done = {(row.run_id, row.workload_id, row.at) for row in quality.usable(shadows) if row.at >= staged.at}
    return f"{min(len(done), fleet.settings.stage_rounds)} of {fleet.settings.stage_rounds}"


def result(fleet: Fleet, staged: VersionEvent, champion: int | None) -> Result | None:
    """How a trial ended; None if it has had fewer than `stage_rounds` rounds."""
    needed = fleet.settings.stage_rounds
    both = rounds(fleet.store, staged, champion)[:needed]
    if len(both) < needed:
        return None
    ours, theirs = (quality.accuracy([pair[index] for pair in both]) for index in (0, 1))
    assert ours is not None and theirs is not None, "usable rounds have pairs"
    reason = (
        f"version {staged.version} ranked {ours:.1%} of pairs right in {needed} rounds on {staged.device}, "
        f"the champion {theirs:.1%} of the same"
    )
    return Result(ours >= theirs, reason)
