"""What became of each version, by the store: its events since it was registered."""

from __future__ import annotations

from storage import MeasurementStore, VersionEvent, VersionState


def became(
    store: MeasurementStore, model: str | None = None, version: str | None = None
) -> dict[tuple[str, str], list[VersionEvent]]:
    """(model, version) → its events, oldest first, from its newest REGISTERED on.

    A registry that was made anew gives its numbers again. Versions from before there were such events have one.
    """
    events: dict[tuple[str, str], list[VersionEvent]] = {}
    for event in store.version_events(model=model, version=version):
        key = event.model, event.version
        if event.state is VersionState.REGISTERED:
            events[key] = []
        events.setdefault(key, []).append(event)
    return events
