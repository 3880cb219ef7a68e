"""The samplers of `tlp measure --sampler`, each opened for a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from storage import Device, MeasurementStore
from tlp.core.errors import InvalidInputError, ModelFormatError, NotFoundError, RegistryError
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.measure import Proposer
from tlp.model.checkpoint import Checkpoint
from tlp.model.nearest import similarity
from tlp.model.predictor import Predictor
from tlp.programs.space import DesignSpace
from tlp.search.array_scores import ScoreArrays
from tlp.search.array_search import ArraySearch
from tlp.search.proposers import PerWorkload, RandomProposer
from tlp.search.select import Guides, SelectProposer

POPULATION: Final = 512  # of the evolutionary sampler
GENERATIONS: Final = 3
RANDOM_SHARE: Final = 0.3  # of its programs, so that the model also sees what it misjudges
MAX_RELATIVES: Final = 3


def open_random(fleet: Fleet, device: Device) -> Proposer:
    """Programs drawn at random from TVM's design space."""
    return random_programs(device.target, fleet.settings.seed)


def random_programs(target: Mapping[str, Any], seed: int = 0) -> Proposer:
    """Programs drawn at random for a target."""
    return _per_space(target, lambda space: RandomProposer(space, seed))


def open_evolutionary(fleet: Fleet, device: Device) -> Proposer:
    """Programs that the champion takes for fast ones, and a random share; random ones, and a note, without a champion.

    Raises:
        RegistryUnavailableError: MLflow does not answer.
    """
    try:
        predictor = Predictor(
            Checkpoint.load(fleet.registry.resolve(device.family, device.name).checkpoint_dir),
            device.name,
            target=device.target,
            family=device.family,
            threads=fleet.settings.torch_threads,
            torch_device=fleet.settings.torch_device,
        )
    except (NotFoundError, RegistryError, ModelFormatError, InvalidInputError) as exc:
        say(f"no champion judges programs on {device.name}, they are drawn at random: {exc.message}")
        return open_random(fleet, device)
    return likely_fast(predictor.score, device.target, fleet.settings.seed)


def likely_fast(
    score: ScoreArrays, target: Mapping[str, Any], seed: int = 0, random_share: float = RANDOM_SHARE
) -> Proposer:
    """Programs that a model takes for fast ones, and a random share."""
    return _per_space(
        target,
        lambda space: ArraySearch(
            space, score, population=POPULATION, generations=GENERATIONS, seed=seed, epsilon=random_share
        ),
    )


def open_select(fleet: Fleet, device: Device) -> Proposer:
    """Representative, new, uncertain and promising programs (`tlp.search.select`)."""
    guides = Guides(fleet.store, device, _relatives(fleet.store, device), fleet.settings.seed)
    return _per_space(device.target, lambda space: SelectProposer(space, guides, fleet.settings.seed))


def _per_space(target: Mapping[str, Any], open_proposer: Callable[[DesignSpace], Proposer]) -> Proposer:
    return PerWorkload(lambda workload: open_proposer(DesignSpace(workload, target)))


def _relatives(store: MeasurementStore, device: Device) -> list[Device]:
    """Devices of the family with samples, the most similar first."""
    counts = store.device_counts()
    family = [
        other
        for other in store.list_devices()
        if other.name != device.name and other.family == device.family and counts[other.name].samples_ok
    ]
    family.sort(
        key=lambda other: (similarity(device.target, other.target), counts[other.name].samples_ok), reverse=True
    )
    return family[:MAX_RELATIVES]
