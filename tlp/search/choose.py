"""The sampler that a person asked for by name."""

from __future__ import annotations

from storage import Device, MeasurementStore
from tlp.core.errors import InvalidInputError, ModelFormatError, NotFoundError, RegistryError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.measure.contract import Sampler
from tlp.search.samplers import RandomSampler

RANDOM, EVOLUTIONARY, SELECT = "random", "evolutionary", "select"
SAMPLERS = (RANDOM, EVOLUTIONARY, SELECT)
DEFAULT_SAMPLER = SELECT
"""Of bootstrap: needs no champion, and is ahead of random choice at 25% of a pool (docs/sampling.md)."""
MAX_RELATIVES = 3


def require_sampler(name: str, device: str, samples: int) -> None:
    """Raise InvalidInputError if there is no sampler of that name."""
    if name not in SAMPLERS:
        raise InvalidInputError(
            f"sampler {name!r} is not known, there is {', '.join(SAMPLERS)}",
            next_command=f"tlp measure {device} --samples {samples} --sampler random",
        )


def open_sampler(fleet: Fleet, device: Device, name: str) -> Sampler:
    """Make a sampler for a device.

    `evolutionary` without a champion that can score the device is `random`, and says so.

    Raises:
        RegistryUnavailableError: MLflow does not answer (evolutionary only).
    """
    if name == EVOLUTIONARY:
        return _evolutionary(fleet, device)
    if name == SELECT:
        from tlp.search.guided import SelectiveSampler

        return SelectiveSampler(
            fleet.store, device.name, _relatives(fleet.store, device), device.target, fleet.settings.seed
        )
    return RandomSampler(device.target, fleet.settings.seed)


def _relatives(store: MeasurementStore, device: Device) -> list[str]:
    """Devices of the family with samples, the most similar first."""
    from tlp.model.nearest import similarity

    counts = store.device_counts()
    family = [
        other
        for other in store.list_devices()
        if other.name != device.name and other.family == device.family and counts[other.name].samples_ok
    ]
    family.sort(
        key=lambda other: (similarity(device.target, other.target), counts[other.name].samples_ok), reverse=True
    )
    return [other.name for other in family[:MAX_RELATIVES]]


def _evolutionary(fleet: Fleet, device: Device) -> Sampler:
    from tlp.model.checkpoint import Checkpoint
    from tlp.model.predictor import Predictor
    from tlp.search.guided import EvolutionarySampler

    try:
        found = fleet.registry.resolve(device.family, device.name)
        predictor = Predictor(
            Checkpoint.load(found.checkpoint_dir),
            device.name,
            target=device.target,
            family=device.family,
            threads=fleet.settings.torch_threads,
            torch_device=fleet.settings.torch_device,
        )
    except (NotFoundError, RegistryError, ModelFormatError, InvalidInputError) as exc:
        say(f"no champion to guide the search for programs on {device.name}, they are drawn at random: {exc.message}")
        return RandomSampler(device.target, fleet.settings.seed)
    return EvolutionarySampler(predictor.score_many, device.target, fleet.settings.seed)
