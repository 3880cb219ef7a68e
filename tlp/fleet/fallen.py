"""What follows at once when the live quality of the champion fell (`tlp.fleet.quality`): `on_live_fall = rollback`.

With `retrain`, the default, nothing moves: the next retraining is due (`tlp.training.plan`).
"""

from __future__ import annotations

from collections.abc import Iterator

from storage import Actor, Device, ModelEvent, ReasonCode
from tlp.core.errors import InvalidInputError, NotFoundError, RegistryError, RegistryUnavailableError, TlpError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.registry import CHAMPION
from tlp.fleet import quality


def roll_back(fleet: Fleet, device: Device) -> ModelEvent | None:
    """Move `champion` back to the newest good one with a head for the device, if it fell there and the setting says so.

    The version it was on is rejected, so nothing but a person brings it back; what it did before that does not count
    then. A device with a pin of its own says nothing of the champion; what is held stays. A registry that fails is told
    and not raised: the nightly retraining looks again.
    """
    if fleet.settings.on_live_fall != "rollback":
        return None
    try:
        return _roll_back(fleet, device)
    except TlpError as exc:
        say(f"{device.name}: whether the champion fell is not settled: {exc.message}")
        return None


def _roll_back(fleet: Fleet, device: Device) -> ModelEvent | None:
    registry, family = fleet.registry, device.family
    try:
        now = registry.resolve(family, device.name)
    except NotFoundError:
        return None
    if now.alias != CHAMPION:
        return None
    moves = [e.at for e in registry.history(family) if e.alias == CHAMPION and e.to_version == str(now.version)]
    fell = quality.fell(fleet, device.name, str(now.version), since=moves[-1] if moves else None)
    if fell is None:
        return None
    target = next(_earlier(fleet, device, now.version), None)
    if target is None:
        say(f"{fell}; no earlier champion knows {device.name}, so version {now.version} stays")
        return None
    if (hold := registry.standing(family, now.version).why_held()) is not None:
        say(f"{fell}; version {now.version} stays: {hold}")
        return None
    try:
        event = registry.rollback(
            family, target, reason=fell, by=Actor.PIPELINE, code=ReasonCode.LIVE_FALL, leaving=now.version
        )
    except InvalidInputError:  # for another device, or by a person, champion was moved meanwhile
        return None
    say(f"{fell}; champion goes back to version {target}")
    return event


def _earlier(fleet: Fleet, device: Device, current: int) -> Iterator[int]:
    for version in fleet.registry.last_good(device.family, None):
        try:
            if version != current and device.name in fleet.registry.resolve(device.family, ref=version).devices:
                yield version
        except RegistryUnavailableError:
            raise
        except (NotFoundError, RegistryError):  # its files are gone
            continue
